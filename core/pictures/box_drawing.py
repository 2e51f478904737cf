"""Drawing: a grid of labelled boxes, in plain text or in colour.

>>> cells = [[("0", 0), ("1", 1)]]
>>> print(plain(grid_lines(cells, ["top"], ["left", "right"], 80)))
      left    right
    ┌───────┬───────┐
top │   0   │   1   │
    └───────┴───────┘

A line is a list of (text, style) pairs; the styles matter in colour only.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

Line = list[tuple[str, str]]
Cell = tuple[str, int]  # text, and the number of its colour

MAX_ROWS = 16
MIN_CELL = 5
LABEL = "dim"
_GAP: Cell = ("…", -1)
COLORS = (
    "#8dd3c7 #ffffb3 #bebada #fb8072 #80b1d3 #fdb462 "
    "#b3de69 #fccde5 #d9d9d9 #bc80bd #ccebc5 #ffed6f"
).split()


def grid_lines(
    cells: Sequence[Sequence[Cell]], rows: Sequence[str], columns: Sequence[str], width: int
) -> list[Line]:
    """Draw boxes with a label per row and column.

    Args:
        cells: the boxes, row by row.
        rows: one label per row; all empty for none.
        columns: one label per column; all empty for none.
        width: columns to fit into; what does not fit is left out, with `…` in its place.
    """
    texts = [text for row in cells for text, _ in row]
    cell = max(MIN_CELL, *map(len, texts), *map(len, columns)) + 2
    gutter = max(map(len, rows)) + 1 if any(rows) else 0
    drawn_columns = shown_indices(len(columns), max(3, (width - gutter - 1) // (cell + 1)))
    drawn = len(drawn_columns)
    lines = [_header(drawn_columns, columns, gutter, cell)] if any(columns) else []
    lines.append(_rule("┌┬┐", gutter, cell, drawn))
    for index, row in enumerate(shown_indices(len(rows), MAX_ROWS)):
        if index:
            lines.append(_rule("├┼┤", gutter, cell, drawn))
        boxes = [_GAP if row is None or c is None else cells[row][c] for c in drawn_columns]
        lines.append(_row("…" if row is None else rows[row], boxes, gutter, cell))
    lines.append(_rule("└┴┘", gutter, cell, drawn))
    return lines


def plain(lines: Sequence[Line]) -> str:
    """Join lines as text."""
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def colored(lines: Sequence[Line]) -> str:
    """Join lines as text with escape codes for a terminal.

    Args:
        lines: as `grid_lines` makes them.

    Returns:
        `plain(lines)` with colours, up to spaces at the ends of lines.
    """
    from rich.console import Console

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="truecolor", no_color=False)
    console.print(rich_text(lines), soft_wrap=True, highlight=False, end="")
    return out.getvalue()


def rich_text(lines: Sequence[Line]) -> Any:
    """Join lines as a `rich.text.Text`.

    Args:
        lines: as `grid_lines` makes them.
    """
    from rich.text import Text

    return Text("\n").join([Text.assemble(*line) for line in lines])


def shown_indices(count: int, width: int) -> list[int | None]:
    """The numbers that are drawn: all, or the first few, a gap and the last.

    Returns:
        Numbers from 0 on; None is a gap.
    """
    return [*range(count)] if count <= width else [*range(width - 2), None, count - 1]


def _header(shown: Sequence[int | None], columns: Sequence[str], gutter: int, cell: int) -> Line:
    labels = ["…" if c is None else columns[c] for c in shown]
    return [(" " * gutter + "".join(f" {label:^{cell}}" for label in labels), LABEL)]


def _rule(corners: str, gutter: int, cell: int, count: int) -> Line:
    left, middle, right = corners
    return [(" " * gutter + left + middle.join(["─" * cell] * count) + right, "")]


def _row(label: str, boxes: Sequence[Cell], gutter: int, cell: int) -> Line:
    line: Line = [(f"{label:>{gutter - 1}} " if gutter else "", LABEL), ("│", "")]
    for text, device in boxes:
        style = f"black on {COLORS[device % len(COLORS)]}" if device >= 0 else LABEL
        line += [(f"{text:^{cell}}", style), ("│", "")]
    return line
