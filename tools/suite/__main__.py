"""Find what the test suite costs, and which mutants of the package it kills.

    python -m tools.suite draw            write the mutants to be tried to mutants.json
    python -m tools.suite probe           run all tests on a package with probes: an hour or less
    python -m tools.suite kill            give each mutant to the tests that come by: hours
    python -m tools.suite mutants         the shares of killed mutants, and the survivors
    python -m tools.suite costs           what each test file takes
    python -m tools.suite spare           test functions whose lines others execute (lines.py)

`probe` writes `out/suite/probe.tsv` and `out/suite/costs.json`, which the others read; what
else it is given is for pytest, and a part of the tests adds to what these files hold.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from . import costs, lines, mutants

FOLDER = mutants.ROOT / "out" / "suite"
COSTS = FOLDER / "costs.json"
PROBE = FOLDER / "probe.tsv"
LINES = FOLDER / "lines.json"
COMMANDS = ("draw", "probe", "kill", "mutants", "costs", "spare")


def probe(arguments: list[str], workers: int) -> int:
    """Run the tests on a package with probes, and write what they cost and where they come by."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    PROBE.touch()
    options = ["-p", "tools.suite.costs", f"--costs={COSTS}", f"-n{workers}", "--dist=worksteal"]
    with tempfile.TemporaryDirectory() as scratch:
        package = mutants.probed(Path(scratch) / "wheel")
        tests = arguments or ["tests", *mutants.RANKS]
        code = mutants.pytest_on(package, [*options, *tests], PROBE=str(PROBE))
        text = (package / "last.txt").read_text(errors="replace")
        (FOLDER / "probe.txt").write_text(text)
        print(*text.splitlines()[-20:], sep="\n")
    return code


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.suite", description=__doc__)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--column", default="after", help="of mutants.json, for kill: or before")
    parser.add_argument("--workers", type=int, default=2)
    options, rest = parser.parse_known_args()
    if rest and options.command != "probe":
        parser.error(f"unknown arguments: {' '.join(rest)}")
    if options.command == "draw":
        mutants.keep(mutants.drawn())
    elif options.command == "probe":
        return probe(rest, options.workers)
    elif options.command == "kill":
        with tempfile.TemporaryDirectory() as scratch:
            mutants.kill_all(PROBE, COSTS, options.column, options.workers, Path(scratch))
    elif options.command == "mutants":
        print(mutants.table(mutants.kept()))
    elif options.command == "spare":
        tests = json.loads(LINES.read_text())
        for name in lines.spare(tests):
            print(f"{tests[name]['seconds']:8.1f} s  {name}")
    else:
        print(costs.table(json.loads(COSTS.read_text())["files"]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
