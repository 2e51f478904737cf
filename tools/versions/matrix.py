"""What the tests came to with each pair of versions: kept in `results.json`, and as a table.

Tests are kept by part (`tests/core`, `tests/torch_bridge/engine`, ..), since all take hours: a part
that runs again replaces what it came to before.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .pairs import PAIRS

KEPT = Path(__file__).with_name("results.json")
TITLES = (
    "| Python | JAX | torch | who has it | tests | passed | expected failures | failed | when |"
)
FAILED = "| failed test | with |"
_OUTCOMES = ("passed", "xfailed", "skipped", "failed")


def counted(report: Path) -> dict[str, Any]:
    """The outcomes in pytest's JUnit report.

    Args:
        report: the XML file.

    Returns:
        How many passed, were expected to fail, were skipped and failed; the failed by name.
    """
    counts: dict[str, Any] = dict.fromkeys(_OUTCOMES, 0)
    failures = []
    for case in ElementTree.parse(report).iter("testcase"):
        outcome = "passed"
        for child in case:
            if child.tag in ("failure", "error"):
                outcome = "failed"
            elif child.tag == "skipped":
                outcome = "xfailed" if child.get("type") == "pytest.xfail" else "skipped"
        counts[outcome] += 1
        if outcome == "failed":
            failures.append(f"{case.get('classname')}::{case.get('name')}")
    return {**counts, "failures": sorted(failures)}


def kept() -> dict[str, dict[str, Any]]:
    """All results, by pair and part."""
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def keep(pair: str, part: str, result: Mapping[str, Any]) -> None:
    """Enter the result of a part.

    Args:
        pair: its name.
        part: a folder of tests, or another command.
        result: as `counted` gives it, with `date` and `commit`.
    """
    found = kept()
    parts = {**found.get(pair, {}), part: dict(result)}
    found[pair] = dict(sorted(parts.items()))
    KEPT.write_text(json.dumps(found, indent=1) + "\n")


def table() -> str:
    """The results by pair, as a table of `docs/compatibility.md`."""
    lines = [TITLES, "|" + "---|" * TITLES.count(" | ") + "---|"]
    found = kept()
    for name, pair in PAIRS.items():
        parts = found.get(name, {})
        sums = {outcome: sum(part[outcome] for part in parts.values()) for outcome in _OUTCOMES}
        days = sorted({part["date"] for part in parts.values()})
        when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "not run"
        cells = (
            *(pair.python, pair.jax, pair.torch, pair.why, ", ".join(parts) or "none"),
            *(f"{sums[outcome]:,}" for outcome in ("passed", "xfailed", "failed")),
            when,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


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
