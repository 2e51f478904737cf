"""Whether a run is good enough: its thresholds, and the strict list of expected failures."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .cells import Cell

THRESHOLDS = {
    **dict.fromkeys(("forward", "backward", "sharded", "in-place", "out="), 0.99),
    **dict.fromkeys(("bfloat16", "float64", "complex128", "int64", "bool"), 0.99),
    **dict.fromkeys(("reference", "channels last", "forward mode", "vmap", "views"), 0.99),
    **dict.fromkeys(("gradcheck", "errors", "jax.vjp", "complex jax.vjp"), 0.99),
}
"""The least share of entries that must pass, by column."""

Results = Mapping[str, Mapping[str, Cell]]


@dataclasses.dataclass(frozen=True)
class Figure:
    """One column's figures.

    Attributes:
        column: its name.
        passed: entries all of whose samples agree.
        entries: entries with something to try.
        nothing: entries with nothing to try (sharded: no operand has an axis to divide).
        samples: samples tried.
        wrong: entries with a wrong value, shape or dtype.
        host: entries that pass with an operator computed on the CPU.
    """

    column: str
    passed: int
    entries: int
    nothing: int
    samples: int
    wrong: int
    host: int

    @property
    def share(self) -> float:
        """The part that passes; 1 where there is nothing to try."""
        return self.passed / self.entries if self.entries else 1.0


def figure(column: str, results: Results) -> Figure:
    """Count one column."""
    cells = [cells[column] for cells in results.values() if column in cells]
    tried = [cell for cell in cells if cell.status != "none"]
    return Figure(
        column,
        passed=sum(cell.status == "pass" for cell in tried),
        entries=len(tried),
        nothing=len(cells) - len(tried),
        samples=sum(cell.samples for cell in tried),
        wrong=sum(cell.status == "wrong" for cell in tried),
        host=sum(cell.status == "pass" and cell.host for cell in tried),
    )


def faults(
    results: Results, expected: Mapping[tuple[str, str], str], *, whole: bool = True
) -> list[str]:
    """Everything that makes a run fail, one line each; empty for a good run.

    Args:
        results: cells by entry and column.
        expected: the cells that may fail.
        whole: every entry was run, so that shares mean something and every expected cell was seen.
    """
    found = []
    for entry, cells in results.items():
        for column, cell in cells.items():
            known = (entry, column) in expected
            if cell.status == "wrong":
                found.append(f"{entry}, {column}: wrong value: {cell.reason}")
            elif cell.failed and not known:
                found.append(f"{entry}, {column}: {cell.status}: {cell.reason}")
            elif known and not cell.failed:
                found.append(
                    f"{entry}, {column}: does not fail any more; take it out of "
                    "tests/conformance/expected.py"
                )
    if not whole:
        return found
    found += [
        f"{entry}, {column}: in tests/conformance/expected.py, but there is no such cell"
        for entry, column in expected
        if column not in results.get(entry, {})
    ]
    for column, least in THRESHOLDS.items():
        got = figure(column, results)
        if got.share < least:
            found.append(
                f"{column}: {got.passed} of {got.entries} entries pass, {got.share:.1%}; at least "
                f"{least:.0%} must"
            )
    return found
