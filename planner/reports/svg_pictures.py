"""Pictures of a report as SVG: charts of bars, the mesh as a grid, the timeline of a step.

Colours are classes that the style of `html_report.py` fills, so that one picture serves light and
dark pages. Every text in a picture is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from isoshard.core.kit import count_of, human_bytes, human_seconds

from ..machine.topologies import topology_of
from .findings import TimelineEvent
from .key_figures import Row, axis_kind, joined, mesh_of, slices

if TYPE_CHECKING:
    from .report import Report


WIDTH = 920
"""Of every picture that spans the page, in its own units."""
_TOP, _ROW = 8, 28
_CELL, _SPACE = 24, 3
_MOST = 16  # cells along an axis; of more the first, a gap and the last
_CURVE, _LANE, _GAP = 90, 22, 8  # heights in the timeline

Unit = tuple[str, float]
SECONDS: tuple[Unit, ...] = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))
BYTES: tuple[Unit, ...] = tuple(
    (name, 1024.0**power) for name, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1))
)


def chart(
    title: str, rows: Sequence[Row], units: Sequence[Unit], limits: Sequence[float] = ()
) -> str:
    """Bars on an axis with units.

    Args:
        title: of the picture.
        rows: labels and bars.
        units: of the axis, the largest first.
        limits: where a line crosses each row; () for none.
    """
    labels = [f"{name} {bars[0].text}" if len(bars) == 1 else name for name, bars in rows]
    left = _gutter(labels)
    most = max([*limits, *(bar.start + bar.size for _, bars in rows for bar in bars), 1e-9])
    scale = (WIDTH - 24 - left) / most
    bottom = _TOP + _ROW * len(rows)
    drawn = [_horizontal_axis(left, bottom, most, units)]
    for index, (name, bars) in enumerate(rows):
        y = _TOP + _ROW * index
        drawn.append(_label(left - 8, y + 16, _short(labels[index]), "end"))
        for bar in bars:
            x, width = left + bar.start * scale, bar.size * scale
            drawn.append(_box(x, y, width, _ROW - 6, f"fill-{bar.kind}", f"{name} {bar.text}"))
    same = len(set(limits)) == 1
    for index, limit in enumerate(limits[:1] if same else limits):
        x, y = left + limit * scale, _TOP + _ROW * index
        drawn.append(_line(x, y - 3, x, bottom if same else y + _ROW - 3, "limit"))
    return _svg(WIDTH, bottom + 24, title, *drawn)


def mesh_picture(report: Report) -> str:
    """The last two axes of the mesh; lines are where fast links end: of hosts, or of slices."""
    near = slices(report)
    shown_rows, shown_columns = map(_shown, near.shape)
    pitch, drawn = _CELL + _SPACE, []
    for at_row, row in enumerate(shown_rows):
        for at_column, column in enumerate(shown_columns):
            x, y = at_column * pitch + _SPACE, at_row * pitch + _SPACE
            if row is None or column is None:
                drawn.append(_label(x + _CELL / 2, y + _CELL / 2 + 4, "…", "middle", "dim"))
                continue
            device = f"device {row * near.shape[1] + column}"
            drawn.append(_box(x, y, _CELL, _CELL, "cell", device))
            before = shown_columns[at_column - 1] if at_column else None
            if before is not None and near[row, before] != near[row, column]:
                drawn.append(_line(x - 1.5, y - 1.5, x - 1.5, y + _CELL + 1.5, "border"))
            above = shown_rows[at_row - 1] if at_row else None
            if above is not None and near[above, column] != near[row, column]:
                drawn.append(_line(x - 1.5, y - 1.5, x + _CELL + 1.5, y - 1.5, "border"))
    width, height = len(shown_columns) * pitch + _SPACE, len(shown_rows) * pitch + _SPACE
    return _svg(width, height, "the mesh and its traffic", *drawn)


def mesh_caption(report: Report) -> str:
    """The axes that are drawn as rows and columns, and how many hosts or slices there are."""
    *others, rows, columns = ["", "", *(f"{name}={size}" for name, size in report.mesh.items())]
    texts = [f"rows {rows}" if rows else "", f"columns {columns}" if columns else ""]
    texts.append(f"drawn once of {' x '.join(filter(None, others))}" if any(others) else "")
    mesh = mesh_of(report)
    if mesh is not None:
        chip = topology_of(mesh).chip
        group = "slice" if chip.links else "switch domain" if chip.domain else "host"
        count = len({device.slice_index for device in mesh.devices.flat})
        texts.append(f"{count_of(mesh.size, 'device')}, {count_of(count, group)}")
        texts.append("lines are where fast links end" if count > 1 else "")
    return "; ".join(filter(None, texts))


def timeline_picture(report: Report) -> str:
    """The timeline of a step: bytes alive, computing, and collectives by axes.

    A step may have more events than a picture has points. So each lane is as high at a point as the
    share of the time there that it takes, and the curve shows the most that is alive there.

    Returns:
        The picture; "" if the report has no events.
    """
    events = [event for event in report.timeline if event.seconds > 0]
    if not events:
        return ""
    end = max(event.start + event.seconds for event in events)
    lanes: dict[str, list[TimelineEvent]] = {"compute": []}
    for event in events:
        lanes.setdefault(joined(event.axes) or "compute", []).append(event)
    most = f"memory to {human_bytes(max(event.memory for event in events))}"
    left = _gutter([most, *lanes])
    points = np.linspace(0.0, end, int(WIDTH - 24 - left) + 1)
    alive = _alive(events, points)
    highest = float(alive.max())
    y = _TOP + _CURVE
    drawn = [_label(left - 8, y - 6, most, "end")]
    drawn.append(_area(alive / max(highest, 1) * _CURVE, left, y, "alive", most))
    for name in sorted(lanes, key=lambda name: (name != "compute", -_seconds(lanes[name]))):
        y += _GAP + _LANE
        kind = "compute" if name == "compute" else axis_kind(list(report.mesh), name)
        drawn.append(_label(left - 8, y - 6, _short(name), "end"))
        title = f"{name} {human_seconds(_seconds(lanes[name]))}"
        heights = _share(lanes[name], points) * _LANE
        drawn.append(_area(heights, left, y, f"fill-{kind}", title))
    axis = _horizontal_axis(left, y + _GAP, end, SECONDS)
    return _svg(WIDTH, y + _GAP + 24, "the step from its start to its end", axis, *drawn)


def _seconds(events: Sequence[TimelineEvent]) -> float:
    return math.fsum(event.seconds for event in events)


def _alive(events: Sequence[TimelineEvent], points: np.ndarray) -> np.ndarray:
    """The most bytes that are alive between each two points of time."""
    alive = np.zeros(len(points) - 1)
    width, last = points[1], len(alive) - 1
    for event in events:
        first = min(int(event.start / width), last)
        end = min(int((event.start + event.seconds) / width - 1e-9), last)
        span = slice(first, max(first, end) + 1)
        alive[span] = np.maximum(alive[span], event.memory)
    return alive


def _share(events: Sequence[TimelineEvent], points: np.ndarray) -> np.ndarray:
    """Of the time between each two points, the share that the events take."""
    times, done = [0.0], [0.0]
    for event in sorted(events, key=lambda event: event.start):
        start = max(event.start, times[-1])
        times += [start, start + event.seconds]
        done += [done[-1], done[-1] + event.seconds]
    return np.clip(np.diff(np.interp(points, times, done)) / np.diff(points), 0.0, 1.0)


def _area(heights: np.ndarray, left: float, y: float, kind: str, title: str) -> str:
    """A filled area over a base line, a unit of the picture for each height."""
    path, before = [f"M{left:g},{y:g}"], 0.0
    for index, height in enumerate(np.round(heights, 1)):
        if height != before:
            path.append(f"H{left + index:g}V{y - height:g}")
            before = height
    path.append(f"H{left + len(heights):g}V{y:g}Z")
    return f'<path d="{"".join(path)}" class="{kind}"><title>{escape(title)}</title></path>'


def _svg(width: float, height: float, title: str, *content: str) -> str:
    """A picture that shrinks with the page, as far as its letters can be read."""
    return (
        f'<div class="wide"><svg viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(title)}" style="width:{width:g}px;min-width:{min(width, 600):g}px">'
        f"{''.join(content)}</svg></div>"
    )


def _label(x: float, y: float, text: str, anchor: str, kind: str = "label") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} class="{kind}">{escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, kind: str, title: str) -> str:
    """A filled rectangle, with a tooltip."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:g}" '
        f'class="{kind}"><title>{escape(title)}</title></rect>'
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} class="{kind}"/>'


