"""The command: `python -m tests.batch_split`.

python -m tests.batch_split                               all entries: some minutes
python -m tests.batch_split --op 'nn.functional.conv*'    some (names, patterns)
python -m tests.batch_split --write                       all; and write docs/batch_split.md
python -m tests.batch_split --docs                        only write it again, with new reasons
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from importlib.metadata import version

from tests.conformance.database import entries
from tools.harness import results as files
from tools.harness.workers import Lost, answers
from tools.harness.xla_flags import quick_variables

from .own_cases import OWN
from .report import figures, rewritten, write
from .sent import Outcome, Sent, start

_OTHERS = ("hop.*", "custom.*", "module.*", "optim.*")
SAMPLES = 4


def main(arguments: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.batch_split", description="what operators send for a split batch"
    )
    parser.add_argument("--op", action="append", help="only this entry; a name or a pattern")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one entry")
    parser.add_argument("--write", action="store_true", help="write docs/batch_split.md")
    parser.add_argument("--docs", action="store_true", help="only write it from what is saved")
    options = parser.parse_args(arguments)
    if options.docs:
        print("wrote", rewritten())
        return 0
    if options.write and options.op:
        parser.error("--write is for a whole run: leave out --op")
    names = [name for name in named() if _fits(name, options.op or ["*"])]
    os.environ.update(quick_variables(version("jax"), os.environ.get("XLA_FLAGS", "")))
    found = answers(
        [(name,) for name in names],
        start,
        jobs=options.jobs,
        limit=options.limit,
        each=400,
        options={"limit": SAMPLES},
    )
    outcomes: dict[str, Outcome] = {}
    for (name,), answer in found:
        lost = isinstance(answer, Lost)
        outcomes[name] = Outcome(0, Sent({}, {}), answer.reason) if lost else answer
        if any(outcomes[name].sent) or outcomes[name].fault:
            print(f"{name}: {outcomes[name]}", flush=True)
    print(figures(outcomes))
    if options.write:
        print("wrote", *write(outcomes, files.command(arguments)))
    return 0


def named() -> list[str]:
    """All entries: our own cases, and those of the database of operators."""
    return [*OWN, *(name for name in entries() if not _fits(name, _OTHERS))]


def _fits(name: str, patterns: list[str] | tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    sys.exit(main())
