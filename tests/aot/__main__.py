"""The command: `python -m tests.aot`, which `make aot` runs.

python -m tests.aot                     what results.json does not hold yet, for all targets
python -m tests.aot --target v5e        for one of them; two such runs may go side by side
python -m tests.aot --failed            what did not compile, as well
python -m tests.aot --again             everything anew
python -m tests.aot --known             write what is known so far, and compile nothing
python -m tests.aot --op linalg.eigh --op 'fft.*' --target v5e      some of it, and print
python -m tests.aot --steps             families, styles and exchanges, and print

Results are written to results.json and the tables as they come, unless they are only printed. They
count for the versions that they were made with; with others, everything is tried anew. Programs and
their outcomes are kept in build/aot, so that the same program is not compiled twice, and a run that
is interrupted goes on where it was.
"""

from __future__ import annotations

import argparse
import collections
import fnmatch
import functools
import hashlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.environments import python_of
from isoshard.planner.programs.targets import packages_of
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
EACH = 25
"""Entries after which what came out is written."""

LONG = (
    ("module.", "optim."),
    (
        *("linalg.", "cholesky", "geqrf", "logdet", "lu", "matrix_exp", "ormqr", "pca_lowrank"),
        *("norm.nuc", "pinverse", "qr", "svd", "triangular_solve"),
    ),
)
"""How the names of entries begin that take long, and of those that compile for minutes."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if it could."""
    options = _options(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    prints = bool(options.op or options.steps)
    started = time.monotonic()
    tasks = _tasks(options.op, options.steps)
    cells: dict[str, outcome.Cells] = {}
    for name in options.target or TARGETS:
        run = Run(TARGETS[name], options)
        known = {} if prints else outcome.kept(name, run.installed)
        found = cells[name] = {} if options.again else dict(known)
        todo = [task for task in tasks if _is_open(found.get(task[0]), options.failed)]
        with run.compiler:
            for number, (entry, rows) in enumerate(run.entries(todo), 1):
                found[entry] = outcome.cells_of(rows).get(entry, {})
                if number % EACH == 0:
                    print(f"{name}: {number} of {len(todo)}", flush=True)
                    _write(name, known | found, run, prints)
        _write(name, known | found, run, prints)
    print(f"\n{outcome.summary(cells)}\n\n{time.monotonic() - started:.0f} s")
    for line in outcome.refused(cells):
        print(line)
    if not prints:
        print("wrote", report.rewrite(EXPECTED), aot_tables.rewrite(outcome.read()))
    return 0


def _is_open(cells: Mapping[str, str] | None, failed: bool) -> bool:
    """Whether an entry is to be tried: it was not yet, or it failed and that is asked for."""
    return cells is None or (failed and not all(map(outcome.compiles, cells.values())))


def _write(target: str, cells: outcome.Cells, run: Run, prints: bool) -> None:
    """Note what is known of a target, but for entries that are no more."""
    if not prints:
        names = {*entries(), *steps.names()}
        some = {entry: found for entry, found in cells.items() if entry in names}
        outcome.note(target, some, run.versions())


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

    def entries(self, tasks: Sequence[Task]) -> Iterator[tuple[str, list[Row]]]:
        """What becomes of entries: all columns in one program, and one by one if that fails.

        Args:
            tasks: entries with the columns to try.

        Yields:
            Each entry of which all is known, with its rows.
        """
        apart: list[Task] = []
        for (entry, _), found in self._exported(tasks):
            rows = self._tried(entry, found)
            if len(found.columns) > 1 and any(row.status not in ("pass", "host") for row in rows):
                apart += [(entry, (column,)) for column in found.columns]
            elif rows:
                yield entry, rows
        parts: dict[str, list[list[Row]]] = collections.defaultdict(list)
        wanted = collections.Counter(entry for entry, _ in apart)
        for (entry, _), found in self._exported(apart):
            parts[entry].append(self._tried(entry, found))
            if len(parts[entry]) == wanted[entry] and all(parts[entry]):
                yield entry, [row for rows in parts[entry] for row in rows]

    def _tried(self, entry: str, found: Exported) -> list[Row]:
        """What becomes of each program; empty if one is not known and not to be compiled."""
        tried = [self._compiled(one) for one in found.artifacts]
        rows = [row for row in tried if row is not None]
        if len(rows) < len(tried):
            return []
        good = [Row(entry, found.columns, "pass", "")]  # there may be no program: all is on host
        return [*good, Row(entry, found.on_host, "host", ""), *rows]

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
        if not self.options.known and not self._counts(found):
            found = self.compiler.compile(artifact.request(self.options.folder))._asdict()
            found["versions"] = dict(self.compiler.versions)
            self.outcomes.note(artifact.file, found)
        return None if found is None else Row(entry, columns, found["status"], found["reason"])

    def _counts(self, found: Mapping[str, Any] | None) -> bool:
        """Whether what is known of a program holds; one that took too long may have more time."""
        if found is None or found["status"] == "timeout":
            return False
        return outcome.same_versions(found.get("versions", {}), self.installed)

    @functools.cached_property
    def installed(self) -> dict[str, str]:
        """Versions of the packages that compile, which results have to be of to count."""
        python = self.options.python
        return packages_of(str(python)) if python.exists() and not self.options.known else {}

    def versions(self) -> dict[str, str]:
        """Of the compiler's packages, of the last program that it compiled."""
        return dict(self.compiler.versions) or self.outcomes.last.get("versions", {})


def _key(task: Task) -> str:
    entry, columns = task
    return f"{entry}: {','.join(columns)}"


def _when(name: str) -> tuple[int, bytes]:
    """Where an entry stands: what is long comes last, else each part of a run is a sample."""
    long = [place for place, begins in enumerate(LONG, 1) if name.startswith(begins)]
    return sum(long), hashlib.sha256(name.encode()).digest()


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
