"""Run them: `python -m examples.notebooks`, `python -m examples.notebooks both_at_once --write`.

Without names: all of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from . import comparing, running

FOLDER = Path(__file__).parent
LIMIT = 600.0  # seconds for one notebook


def main(arguments: Sequence[str] | None = None, folder: Path = FOLDER) -> int:
    """Run notebooks and compare them with what is kept.

    Args:
        arguments: the command line; None reads it from `sys.argv`.
        folder: where the notebooks are.

    Returns:
        0; 1 if one failed or differs; 2 if there is none of a given name.
    """
    there = sorted(path.stem for path in folder.glob("*.ipynb"))
    parser = argparse.ArgumentParser(
        prog="python -m examples.notebooks",
        description="Run the notebooks; what is kept must agree with what is computed.",
    )
    parser.add_argument("names", nargs="*", help=f"which: {', '.join(there)}")
    parser.add_argument("--write", action="store_true", help="keep what is computed")
    parser.add_argument("--seconds", type=float, default=LIMIT, help="limit for each (600)")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.names) - set(there))
    if unknown:
        print(f"there is no notebook {', '.join(unknown)}; there are {', '.join(there)}")
        return 2
    names = options.names or there
    good = [_check(folder / f"{name}.ipynb", options.seconds, options.write) for name in names]
    return 0 if all(good) else 1


def _check(path: Path, seconds: float, write: bool) -> bool:
    """Run one notebook, and say how it went."""
    started = time.perf_counter()
    kept = running.read(path)
    try:
        computed = running.run(kept, seconds=seconds)
    except running.NotebookError as error:
        print(f"{path.stem}: {error}")
        return False
    took = f"{len(computed.cells)} cells in {time.perf_counter() - started:.0f} s"
    problems = comparing.private(computed)
    if not write:
        problems += comparing.differences(kept, computed)
    elif not problems:
        running.write(path, computed)
    print(f"{path.stem}: {took}, {'kept' if write and not problems else _summary(problems)}")
    return not problems


def _summary(problems: list[str]) -> str:
    return "\n  ".join([f"{len(problems)} faults:", *problems]) if problems else "as kept"


if __name__ == "__main__":
    sys.exit(main())
