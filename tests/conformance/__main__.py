"""The command: `python -m tests.conformance`.

python -m tests.conformance                              what a change reaches, and a sample
python -m tests.conformance --all                        everything; exit code 1 if not good enough
python -m tests.conformance --op add --op linalg.svd     some entries (names, patterns: 'fft.*')
python -m tests.conformance --columns forward,backward --samples 4
python -m tests.conformance --note                       and enter what passed in the record
python -m tests.conformance --write                      everything; and write the table to docs/
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import os
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from tools.harness import results as files
from tools.tiers import choice, record, sources

from .cells import Cell
from .columns import COLUMNS, columns_of
from .database import entries
from .expected import EXPECTED
from .judge import faults
from .pool import Task, run_all
from .report import figures, summary, write
from .worker import start, traced

RECORD = sources.ROOT / "tests" / "conformance" / "record.json"
ONE_IN = 30
"""Of the entries that a change does not reach, one of so many is run."""

MANY = 20
SEED = "8b876505e5ed"
"""Where a change reaches more entries than `MANY`, as many cells are run as so many entries have;
the same ones until `--note` says what else passes."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if the outcome is good enough."""
    options = _options(arguments)
    columns = tuple(options.columns.split(",")) if options.columns else tuple(COLUMNS)
    names = _entries(options.op)
    cells = {name: columns_of(entries()[name], columns) for name in names}
    if not (options.op or options.all):
        cells = _chosen(cells)
    tasks = [Task(name, tuple(some)) for name, some in cells.items() if some]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # for the workers: XLA's remarks on layouts
    started = time.monotonic()
    seen = {key: reason for key, reason in EXPECTED.items() if key[1] in columns}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) if options.note else None
        results = run_all(
            tasks,
            start,
            jobs=options.jobs,
            limit=options.limit,
            options={"limit": options.samples, "trace": trace},
            report=Progress(len(tasks), options.verbose),
        )
        if options.note:
            ran = traced(Path(folder))
            good = {name for name in ran if not faults({name: results[name]}, seen, whole=False)}
            note(
                {name: ran[name] for name in good},
                ran.keys() - good,
                own=traced(Path(folder), "own"),
                whole=options.all,
            )
    wrong = faults(results, seen, whole=options.all and options.samples is None)
    print(f"\n{summary(results)}\n\n{len(tasks)} entries in {time.monotonic() - started:.0f} s")
    for line in wrong:
        print(line)
    if options.write:
        print("wrote", *write(results, seen, files.command(arguments)))
    passed = sum(figure.passed for figure in figures(results))
    print(f"conformance: {passed} passed, {len(wrong)} failed", flush=True)  # as test runners end
    return 1 if wrong else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="torch's operator database on the jax device",
    )
    parser.add_argument("--all", action="store_true", help="every entry, whatever the record says")
    parser.add_argument("--op", action="append", help="only this entry; a name or a pattern")
    parser.add_argument("--columns", help=f"some of {','.join(COLUMNS)}")
    parser.add_argument("--samples", type=int, help="at most so many samples per cell")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one entry")
    parser.add_argument("--note", action="store_true", help="enter what passed in the record")
    parser.add_argument(
        "--write", action="store_true", help="--all --note, and write docs/conformance.md"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each cell that fails")
    options = parser.parse_args(arguments)
    unknown = set((options.columns or "forward").split(",")) - set(COLUMNS)
    if unknown:
        parser.error(f"unknown columns {sorted(unknown)}; possible are {', '.join(COLUMNS)}")
    for flag in ("write", "note"):
        if getattr(options, flag) and (options.op or options.columns or options.samples):
            parser.error(f"--{flag} is for a whole run: leave out --op, --columns and --samples")
    options.all = options.all or options.write
    options.note = options.note or options.write
    return options


def _entries(patterns: list[str] | None) -> list[str]:
    found = [
        name
        for name in entries()
        if not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if not found:
        raise SystemExit(f"no entry of the database is called {' or '.join(patterns or [])}")
    return found


def harness() -> list[str]:
    """The files that judge an entry: a change there makes every entry run."""
    around = {f"tests/conformance/{name}.py" for name in ("__main__", "pool", "report")}
    files = {*sources.python_files(["tests/conformance"])} - around
    return sorted(path for path in files if not Path(path).name.startswith("test_"))


def _chosen(cells: dict[str, list[str]]) -> dict[str, list[str]]:
    """Of all entries those that a change reaches, and a sample."""
    kept = record.read(RECORD, harness())
    drawn = choice.choose(cells, kept, one_in=ONE_IN, seed=choice.seed_of())
    print(f"conformance: {drawn}; --all runs everything", flush=True)
    found = {name: cells[name] for name in drawn.units}
    if len(drawn.reached) <= MANY:
        return found
    every = [f"{name}, {column}" for name, columns in found.items() for column in columns]
    some = choice.drawn(every, seed=SEED, one_in=math.ceil(len(found) / MANY))
    print(f"more than {MANY} entries are reached: {len(some)} of their {len(every)} cells run")
    return {
        name: [column for column in columns if f"{name}, {column}" in some]
        for name, columns in found.items()
    }


def note(
    good: Mapping[str, Collection[str]],
    bad: Collection[str],
    *,
    own: Mapping[str, Collection[str]],
    whole: bool,
) -> None:
    """Enter entries that passed in the record, and strike out those that did not.

    Args:
        good: entry -> the files that ran in it.
        bad: those that did not pass.
        own: entry -> the files that register the operator itself.
        whole: `good` and `bad` are all entries there are: the record is made anew.
    """
    kept = None if whole else record.read(RECORD, harness())
    if kept is None:
        kept = record.new(good, harness(), own=own)
    else:
        kept.note(good, own)
        kept.forget(bad)
    kept.write(RECORD)
    print(f"wrote {RECORD}: {len(kept.units)} entries")


class Progress:
    """Tells how far a run is, on one line per fifty entries."""

    def __init__(self, total: int, verbose: bool):
        """`verbose`: also each cell that fails."""
        self.total = total
        self.verbose = verbose
        self.done = 0

    def __call__(self, entry: str, cells: dict[str, Cell]) -> None:
        """Note the cells of an entry."""
        self.done += 1
        if self.done % 50 == 0:
            print(f"{self.done} of {self.total}", flush=True)
        for column, cell in cells.items():
            if self.verbose and cell.failed:
                print(f"{entry}, {column}: {cell.status}: {cell.reason}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
