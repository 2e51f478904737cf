"""`isoshard doctor`: what is installed, what works on these devices, and how to get the rest.

Versions are read from package metadata, so nothing is imported to be listed. Everything below
"What works" was tried while you waited (`probes.py`), each in a process that may hang or die
without harm (`survey.py`).

>>> [p.name for p in packages() if p.extra is None]
['isoshard', 'python', 'jaxlib', 'jax', 'numpy', 'rich']
>>> Package("torch", "2.1.0+cpu", ">=2.10", "torch").problem
'2.1.0+cpu is too old'
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import re
from collections.abc import Iterable, Sequence

import rich.box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from isoshard.core.planner.programs.targets import Planned, planned

from . import cluster
from .probes import FAILS, MISSING, PROBES, WORKS, Result
from .survey import survey

CORE = ("devices", "shard")
_LOOK = {WORKS: ("✓", "green"), MISSING: ("-", "yellow"), FAILS: ("✗", "red")}
_REQUIREMENT = re.compile(r"""([\w-]+)(?:\[.*?\])?([^;]*?)\s*(?:;.*extra == ["']([\w-]+)["'])?""")


@dataclasses.dataclass(frozen=True)
class Package:
    """A package isoshard can use.

    Attributes:
        name: as pip calls it.
        version: the installed one; None if it is not installed.
        needs: the versions isoshard takes, such as ">=2.10".
        extra: the extra of isoshard that installs it; None if isoshard always does.
    """

    name: str
    version: str | None
    needs: str
    extra: str | None

    @property
    def problem(self) -> str:
        """Why isoshard cannot use it; empty if it can."""
        if self.version is None:
            return "not installed"
        floor = re.search(r">=\s*([\d.]+)", self.needs)
        too_old = floor and _release(self.version) < _release(floor[1])
        return f"{self.version} is too old" if too_old else ""

    @property
    def fix(self) -> str:
        """The command that installs or upgrades it; empty if there is no problem."""
        if not self.problem:
            return ""
        if self.version is not None:
            return f'pip install "{self.name}{self.needs}"'
        return f'pip install "isoshard[{self.extra}]"' if self.extra else "pip install isoshard"


def main(argv: Sequence[str] | None = None) -> int:
    """Run `isoshard doctor`.

    Args:
        argv: the command line after `isoshard doctor`; None reads it from `sys.argv`.

    Returns:
        0 if arrays can be sharded here, or the ranks of a run can run together, else 1.
    """
    options = _options(argv)
    if options.cluster:
        return cluster.examine(options)
    console = Console(stderr=options.json)
    found, results, targets = packages(), [], planned()
    with console.status("trying what works here ..") as status:
        for result in survey(list(PROBES), devices=options.devices, timeout=options.timeout):
            results.append(result)
            status.update(f"tried: {PROBES[result.name].title} ..")
    if options.json:
        print(json.dumps(report(found, results, targets), indent=2))
    else:
        show(console, found, results, targets)
    return 0 if _healthy(results) else 1


def packages() -> list[Package]:
    """Every package isoshard can use, those it needs first, with the installed versions."""
    listed = [_package(text) for text in importlib.metadata.requires("isoshard") or ()]
    return [
        Package("isoshard", _version("isoshard"), "", None),
        Package("python", platform.python_version(), _metadata("Requires-Python"), None),
        Package("jaxlib", _version("jaxlib"), "", None),
        *(package for package in listed if package.extra != "dev" and package.name != "isoshard"),
    ]


def report(
    found: Iterable[Package], results: Iterable[Result], targets: Iterable[Planned] = ()
) -> dict[str, object]:
    """The whole examination as data, for `--json` and for bug reports."""
    results = list(results)
    return {
        "healthy": _healthy(results),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": [
            dataclasses.asdict(package) | {"problem": package.problem, "fix": package.fix}
            for package in found
        ],
        "checks": [
            {"title": PROBES[result.name].title} | dataclasses.asdict(result) for result in results
        ],
        "planning": [dataclasses.asdict(target) for target in targets],
    }


def show(
    console: Console,
    found: Iterable[Package],
    results: Iterable[Result],
    targets: Iterable[Planned] = (),
) -> None:
    """Print the examination as tables, then the commands that get what is missing."""
    found, results, targets = list(found), list(results), list(targets)
    console.print(_installed_table(found))
    console.print(_checks_table(results))
    if targets:
        console.print(_planning_table(targets))
    problems = [(package.name, package.fix) for package in found if package.problem]
    problems += [(PROBES[result.name].title, result.fix) for result in results if result.fix]
    problems += [(target.title, target.fix) for target in targets if target.problem]
    for what, fix in _by_fix(problems):
        console.print(Text.assemble((f"  {what}: ", "dim"), fix), soft_wrap=True)
    if _healthy(results):
        console.print(Text("isoshard works on this machine.", "green"))
    else:
        console.print(Text("isoshard cannot shard arrays on this machine; see ✗ above.", "red"))


def _by_fix(problems: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Say each fix once, with everything it gets.

    >>> _by_fix([("flax", "pip install flax"), ("optax", "pip install flax")])
    [('flax, optax', 'pip install flax')]
    """
    whats: dict[str, list[str]] = {}
    for what, fix in problems:
        whats.setdefault(fix, []).append(what)
    return [(", ".join(names), fix) for fix, names in whats.items()]


def _installed_table(found: Iterable[Package]) -> Table:
    table = Table("package", "installed", "isoshard takes", title="Installed", box=rich.box.SIMPLE)
    for package in found:
        installed = Text(package.problem or str(package.version))
        installed.stylize("yellow" if package.problem else "green")
        table.add_row(package.name, installed, package.needs or "any")
    return table


def _checks_table(results: Iterable[Result]) -> Table:
    table = Table("", "check", "seen", "s", title="What works", box=rich.box.SIMPLE)
    for result in results:
        mark, colour = _LOOK[result.status]
        seen, seconds = Text(result.detail), f"{result.seconds:.1f}"
        table.add_row(Text(mark, colour), PROBES[result.name].title, seen, seconds)
    return table


def _planning_table(targets: Iterable[Planned]) -> Table:
    """What can be planned for machines that are not here."""
    table = Table("", "planning", "by", title="What can be planned", box=rich.box.SIMPLE)
    for target in targets:
        mark, colour = _LOOK[MISSING if target.problem else WORKS]
        by = ", ".join(f"{name} {version}" for name, version in target.versions.items())
        table.add_row(Text(mark, colour), target.title, Text(target.problem or by))
    return table


def _healthy(results: Iterable[Result]) -> bool:
    return {r.name for r in results if r.status == WORKS}.issuperset(CORE)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="isoshard doctor",
        description="What is installed, which devices there are, and what works here.",
        epilog="Exit status: 0 if arrays can be sharded here, or the ranks can run together, "
        "else 1.",
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


def _package(requirement: str) -> Package:
    match = _REQUIREMENT.fullmatch(requirement)
    if match is None:
        raise ValueError(f"isoshard's metadata has a requirement doctor cannot read: {requirement}")
    name, needs, extra = match.groups()
    return Package(name, _version(name), needs, extra)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _metadata(key: str) -> str:
    return importlib.metadata.metadata("isoshard")[key]


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version: 2.13.0+cpu is (2, 13, 0)."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()
