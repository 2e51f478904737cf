"""What the tests came to with each pair of versions: kept in `results.json`, and as a table.

Tests are kept by part (`tests/core`, `tests/torch_bridge/engine`, ..), since all take hours: a part
that runs again replaces what it came to before.

>>> [part for part in parts("oldest") if "torch_bridge" not in part]
['tests/core', 'tests/jax_bridge', 'tests/onnx_bridge']
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .pairs import PAIRS, ROOT

BRIDGES_ALONE = ("newest-3.14", "images", "oldest")
"""Pairs with which only the tests of the core and the bridges run: not all libraries have them."""

KEPT = Path(__file__).with_name("results.json")
TITLES = (
    "| Python | JAX | torch | who has it | tests | passed | expected failures | failed | when |"
)
FAILED = "| failed test | with |"
# These are launched, or have an environment, of their own.
_SEPARATE = ("with_torch_xla", "multi_process", "clusters")
# Written out: this runs where isoshard is not installed.
_BRIDGES = (
    "core",
    "jax_bridge",
    "torch_bridge",
    "planner",
    "domain",
    "onnx_bridge",
    "torch_xla_bridge",
)
_OUTCOMES = ("passed", "xfailed", "skipped", "failed")


def parts(name: str) -> list[str]:
    """The parts of tests that run with a pair: folders, and patterns of the files beside them.

    Args:
        name: of the pair.
    """
    tests = ROOT / "tests"
    folders = [path.parent for path in tests.glob("*/**/test_*.py")]
    rooms = {path.relative_to(tests).parts[:2] for path in folders}
    rooms = {room if room[0] == "torch_bridge" else room[:1] for room in rooms}  # the largest
    names = {"/".join(("tests", *room)) for room in rooms} - {f"tests/{name}" for name in _SEPARATE}
    names = names - {"tests/torch_bridge"} | {"tests/torch_bridge/test_*.py"}
    if name in BRIDGES_ALONE:
        return sorted(name for name in names if name.split("/")[1] in _BRIDGES)
    return sorted(names | {"tests/test_*.py"})


def outcomes(report: Path) -> dict[str, str]:
    """The outcome of each test in pytest's JUnit report.

    Args:
        report: the XML file.
    """
    results = {}
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = "failed"
            elif child.tag == "skipped":
                outcome = "xfailed" if child.get("type") == "pytest.xfail" else "skipped"
        results[f"{case.get('classname')}::{case.get('name')}"] = outcome
    return results


def counted(results: Mapping[str, str]) -> dict[str, Any]:
    """How many passed, were expected to fail, were skipped and failed; the failed by name.

    Args:
        results: as `outcomes` gives it.
    """
    counts: dict[str, Any] = {name: list(results.values()).count(name) for name in _OUTCOMES}
    failures = sorted(test for test, outcome in results.items() if outcome == "failed")
    return {**counts, "failures": failures}


def files_of(failures: Sequence[str]) -> list[str]:
    """The files of failed tests.

    Args:
        failures: such as "tests.core.test_errors.TestIt::test_that[x]", or of a file that could not
            be imported "::tests.core.test_errors".
    """
    matches = [re.match(r"[\w.]*?\.test_\w+", failure.removeprefix("::")) for failure in failures]
    return sorted({f"{match[0].replace('.', '/')}.py" for match in matches if match})


def mended(result: Mapping[str, Any], results: Mapping[str, str]) -> dict[str, Any]:
    """A part's result after the files of its failed tests ran again.

    Args:
        result: of before.
        results: the outcomes of all tests of these files, as they are now.

    Returns:
        The result: tests that failed count as what they came to now, if they still exist.
    """
    before, counts = result["failures"], dict(result)
    counts["failed"] -= len(before)
    not_counted = tuple(f"{name[2:]}." for name in before if name.startswith("::"))
    for test, outcome in results.items():
        expected = test in before or test.replace("::", ".").startswith(not_counted)
        if expected or outcome == "failed":
            counts[outcome] += 1
            counts["passed"] -= not expected
    return {**counts, "failures": sorted(test for test in results if results[test] == "failed")}


def kept() -> dict[str, dict[str, Any]]:
    """All results, by pair and part."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def keep(pair: str, part: str, result: Mapping[str, Any]) -> None:
    """Enter the result of a part.

    Args:
        pair: its name.
        part: a folder of tests, or another command.
        result: as `counted` or `mended` gives it, with `date` and `commit`.
    """
    results = kept()
    parts = {**results.get(pair, {}), part: dict(result)}
    results[pair] = dict(sorted(parts.items()))
    KEPT.write_text(json.dumps(results, indent=1) + "\n")


def table() -> str:
    """The results by pair, as a table of `docs/compatibility.md`."""
    lines = [TITLES, "|" + "---|" * TITLES.count(" | ") + "---|"]
    results = kept()
    for name, pair in PAIRS.items():
        ran = results.get(name, {})
        sums = {outcome: sum(part[outcome] for part in ran.values()) for outcome in _OUTCOMES}
        days = sorted({part["date"] for part in ran.values()})
        when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "not run"
        cells = (
            *(pair.python, pair.jax, pair.torch, pair.why, _which(name, ran)),
            *(f"{sums[outcome]:,}" for outcome in ("passed", "xfailed", "failed")),
            when,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _which(name: str, ran: Mapping[str, Any]) -> str:
    """Which tests ran, in few words."""
    if left := [part for part in parts(name) if part not in ran]:
        return f"all but {', '.join(left)}" if len(left) < len(ran) else ", ".join(ran) or "none"
    return "core and bridges" if name in BRIDGES_ALONE else "all"


def failures() -> str:
    """The failed tests by name, each with its pair, as a table of that page."""
    lines = [
        f"| `{test}` | {PAIRS[name].python}, JAX {PAIRS[name].jax}, torch {PAIRS[name].torch} |"
        for name, parts in kept().items()
        for part in parts.values()
        for test in part["failures"]
    ]
    return "\n".join([FAILED, "|---|---|", *(lines or ["| none | |"])])


def tables() -> str:
    """All tables of `docs/compatibility.md`, an empty line between two."""
    return f"{table()}\n\n{failures()}"
