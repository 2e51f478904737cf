"""Test isoshard with other versions of Python, JAX and torch.

    python -m tools.versions test newest              the whole suite with a pair (make test-matrix)
    python -m tools.versions test newest tests/core   a part of it
    python -m tools.versions again newest             the files of the tests that failed
    python -m tools.versions check newest             what runs on each change (make test-newest)
    python -m tools.versions check latest             the same on what pip gives this Python today
    python -m tools.versions constraints newest       write its constraints/ file anew
    python -m tools.versions docs                     write the tables of docs/compatibility.md

Environments are shared by all checkouts of the machine: `~/.cache/isoshard/environments`, or
`ISOSHARD_ENVIRONMENTS`.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.harness import documents

from . import checks, environments, matrix
from .pairs import LATEST, PAIRS, ROOT


def test(name: str, parts: Sequence[str], arguments: Sequence[str]) -> int:
    """Run tests with a pair, and keep what they came to.

    Args:
        name: of the pair.
        parts: folders or files of tests; none for what is usual for the pair.
        arguments: for pytest.

    Returns:
        1 if a test failed.
    """
    failed = False
    for part in parts or matrix.parts(name):
        files = sorted(map(str, ROOT.glob(part))) if "*" in part else [part]
        counts = matrix.counted(_outcomes(name, files, arguments))
        failed |= bool(counts["failures"])
        if name != LATEST:  # of no version for long: printed, and not kept
            matrix.keep(name, part, counts | _when())
    return failed


def again(name: str, parts: Sequence[str], arguments: Sequence[str]) -> int:
    """Run the files of the failed tests of a pair anew, and keep what these came to.

    Args:
        name: of the pair.
        parts: those looked at; none for all.
        arguments: for pytest.

    Returns:
        1 if a test fails still.
    """
    failed = False
    for part, result in matrix.kept().get(name, {}).items():
        if (part in parts or not parts) and (files := matrix.files_of(result["failures"])):
            mended = matrix.mended(result, _outcomes(name, files, arguments))
            failed |= bool(mended["failures"])
            matrix.keep(name, part, mended | _when())
    return failed


def _outcomes(name: str, files: Sequence[str], arguments: Sequence[str]) -> dict[str, str]:
    extras = environments.FEW if name in matrix.BRIDGES_ALONE else environments.EVERYTHING
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        options = ("-p", "no:cacheprovider", "-n", "2", "--dist", "worksteal")
        command = ("-m", "pytest", *options, f"--junitxml={report}", *files, *arguments)
        code = environments.run(name, command, extras)
        if code not in (0, 1, 5) or not report.exists():  # 5: all files are skipped
            raise SystemExit(f"pytest ended with {code} at {' '.join(files)}: nothing is kept")
        return matrix.outcomes(report)


def _when() -> dict[str, str]:
    return {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "commit": _commit()}


def constraints(name: str) -> None:
    """Write the constraints of a pair: what pip would install today.

    Args:
        name: of the pair.
    """
    pair, path = PAIRS[name], ROOT / "constraints" / PAIRS[name].file
    lines = environments.resolved(name)
    head = (
        f"# Python {pair.python}, JAX {pair.jax}, torch {pair.torch}: all packages that tests and "
        "figures are made with.",
        f"# Renewed by: python -m tools.versions constraints {name}",
    )
    path.write_text("\n".join((*head, *lines)) + "\n")


def _commit() -> str:
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.versions",
        description=(__doc__ or "").partition("\n")[0],
        epilog="\n".join(
            f"  {name}: Python {pair.python}, JAX {pair.jax}, torch {pair.torch}: {pair.why}"
            for name, pair in PAIRS.items()
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=("test", "again", "check", "constraints", "docs"))
    parser.add_argument("names", nargs="*", metavar="PAIR or tests")
    options, arguments = parser.parse_known_args()
    named = [name for name in options.names if name in PAIRS or name == LATEST]
    names = named or list(PAIRS)
    parts = [name for name in options.names if name not in named]
    status = 0
    try:
        for name in names if options.command != "docs" else ():
            if options.command == "test":
                status |= test(name, parts, arguments)
            elif options.command == "again":
                status |= again(name, parts, arguments)
            elif options.command == "check":
                status |= checks.check(name)
            else:
                constraints(name)
    except environments.NoPython as error:
        print(f"tools.versions: {error}", file=sys.stderr)
        return 2
    if options.command in ("test", "again", "docs"):
        print(f"wrote {documents.put('compatibility.md', matrix.tables())}")
    return status


if __name__ == "__main__":
    sys.exit(main())
