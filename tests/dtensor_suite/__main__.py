"""The command: `python -m tests.dtensor_suite FOLDER [file ...]`.

python -m tests.dtensor_suite ~/pytorch/test                        all of its tests of DTensor
python -m tests.dtensor_suite ~/pytorch/test test_redistribute      some files
python -m tests.dtensor_suite ~/pytorch/test test_dtensor_ops --samples 3 --choices 6
python -m tests.dtensor_suite ~/pytorch/test --json out.json        and keep what each case came to

FOLDER is the folder `test` of PyTorch 2.6's sources, which you have; nothing is downloaded, and
nothing of it is copied. What counts as passed is in `common` and `outcomes`.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tools.harness import results as files
from tools.harness.workers import Lost, answers

from .outcomes import Outcome
from .table import as_json, table
from .worker import start

WHERE = ("distributed/_tensor", "distributed/tensor/parallel", "distributed/checkpoint")
ELSEWHERE = ("test_dtensor_checkpoint", "test_dtensor_resharding")
"""Of the tests of checkpoints, those of DTensors."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 if nothing differs."""
    options = _options(arguments)
    found = _files(options.folder, options.files)
    asked = {
        "devices": options.devices,
        "strict": options.strict,
        "samples": options.samples,
        "choices": options.choices,
    }

    def answered(tasks: list[tuple[str, str | None]]):
        limit = options.limit
        return answers(tasks, start, jobs=options.jobs, limit=limit, each=60, options=asked)

    began = time.monotonic()
    outcomes: dict[str, dict[str, Outcome]] = {path.stem: {} for path in found}
    tasks: list[tuple[str, str | None]] = []
    for (file, _), cases in answered([(str(path), None) for path in found]):
        if isinstance(cases, Lost):
            outcomes[Path(file).stem]["(file)"] = Outcome("differ", [("import", cases.reason)])
        else:
            tasks += [(file, case) for case in cases]
    try:
        for (file, case), got in answered(sorted(tasks)):
            outcome = (
                Outcome("differ", [(got.status, got.reason)]) if isinstance(got, Lost) else got
            )
            outcomes[Path(file).stem][str(case)] = outcome
            if outcome.status not in ("pass", "skipped") and not options.quiet:
                for reason in outcome.reasons() or [""]:
                    print(f"{outcome.status:<7} {Path(file).stem}::{case}: {reason}", flush=True)
    except KeyboardInterrupt:
        print("interrupted: what follows is of the cases that were done")
    print(f"\n{table(outcomes)}\n{time.monotonic() - began:.0f} s")
    if options.json:
        files.write(options.json, {**files.circumstances(), "results": as_json(outcomes)}, indent=1)
    return int(any(one.status == "differ" for case in outcomes.values() for one in case.values()))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.dtensor_suite",
        description="torch's own tests of DTensor on one process, by isoshard",
    )
    parser.add_argument("folder", type=Path, help="the folder `test` of PyTorch's sources")
    parser.add_argument("files", nargs="*", help="names of test files, as test_redistribute")
    parser.add_argument("--devices", type=int, default=4, help="the world of most tests, at most 8")
    parser.add_argument("--strict", action="store_true", help="placements count as values do")
    parser.add_argument("--samples", type=int, help="of each operator at most so many samples")
    parser.add_argument("--choices", type=int, help="and of each so many choices of placements")
    parser.add_argument("--limit", type=float, default=180, help="seconds for one case")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="file to write what each case came to")
    parser.add_argument("--quiet", action="store_true", help="only the table")
    return parser.parse_args(arguments)


def _files(folder: Path, wanted: list[str]) -> list[Path]:
    """The test files of a folder, or those of some names.

    Raises:
        SystemExit: the folder has none, or none of a name.
    """
    found = {
        path.stem: path
        for place in WHERE
        for path in sorted((folder / place).rglob("test_*.py"))
        if "checkpoint" not in place or path.stem in ELSEWHERE
    }
    if not found:
        raise SystemExit(f"{folder} holds none of {', '.join(WHERE)}: give PyTorch's folder `test`")
    names = [name.removesuffix(".py") for name in wanted]
    if unknown := [name for name in names if name not in found]:
        raise SystemExit(f"no file {', '.join(unknown)} in {folder}; there are {', '.join(found)}")
    return [found[name] for name in names or found]


if __name__ == "__main__":
    sys.exit(main())
