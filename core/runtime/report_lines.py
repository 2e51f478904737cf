"""How numbers of bytes, compilations and transfers are written in the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .metrics import Compilation, Transfer


def human_bytes(size: float) -> str:
    """Write a number of bytes with a binary unit.

    Args:
        size: bytes.

    Returns:
        The size with one decimal, or whole bytes below one KiB.

    Example:
        >>> human_bytes(512), human_bytes(1536), human_bytes(3 << 20)
        ('512 B', '1.5 KiB', '3.0 MiB')
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def amount(name: str, number: int) -> str:
    """Write what a counter counted; bytes where its name says so."""
    return human_bytes(number) if name.endswith("_bytes") else f"{number:,}"


def compiled_lines(done: Sequence[Compilation]) -> list[str]:
    """A title, and a line for each compilation."""
    programs = "1 program" if len(done) == 1 else f"{len(done)} programs"
    what = max(len(c.what) for c in done)
    where = max(len(c.where) for c in done)
    return [
        f"compiled: {programs} in {sum(c.seconds for c in done):.2f} s",
        *(f"  {c.what:<{what}}  {c.where:<{where}}  {c.seconds:.2f} s  {c.cause}" for c in done),
    ]


_SHOWN = 20  # lines of transfers in a report


def transfer_lines(moved: Sequence[Transfer]) -> list[str]:
    """A line for each of the largest transfers, and one for the others."""
    shown = moved[:_SHOWN]
    where = max(len(transfer.where) for transfer in shown)
    lines = [
        f"  {t.where:<{where}}  {t.direction}  {t.buffers:,} buffer{'s' * (t.buffers != 1)}  "
        f"{human_bytes(t.size)}"
        for t in shown
    ]
    rest = moved[_SHOWN:]
    if rest:
        size = human_bytes(sum(transfer.size for transfer in rest))
        lines.append(f"  .. and {len(rest)} more lines, {size}")
    return lines
