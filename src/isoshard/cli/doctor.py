"""`isoshard doctor`: what is installed, what works on these devices, and how to get the rest.

Versions are read from package metadata, so nothing is imported to be listed (`packages.py`).
Everything below "What works" was tried while you waited (`probes.py`), each in a process that may
hang or die without harm (`survey.py`). What is not installed is no fault; what is installed and
does not work is listed at the end, and then the exit status is 1.

>>> broken = Result("shard", FAILS, "RuntimeError: no device")
>>> Examination([], [broken]).errors
[('shard an array, compute on it', 'RuntimeError: no device')]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import textwrap
from collections.abc import Iterable, Sequence

import rich.box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from isoshard.core.installation import install_command, origin
from isoshard.planner.programs.targets import Planned, planned

from . import cluster
from .output import Output
from .packages import EXTRAS, Package, missing_extras, packages, torch_tpu_warning
from .probes import FAILS, MISSING, PROBES, WORKS, Result
from .survey import survey

_LOOK = {WORKS: ("✓", "green"), MISSING: ("-", "yellow"), FAILS: ("✗", "red")}
_REASON = 300  # characters of a reason in the last lines; the table above has all of it


@dataclasses.dataclass(frozen=True)
class Examination:
    """What `isoshard doctor` sees.

    Attributes:
        packages: those that isoshard always needs, and the optional ones that are installed.
        results: of the probes.
        targets: the hardware that programs can be compiled for.
        extras: of isoshard, for users, that are not installed.
        origin: where isoshard was installed from, in words.
        warning: what to mind, besides.
    """

    packages: Sequence[Package]
    results: Sequence[Result]
    targets: Sequence[Planned] = ()
    extras: Sequence[str] = ()
    origin: str = ""
    warning: str = ""

    @property
    def errors(self) -> list[tuple[str, str]]:
        """What is installed and does not work: its title and the reason."""
        wrong = [
            (package.name, f"{package.problem}; isoshard takes {package.needs or 'any version'}")
            for package in self.packages
            if package.problem
        ]
        failed = [result for result in self.results if result.status == FAILS]
        return wrong + [(PROBES[result.name].title, result.detail) for result in failed]

    @property
    def advice(self) -> list[tuple[str, str]]:
        """What has a problem or is missing, and what to do about it; the extras left out."""
        lines = [(package.name, package.fix) for package in self.packages if package.problem]
        lines += [
            (PROBES[result.name].title, result.fix)
            for result in self.results
            if result.fix and not _is_optional(result)
        ]
        return lines + [(target.title, target.fix) for target in self.targets if target.problem]

    def report(self) -> dict[str, object]:
        """The examination as data, for `--json` and for bug reports."""
        return {
            "healthy": not self.errors,
            "faults": [{"title": title, "reason": reason} for title, reason in self.errors],
            "origin": self.origin,
            "warning": self.warning,
            "system": f"{platform.system()} {platform.release()} {platform.machine()}",
            "packages": [
                dataclasses.asdict(package)
                | {"problem": package.problem, "untried": package.untried, "fix": package.fix}
                for package in self.packages
            ],
            "extras": [
                {"name": extra, "purpose": EXTRAS[extra], "fix": install_command(extra)}
                for extra in self.extras
            ],
            "checks": [
                {"title": PROBES[result.name].title} | dataclasses.asdict(result)
                for result in self.results
            ],
            "planning": [dataclasses.asdict(target) for target in self.targets],
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run `isoshard doctor`.

    Args:
        argv: the command line after `isoshard doctor`; None reads it from `sys.argv`.

    Returns:
        1 if something that is installed does not work, or the ranks of a run cannot run together;
        else 0.
    """
    options = _options(argv)
    if options.cluster:
        return cluster.examine(options)
    console, results = Output(stderr=options.json), []
    with console.status("trying what works here ..") as status:
        for result in survey(list(PROBES), devices=options.devices, timeout=options.timeout):
            results.append(result)
            status.update(f"tried: {PROBES[result.name].title} ..")
    examination = Examination(
        packages(),
        results,
        planned(),
        missing_extras(),
        origin().describe(),
        torch_tpu_warning(),
    )
    if options.json:
        print(json.dumps(examination.report(), indent=2))
    else:
        show(console, examination)
    return 1 if examination.errors else 0


