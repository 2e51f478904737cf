"""Two pictures of a report: the mesh, and the timeline of a step.

The mesh is a grid of devices, with an arrow along each axis as wide as what is sent along it. The
last two axes are drawn, those before them are written beside it. A line between devices is where
fast links end: of hosts, or of slices.

The timeline shows bytes alive, computing, and collectives along each axis. A step may have more
events than a picture has points. So each lane is as high at a point as the share of the time there
that it takes, and the curve shows the most that is alive there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from isoshard.core.kit import count_of, human_bytes, human_seconds

from ..machine.topologies import topology_of
from .findings import TimelineEvent
from .key_figures import borders, joined, mesh_of, traffic
from .svg_pictures import (
    WIDTH,
    axis_fill,
    box,
    gutter,
    horizontal_axis,
    label,
    line,
    svg,
    ticks,
    unit_of_bytes,
    unit_of_seconds,
)

if TYPE_CHECKING:
    from .report import Report


_SPACE = 3
_SIDE = 290  # of the whole grid, at most; a cell has 15 to 36
_MOST = 16  # cells along an axis; of more the first, a gap and the last
_LEFT, _TOP = 64, 44
_THICKEST = 12.0


def mesh_picture(report: Report) -> str:
    """Draw the mesh."""
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
    fromkeys = dict.fromkeys(report.mesh, 0)
    for use in traffic(report):
        for name in use.axes.split("+"):
            if name in fromkeys:
                fromkeys[name] += use.bytes
    return fromkeys


def _shown(count: int) -> Sequence[int | None]:
    return [*range(count)] if count <= _MOST else [*range(_MOST - 2), None, count - 1]


def _cells(
    report: Report,
    grid: tuple[int, int],
    shown_rows: Sequence[int | None],
    shown_columns: Sequence[int | None],
    cell: int,
) -> str:
    indices, mesh = np.zeros(grid, int), mesh_of(report)
    if mesh is not None:
        indices = borders(mesh).reshape(-1, *grid)[0]
    pitch, drawn = cell + _SPACE, []
    for at_row, row in enumerate(shown_rows):
        for at_column, column in enumerate(shown_columns):
            x, y = _LEFT + at_column * pitch, _TOP + at_row * pitch
            if row is None or column is None:
                drawn.append(label(x + cell / 2, y + cell / 2 + 4, "…", "middle", "dim"))
                continue
            told = f"device {row * grid[1] + column}"
            drawn.append(box(x, y, cell, cell, "cell", told))
            if at_column and _differs(indices, row, column, row, shown_columns[at_column - 1]):
                drawn.append(line(x - 1.5, y - 1.5, x - 1.5, y + cell + 1.5, "border"))
            if at_row and _differs(indices, row, column, shown_rows[at_row - 1], column):
                drawn.append(line(x - 1.5, y - 1.5, x + cell + 1.5, y - 1.5, "border"))
    return "".join(drawn)


def _differs(
    indices: np.ndarray, row: int, column: int, other_row: int | None, other_column: int | None
) -> bool:
    if other_row is None or other_column is None:
        return False
    return bool(indices[row, column] != indices[other_row, other_column])


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


_CURVE, _LANE, _GAP = 120, 22, 8
_POINT = 1.0  # of the picture's width, what is summed up in one


def timeline_picture(report: Report) -> str:
    """Draw the timeline.

    Returns:
        The picture; "" if the report has no events.
    """
    events = [one for one in report.timeline if one.seconds > 0]
    if not events:
        return ""
    end = max(event.start + event.seconds for event in events)
    lanes = _lanes(events)
    left, right, top = max(64.0, gutter(list(lanes))), WIDTH - 24.0, 18.0
    edges = np.linspace(0.0, end, round((right - left) / _POINT) + 1)
    drawn = []
    has_memory = any(event.memory for event in events)
    y = top + (_CURVE + 2 * _GAP if has_memory else 0)
    bottom = y + len(lanes) * (_LANE + _GAP)
    drawn.append(horizontal_axis(left, right, bottom, top, end, unit_of_seconds(end)))
    if has_memory:
        drawn.append(_curve(report, events, edges, left, right, top))
    for name, lane in lanes.items():
        kind = "fill-compute" if name == "compute" else axis_fill(list(report.mesh), name)
        drawn.append(label(left - 8, y + _LANE - 6, name, "end"))
        drawn.append(line(left, y + _LANE, right, y + _LANE, "grid"))
        drawn.append(_area(_share(lane, edges), left, y, kind, _told(name, lane)))
        y += _LANE + _GAP
    return svg(WIDTH, bottom + 24, "the step from its start to its end", *drawn)


def _lanes(events: Sequence[TimelineEvent]) -> dict[str, list[TimelineEvent]]:
    """Events by what they wait for: computing first, then axes in the order of their time."""
    lanes: dict[str, list[TimelineEvent]] = {"compute": []}
    for event in events:
        name = joined(event.axes) if event.axes else "compute"
        lanes.setdefault(name, []).append(event)
    order = sorted(lanes, key=lambda name: (name != "compute", -_seconds(lanes[name])))
    return {name: lanes[name] for name in order if lanes[name]}


def _seconds(events: Sequence[TimelineEvent]) -> float:
    return math.fsum(event.seconds for event in events)


def _told(name: str, events: Sequence[TimelineEvent]) -> str:
    by_kind: dict[str, float] = {}
    for event in events:
        by_kind[event.what] = by_kind.get(event.what, 0.0) + event.seconds
    kinds = ", ".join(f"{kind} {human_seconds(seconds)}" for kind, seconds in by_kind.items())
    return kinds if name == "compute" else f"{name}: {kinds}"


def _share(events: Sequence[TimelineEvent], edges: np.ndarray) -> np.ndarray:
    """Of the time between each two edges, the share that the events take."""
    ordered = sorted(events, key=lambda event: event.start)
    times, done, total = [0.0], [0.0], 0.0
    for one in ordered:
        start = max(one.start, times[-1])
        times += [start, start + one.seconds]
        done += [total, total + one.seconds]
        total += one.seconds
    return np.clip(np.diff(np.interp(edges, times, done)) / np.diff(edges), 0.0, 1.0)


def _area(shares: np.ndarray, left: float, y: float, kind: str, told: str) -> str:
    heights = np.round(shares * _LANE, 1)
    path = [f"M{left:g},{y + _LANE:g}"]
    before = 0.0
    for index, height in enumerate(heights):
        if height != before:
            path.append(f"H{left + index * _POINT:g}V{y + _LANE - height:g}")
            before = height
    path.append(f"H{left + len(heights) * _POINT:g}V{y + _LANE:g}Z")
    return f'<path d="{"".join(path)}" class="{kind}"><title>{escape(told)}</title></path>'


def _curve(
    report: Report,
    events: Sequence[TimelineEvent],
    edges: np.ndarray,
    left: float,
    right: float,
    top: float,
) -> str:
    alive = np.zeros(len(edges) - 1)
    width = edges[1] - edges[0]
    for event in events:
        first = min(int(event.start / width), len(alive) - 1)
        last = min(int((event.start + event.seconds) / width - 1e-9), len(alive) - 1)
        span = slice(first, max(first, last) + 1)
        alive[span] = np.maximum(alive[span], event.memory)
    capacity, highest = report.memory.capacity, float(alive.max())
    near = highest <= capacity <= 2.5 * highest or capacity < highest
    most = 1.05 * max(highest, capacity if near else 0.0)
    bottom, scale = top + _CURVE, _CURVE / most
    unit, size = unit_of_bytes(most)
    drawn = []
    for at in ticks(most / size, 4):
        height = bottom - at * size * scale
        drawn.append(line(left, height, right, height, "grid"))
        text = f"{at:g}{f' {unit}' if at == 0 else ''}"
        drawn.append(label(left - 8, height + 4, text, "end", "dim"))
    path = [f"M{left:g},{bottom:g}"]
    for index, value in enumerate(alive):
        if index == 0 or value != alive[index - 1]:
            path.append(f"H{left + index * _POINT:g}V{bottom - value * scale:.1f}")
    shape = "".join([*path, f"H{right:g}V{bottom:g}Z"])
    drawn.append(f'<path d="{shape}" class="alive"><title>bytes alive on one device</title></path>')
    if near:
        height = bottom - capacity * scale
        drawn.append(line(left, height, right, height, "limit"))
        words = f"capacity {human_bytes(capacity)}"
        drawn.append(label(right, height - 4, words, "end", "limit-text"))
    at = left + (int(alive.argmax()) + 0.5) * _POINT
    height = bottom - highest * scale
    drawn.append(f'<circle cx="{at:.1f}" cy="{height:.1f}" r="3" class="peak"/>')
    words = f"{human_bytes(highest)}"
    side = "start" if at < (left + right) / 2 else "end"
    drawn.append(label(at + (6 if side == "start" else -6), height - 5, words, side))
    return "".join(drawn)
