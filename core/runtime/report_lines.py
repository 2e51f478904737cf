"""How counters, compilations and transfers are written in the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .formatting import count_of, human_bytes, table

if TYPE_CHECKING:
    from .metrics import Compilation, Transfer


def amount(name: str, count: int) -> str:
    """A counter's value as text; in bytes if its name ends so."""
    return human_bytes(count) if name.endswith("_bytes") else f"{count:,}"


def compiled_lines(done: Sequence[Compilation]) -> list[str]:
    """A title, and a line for each compilation."""
    seconds = sum(compilation.seconds for compilation in done)
    rows = [(c.what, c.where, f"{c.seconds:.2f} s", c.cause) for c in done]
    return [
        f"compiled: {count_of(len(done), 'program')} in {seconds:.2f} s",
        *(f"  {line}" for line in table(rows, right=2)),
    ]


_SHOWN = 20  # lines of transfers in a report


def transfer_lines(moved: Sequence[Transfer]) -> list[str]:
    """A line for each of the largest transfers, and one for the others."""
    shown = moved[:_SHOWN]
    rows = [
        (t.where, t.direction, count_of(t.buffers, "buffer"), human_bytes(t.size)) for t in shown
    ]
    lines = [f"  {line}" for line in table(rows)]
    rest = moved[_SHOWN:]
    if rest:
        size = human_bytes(sum(transfer.size for transfer in rest))
        lines.append(f"  .. and {len(rest)} more lines, {size}")
    return lines