def show(console: Output, examination: Examination) -> None:
    """Print an examination: tables, what can be added and mended, and what does not work.

    Args:
        console: to print to.
        examination: what to print.
    """
    if examination.origin:
        version = next(p.version for p in examination.packages if p.name == "isoshard")
        console.print(Text(f"isoshard {version}, from {examination.origin}"), soft_wrap=True)
    console.print(_installed_table(examination.packages))
    console.print(_checks_table(examination.results))
    if examination.targets:
        console.print(_planning_table(examination.targets))
    if examination.extras:
        named = ", ".join(f"{extra} ({EXTRAS[extra]})" for extra in examination.extras)
        console.print(Padding(Text.assemble(("Extras to add: ", "dim"), named), (0, 0, 0, 2)))
        command = install_command(examination.extras[0])
        console.print(Text.assemble(("  one of them: ", "dim"), command), soft_wrap=True)
    fixes = _by_fix(examination.advice)
    for fix, checks in fixes.items():
        console.print(Text.assemble((f"  {checks}: ", "dim"), fix), soft_wrap=True)
    if examination.warning and examination.warning not in fixes:
        console.print(Text(f"  {examination.warning}", "yellow"), soft_wrap=True)
    if not examination.errors:
        console.print(Text("isoshard works on this machine.", "green"))
        return
    console.print(Text("What does not work:", "red"))
    for title, reason in examination.errors:
        line = f"  {title}: {textwrap.shorten(reason, _REASON, placeholder=' ..')}"
        console.print(Text(line, "red"), soft_wrap=True)


def _is_optional(result: Result) -> bool:
    """Whether a probe was left out because an extra is not installed."""
    return result.status == MISSING and bool(PROBES[result.name].needs)


def _by_fix(advice: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each fix once, with everything it mends.

    >>> _by_fix([("flax", "pip install flax"), ("optax", "pip install flax")])
    {'pip install flax': 'flax, optax'}
    """
    titles: dict[str, list[str]] = {}
    for title, fix in advice:
        titles.setdefault(fix, []).append(title)
    return {fix: ", ".join(names) for fix, names in titles.items()}


def _installed_table(listed: Iterable[Package]) -> Table:
    table = Table("package", "installed", "isoshard takes", title="Installed", box=rich.box.SIMPLE)
    for package in listed:
        remark = package.problem or ", ".join(filter(None, (package.version, package.untried)))
        colour = "red" if package.problem else "yellow" if package.untried else "green"
        takes = package.needs + (f" (tried: {package.tried})" if package.tried else "")
        table.add_row(package.name, Text(remark, colour), takes)
    return table


def _checks_table(results: Iterable[Result]) -> Table:
    """What was tried; what needs an extra that is not installed is named with the extras."""
    table = Table("", "check", "seen", "s", title="What works", box=rich.box.SIMPLE)
    for result in results:
        if _is_optional(result):
            continue
        mark, colour = _LOOK[result.status]
        detail, seconds = Text(result.detail), f"{result.seconds:.1f}"
        table.add_row(Text(mark, colour), PROBES[result.name].title, detail, seconds)
    return table


def _planning_table(targets: Iterable[Planned]) -> Table:
    """The hardware that can be planned for without being attached."""
    table = Table("", "planning", "by", title="What can be planned", box=rich.box.SIMPLE)
    for target in targets:
        mark, colour = _LOOK[MISSING if target.problem else WORKS]
        by = ", ".join(f"{name} {version}" for name, version in target.versions.items())
        table.add_row(Text(mark, colour), target.title, Text(target.problem or by))
    return table


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="isoshard doctor",
        description="What is installed, which devices there are, what works and what does not.",
        epilog="Exit status: 1 if something that is installed does not work, or the ranks cannot "
        "run together; else 0. What is not installed does not count.",
    )
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    parser.add_argument(
        "--devices", type=_positive, metavar="N", help="simulate N CPU devices for the checks"
    )
    parser.add_argument(
        "--cluster",
        action="store_true",
        help="in every rank of a run: whether they reach each other, how fast, what differs",
    )
    parser.add_argument(
        "--timeout", type=float, default=60.0, metavar="S", help="seconds per check or step (60)"
    )
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a count of devices, 1 or more, not {text!r}")
    return int(text)
