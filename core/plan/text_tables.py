"""Tables of text: columns as wide as their widest cell.

>>> print("\\n".join(table([("name", "bytes"), ("w", "8 B")], right=1)))
name  bytes
w       8 B
"""

from __future__ import annotations

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: int | None = None) -> list[str]:
    """Lay out rows of cells.

    Args:
        rows: the header first; all of one length.
        right: the column that is set to the right, if any.

    Returns:
        One line per row, without blanks at its end.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if column == right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
