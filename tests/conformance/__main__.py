"""The command: `python -m tests.conformance`.

python -m tests.conformance                              everything; exit code 1 if not good enough
python -m tests.conformance --op add --op linalg.svd     some entries (names, patterns: 'fft.*')
python -m tests.conformance --columns forward,backward --samples 4
python -m tests.conformance --quick                      a sample of each entry: a minute
python -m tests.conformance --write                      everything; and write the table to docs/
python -m tests.conformance --missing                    operators that nothing computes here
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from importlib.metadata import version

from tools.harness import results as files
from tools.harness.xla_flags import quick_variables

from .cells import Cell
from .columns import COLUMNS, columns_of
from .database import entries
from .expected import EXPECTED
from .judge import faults
from .missing import missing
from .pool import Task, run_all
from .report import figures, summary, write
from .worker import start


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if the outcome is good enough."""
    options = _options(arguments)
    if options.missing:
        print(*missing(), sep="\n")
        return 0
    columns = tuple(options.columns.split(",")) if options.columns else tuple(COLUMNS)
    most, limit = len(columns), options.samples
    if options.quick:  # backward compares the results as well
        columns, most, limit = ("backward", "forward"), 1, 1
    names = _entries(options.op)
    cells = {name: columns_of(entries()[name], columns)[:most] for name in names}
    if options.quick:
        for name in _ALSO_BY_JAX & cells.keys():
            cells[name] += columns_of(entries()[name], ("jax.vjp", "complex jax.vjp"))
    tasks = [Task(name, tuple(some)) for name, some in cells.items() if some]
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # for the workers: XLA's remarks on layouts
    if options.quick:
        os.environ.update(quick_variables(version("jax"), os.environ.get("XLA_FLAGS", "")))
    started = time.monotonic()
    seen = {key: reason for key, reason in EXPECTED.items() if key[1] in columns}
    results = run_all(
        tasks,
        start,
        jobs=options.jobs,
        limit=options.limit,
        each=1000 if limit == 1 else 120,
        options={"limit": limit},
        report=Progress(len(tasks), options.verbose),
    )
    part = options.op or options.columns or options.samples or options.quick
    wrong = faults(results, seen, whole=not part)
    print(f"\n{summary(results)}\n\n{len(tasks)} entries in {time.monotonic() - started:.0f} s")
    for line in wrong:
        print(line)
    if options.write:
        print("wrote", *write(results, seen, files.command(arguments)))
    passed = sum(figure.passed for figure in figures(results))
    print(f"conformance: {passed} passed, {len(wrong)} failed", flush=True)  # as test runners end
    return 1 if wrong else 0


_ALSO_BY_JAX = frozenset(
    {
        *("__getitem__", "add", "bmm", "cumprod", "index_put", "linalg.eigh", "linalg.svd"),
        *("nn.functional.conv2d", "nn.functional.dropout", "nn.functional.layer_norm", "prod"),
        *("masked_select", "scatter", "std", "where", "module.nn.BatchNorm2d", "module.nn.LSTM"),
    }
)
"""Entries whose gradients by JAX `--quick` tries: one or more of each kind of derivative."""


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.conformance",
        description="torch's operator database on the jax device",
    )
    parser.add_argument("--op", action="append", help="only this entry; a name or a pattern")
    parser.add_argument("--columns", help=f"some of {','.join(COLUMNS)}")
    parser.add_argument("--samples", type=int, help="at most so many samples per cell")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one sample of each entry, backward or else forward, of some through JAX, compiled as "
        "the tests do",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one entry")
    parser.add_argument("--write", action="store_true", help="write docs/conformance.md")
    parser.add_argument(
        "--missing", action="store_true", help="list operators that have no lowering, and need one"
    )
    parser.add_argument("--verbose", action="store_true", help="a line for each cell that fails")
    options = parser.parse_args(arguments)
    unknown = set((options.columns or "forward").split(",")) - set(COLUMNS)
    if unknown:
        parser.error(f"unknown columns {sorted(unknown)}; possible are {', '.join(COLUMNS)}")
    if options.quick and (options.columns or options.samples):
        parser.error("--quick chooses columns and samples: leave out --columns and --samples")
    if options.write and (options.op or options.columns or options.samples or options.quick):
        parser.error("--write is for a whole run: leave out all but --jobs, --limit and --verbose")
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
