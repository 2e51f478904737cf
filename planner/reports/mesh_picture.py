"""The mesh as a grid of devices, an arrow along each axis as wide as what is sent along it.

The last two axes are drawn, those before them are said beside. A line between devices is where
fast links end: of hosts, or of slices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from isoshard.core.runtime.formatting import count_of, human_bytes

from ..machine.topologies import topology_of
from .key_figures import borders, mesh_of, traffic
from .svg_pictures import axis_fill, box, label, line, svg

if TYPE_CHECKING:
    from .report import Report

_SPACE = 3
_SIDE = 290  # of the whole grid, at most; a cell has 15 to 36
_MOST = 16  # cells along an axis; of more the first, a gap and the last
_LEFT, _TOP = 64, 44
_THICKEST = 12.0


def mesh_picture(report: Report) -> str:
    """Draw the mesh.

    Args:
        report: any.

    Returns:
        The picture.
    """
    names, sizes = list(report.mesh), list(report.mesh.values())
    rows, columns = (1, sizes[-1] if sizes else 1) if len(sizes) < 2 else (sizes[-2], sizes[-1])
    shown_rows, shown_columns = _shown(rows), _shown(columns)
    cell = min(36, max(15, _SIDE // max(len(shown_rows), len(shown_columns)) - _SPACE))
    width, height = len(shown_columns) * (cell + _SPACE), len(shown_rows) * (cell + _SPACE)
    sent = _sent(report)
    drawn = [_cells(report, (rows, columns), shown_rows, shown_columns, cell)]
    if names:
        drawn.append(_across(report, names[-1], sent, width))
    if len(names) > 1:
        drawn.append(_down(report, names[-2], sent, height))
    notes = _notes(report, names[:-2])
    bottom = _TOP + height + 4
    drawn += [label(_LEFT, bottom + 14 * (at + 1), text, "start", "dim") for at, text in notes]
    texts = [text for _, text in notes] + [_words(report, name, sent) for name in names[-1:]]
    across = max(_LEFT + width, _LEFT + 6.6 * max(map(len, texts), default=0)) + 8
    return svg(across, bottom + 14 * len(notes) + 8, "the mesh and its traffic", *drawn)


def _sent(report: Report) -> dict[str, int]:
    """Bytes sent along each axis in one step, along it alone or with others."""
    found = dict.fromkeys(report.mesh, 0)
    for one in traffic(report):
        for name in one.axes.split("+"):
            if name in found:
                found[name] += one.bytes
    return found


def _shown(count: int) -> Sequence[int | None]:
    return [*range(count)] if count <= _MOST else [*range(_MOST - 2), None, count - 1]


def _cells(
    report: Report,
    grid: tuple[int, int],
    shown_rows: Sequence[int | None],
    shown_columns: Sequence[int | None],
    cell: int,
) -> str:
    numbers, mesh = np.zeros(grid, int), mesh_of(report)
    if mesh is not None:
        numbers = borders(mesh).reshape(-1, *grid)[0]
    pitch, drawn = cell + _SPACE, []
    for at_row, row in enumerate(shown_rows):
        for at_column, column in enumerate(shown_columns):
            x, y = _LEFT + at_column * pitch, _TOP + at_row * pitch
            if row is None or column is None:
                drawn.append(label(x + cell / 2, y + cell / 2 + 4, "…", "middle", "dim"))
                continue
            told = f"device {row * grid[1] + column}"
            drawn.append(box(x, y, cell, cell, "cell", told))
            if at_column and _differs(numbers, row, column, row, shown_columns[at_column - 1]):
                drawn.append(line(x - 1.5, y - 1.5, x - 1.5, y + cell + 1.5, "border"))
            if at_row and _differs(numbers, row, column, shown_rows[at_row - 1], column):
                drawn.append(line(x - 1.5, y - 1.5, x + cell + 1.5, y - 1.5, "border"))
    return "".join(drawn)


def _differs(
    numbers: np.ndarray, row: int, column: int, other_row: int | None, other_column: int | None
) -> bool:
    if other_row is None or other_column is None:
        return False
    return bool(numbers[row, column] != numbers[other_row, other_column])


def _thickness(sent: Mapping[str, int], name: str) -> float:
    most = max(sent.values(), default=0)
    return 1.0 if not most else max(1.0, _THICKEST * sent[name] / most)


def _across(report: Report, name: str, sent: Mapping[str, int], width: float) -> str:
    thick, kind = _thickness(sent, name), axis_fill(list(report.mesh), name)
    y, end = _TOP - 14.0, _LEFT + width - _SPACE
    arrow = _arrow(
        [(_LEFT, -0.5), (end - 12, -0.5), (end - 12, -1), (end, 0)], thick, y, across=True
    )
    return f'<path d="{arrow}" class="{kind}"/>' + label(_LEFT, 16, _words(report, name, sent))


def _down(report: Report, name: str, sent: Mapping[str, int], height: float) -> str:
    thick, kind = _thickness(sent, name), axis_fill(list(report.mesh), name)
    x, end = _LEFT - 14.0, _TOP + height - _SPACE
    neck = max(_TOP + 2.0, end - 12)
    arrow = _arrow([(_TOP, -0.5), (neck, -0.5), (neck, -1), (end, 0)], thick, x, across=False)
    words = _words(report, name, sent)
    if len(words) * 6.4 > height:
        words = name if len(name) * 6.4 <= height else ""
    turned = (
        f'<g transform="translate({x - 14:g} {_TOP:g}) rotate(-90)">{label(0, 0, words, "end")}</g>'
    )
    return f'<path d="{arrow}" class="{kind}"/>{turned}'


def _arrow(
    half: Sequence[tuple[float, float]], thick: float, middle: float, *, across: bool
) -> str:
    """The outline of an arrow: points of one side, as (along, share of the head or the shaft)."""
    reach = {-0.5: thick / 2, -1: thick / 2 + 4, 0: 0.0}
    side = [(along, reach[share]) for along, share in half]
    points = [(along, middle - out) for along, out in side]
    points += [(along, middle + out) for along, out in reversed(side)]
    if not across:
        points = [(y, x) for x, y in points]
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in points) + "Z"


def _words(report: Report, name: str, sent: Mapping[str, int]) -> str:
    amount = f"{human_bytes(sent[name])} a step" if sent[name] else "nothing sent"
    return f"{name}={report.mesh[name]}: {amount}"


def _notes(report: Report, before: Sequence[str]) -> list[tuple[int, str]]:
    texts = []
    if before:
        axes = ", ".join(f"{name}={report.mesh[name]}" for name in before)
        texts.append(f"drawn once of {axes}")
    mesh = mesh_of(report)
    if mesh is not None:
        chip, near = topology_of(mesh).chip, borders(mesh)
        what = "slice" if chip.links else "switch domain" if chip.domain else "host"
        count = len(np.unique(near))
        mark = " (lines between devices)" if count > 1 else ""
        texts.append(f"{count_of(near.size, 'device')}, {count_of(count, what)}{mark}")
    return list(enumerate(texts))
