"""Tables of text: columns as wide as their widest cell.

>>> print("\\n".join(table([("name", "bytes"), ("w", "8 B")], right=1)))
name  bytes
w       8 B
"""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: int | None = None) -> list[str]:
    """Align rows of cells, one line per row.

    Args:
        rows: the header first; all of one length.
        right: the index of the right-aligned column, if any.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column == right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