def ticks(most: float, count: int = 6) -> list[float]:
    """Round numbers from 0 on, in steps of 1, 2 or 5 times a power of ten.

    Example:
        >>> ticks(14.9)
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    """
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(size * power for size in (1, 2, 5, 10) if most / (size * power) <= count * 1.5)
    return [index * step for index in range(int(most / step + 1e-9) + 1)]


def _horizontal_axis(left: float, y: float, most: float, units: Sequence[Unit]) -> str:
    """An axis below a picture: round numbers, thin lines up from them, the unit at the first."""
    name, size = next((unit for unit in units if most >= unit[1]), units[-1])
    right = WIDTH - 24
    drawn = [_line(left, y, right, y, "grid")]
    for tick in ticks(most / size):
        x = left + (right - left) * tick * size / most
        drawn.append(_line(x, _TOP, x, y + 4, "grid"))
        text = f"{tick:g}{f' {name}' if tick == 0 else ''}"
        drawn.append(_label(x, y + 16, text, "middle", "dim"))
    return "".join(drawn)


def _gutter(names: Sequence[str]) -> float:
    """The width that labels at the left need."""
    return min(220.0, 14 + 7.2 * max(map(len, names), default=0))


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:26]}.."


def _shown(count: int) -> Sequence[int | None]:
    return [*range(count)] if count <= _MOST else [*range(_MOST - 2), None, count - 1]
