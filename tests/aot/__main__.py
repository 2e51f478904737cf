"""The command: `python -m tests.aot`, which `make aot` runs.

python -m tests.aot                     everything, for all targets; and write the table
python -m tests.aot --op linalg.eigh --op 'fft.*' --target v5e      some of it, and print
python -m tests.aot --steps             families, styles and exchanges, and print
python -m tests.aot --known             write the table of what is known so far

What came out is kept in build/aot, so a run that is interrupted goes on where it was. After a
change of the sources, `--again` exports everything once more, `--failed` what did not compile. The
same program is not compiled twice.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.environments import python_of
from tests.conformance import report
from tests.conformance.columns import columns_of
from tests.conformance.database import entries
from tests.conformance.expected import EXPECTED
from tools.harness.results import ROOT
from tools.harness.workers import Lost, Start, answers

from . import aot_tables, collecting, outcome, steps
from .artifacts import Artifact, Exported
from .compilers import Compiler
from .outcome import COLUMNS, Row
from .progress import Progress
from .targets import TARGETS, Target

Task = tuple[str, tuple[str, ...]]
"""An entry, and the columns of it to try."""

FOLDER = ROOT / "build" / "aot"
AT_ONCE = 20
"""Entries that are exported before they are compiled: then the outcome of those is kept."""

LONG = (
    *("linalg.", "cholesky", "geqrf", "logdet", "lu", "matrix_exp", "ormqr", "pca_lowrank"),
    *("pinverse", "qr", "svd", "triangular_solve", "optim.", "module."),
)
"""How the names of entries begin that compile for minutes: they come last."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if it could."""
    options = _options(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    targets = [TARGETS[name] for name in options.target or TARGETS]
    started = time.monotonic()
    tasks = _tasks(options.op, options.steps)
    cells, versions = {}, {}
    for target in targets:
        run = Run(target, options)
        with run.compiler:
            cells[target.name] = outcome.cells_of(list(run.rows(tasks)))
        versions[target.name] = run.versions()
    print(f"\n{outcome.summary(cells)}\n\n{time.monotonic() - started:.0f} s")
    for line in outcome.refused(cells):
        print(line)
    if not (options.op or options.target or options.steps):
        print("wrote", outcome.write(cells, versions))
        print("wrote", report.rewrite(EXPECTED), aot_tables.rewrite(outcome.read()))
    return 0


class Run:
    """One target: what is exported for it, and compiled.

    Args:
        target: which.
        options: of the command.
    """

    def __init__(self, target: Target, options: argparse.Namespace):
        """See the class."""
        self.target, self.options = target, options
        self.exports = Progress(options.folder / f"exports.{target.name}.jsonl")
        self.outcomes = Progress(options.folder / f"outcomes.{target.name}.jsonl")
        self.compiler = Compiler(target.described(), options.python, limit=options.limit)
        self.done: set[Task] = set()

    def rows(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """Export and compile, some entries at a time.

        Args:
            tasks: entries with the columns to try.
        """
        for first in range(0, len(tasks), AT_ONCE):
            yield from self._some(tasks[first : first + AT_ONCE])
            done = min(first + AT_ONCE, len(tasks))
            print(f"{self.target.name}: {done} of {len(tasks)}", flush=True)

    def _some(self, tasks: Sequence[Task]) -> Iterator[Row]:
        """What becomes of entries: all columns in one program, and one by one if that fails."""
        again: list[Task] = []
        for (entry, _), found in self._exported(tasks):
            tried = [self._compiled(one) for one in found.artifacts]
            rows = [row for row in tried if row is not None]
            if len(rows) < len(tried):
                continue
            if len(found.columns) > 1 and any(row.status != "pass" for row in rows):
                again += [(entry, (column,)) for column in found.columns]
                continue
            yield Row(entry, found.columns, "pass", "")  # there may be no program: all is on host
            yield Row(entry, found.on_host, "host", "")
            yield from rows
        if again:
            yield from self._some(again)

    def _exported(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Exported]]:
        """Each task with what was exported for it, now or before."""
        missing = []
        for task in tasks:
            kept = self.exports.found(_key(task))
            found = None if kept is None else Exported.of_json(kept)
            once_more = self.options.again or (self.options.failed and self._fails(found))
            fresh = once_more and task not in self.done
            if found is not None and not fresh and all(map(self._is_there, found.artifacts)):
                yield task, found
            elif not self.options.known:
                missing.append(task)
        for start in (collecting.start, steps.start):
            mine = [one for one in missing if (one[1] == (outcome.STEP,)) == (start is steps.start)]
            yield from self._exporting(mine, start)

    def _exporting(self, tasks: Sequence[Task], start: Start) -> Iterator[tuple[Task, Exported]]:
        settings = {"folder": self.options.folder, "platform": self.target.platform}
        jobs, limit = self.options.jobs, self.options.export_limit
        for task, answer in answers(tasks, start, jobs=jobs, limit=limit, options=settings):
            if isinstance(answer, Lost):
                reason = f"while it was lowered: {answer.reason}"
                lost = Artifact(*task, self.target.platform, "", reason)
                answer = Exported(task[1], (), (lost,))
            self.exports.note(_key(task), answer.as_json())
            self.done.add(task)
            yield task, answer

    def _fails(self, exported: Exported | None) -> bool:
        """Whether a program of what was exported is known not to compile."""
        for one in exported.artifacts if exported else ():
            found = self.outcomes.found(one.file)
            if not one.file or (found is not None and found["status"] != "pass"):
                return True
        return False

    def _is_there(self, artifact: Artifact) -> bool:
        return not artifact.file or (self.options.folder / artifact.file).exists()

    def _compiled(self, artifact: Artifact) -> Row | None:
        """What becomes of one program, from what is known or by compiling it.

        None if it is not known, and nothing is to be compiled.
        """
        entry, columns = artifact.entry, artifact.columns
        if not artifact.file:
            return Row(entry, columns, "refused", artifact.reason)
        found = self.outcomes.found(artifact.file)
        again = found is None or found["status"] == "timeout"  # it may have more time now
        if again and not self.options.known:
            found = self.compiler.compile(artifact.request(self.options.folder))._asdict()
            found["versions"] = dict(self.compiler.versions)
            self.outcomes.note(artifact.file, found)
        return None if found is None else Row(entry, columns, found["status"], found["reason"])

    def versions(self) -> dict[str, str]:
        """Of the compiler's packages, of the last program that it compiled."""
        return self.outcomes.last.get("versions", {})


def _key(task: Task) -> str:
    entry, columns = task
    return f"{entry}: {','.join(columns)}"


def _when(name: str) -> tuple[bool, bytes]:
    """Where an entry stands: what is long comes last, else each part of a run is a sample."""
    return name.startswith(LONG), hashlib.sha256(name.encode()).digest()


def _tasks(patterns: list[str] | None, only_steps: bool) -> list[Task]:
    """Every step and entry that is to be tried, with its columns."""
    known = entries()
    names = [] if only_steps else sorted(known, key=_when)
    tasks = [(name, tuple(columns_of(known[name], COLUMNS[:-1]))) for name in names]
    tasks += [(name, (outcome.STEP,)) for name in steps.names()]
    return [
        task
        for task in tasks
        if not patterns or any(fnmatch.fnmatchcase(task[0], one) for one in patterns)
    ]


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.aot", description="programs compiled for machines that are not here"
    )
    parser.add_argument("--op", action="append", help="only this entry; a name or a pattern")
    parser.add_argument("--steps", action="store_true", help="only families, styles and exchanges")
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="only this one")
    parser.add_argument("--again", action="store_true", help="export again what was exported")
    parser.add_argument("--failed", action="store_true", help="export again what did not compile")
    parser.add_argument("--known", action="store_true", help="compile nothing that is not exported")
    parser.add_argument("--jobs", type=int, default=1, help="processes that export")
    parser.add_argument("--limit", type=float, default=180, help="seconds to compile a program")
    parser.add_argument("--export-limit", type=float, default=600, help="seconds to export one")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for what is known so far")
    parser.add_argument(
        "--python", type=Path, default=python_of("aot"), help="an interpreter with the compilers"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
