"""`python -m tests.ecosystem`: run every case, and write docs/ecosystem.md; 1 if a number differs.

python -m tests.ecosystem peft lightning      some libraries; nothing is written
"""

from __future__ import annotations

import sys
import warnings

import tests.conftest  # noqa: F401  (its devices and options of the compiler, before JAX starts)
from tests.ecosystem.cases import CASES
from tests.ecosystem.table import PAGE, measured, written


def main(libraries: list[str]) -> int:
    """Run the cases of some libraries, or of all."""
    warnings.simplefilter("ignore")
    chosen = [case for case in CASES if not libraries or case.library in libraries]
    found = []
    for case in chosen:
        row = measured(case)
        found.append(row)
        print(f"{case.library:<18} {case.what:<58} {row.fault or 'equal'}", flush=True)
    if not libraries:
        PAGE.write_text(written(PAGE.read_text(), found))
    return int(any(row.fault for row in found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
