"""A step from its start to its end: bytes alive, computing, and collectives along each axis.

A step may have more events than a picture has points. So each lane is as high at a point as the
share of the time there that it takes, and the curve shows the most that is alive there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from isoshard.core.runtime.formatting import human_bytes, human_seconds

from .findings import TimelineEvent
from .key_figures import joined
from .svg_pictures import (
    WIDTH,
    axis_fill,
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

_CURVE, _LANE, _GAP = 120, 22, 8
_POINT = 1.0  # of the picture's width, what is summed up in one


def timeline_picture(report: Report) -> str:
    """Draw the timeline.

    Args:
        report: any.

    Returns:
        The picture; "" if the report has no events.
    """
    events = [one for one in report.timeline if one.seconds > 0]
    if not events:
        return ""
    end = max(one.start + one.seconds for one in events)
    lanes = _lanes(events)
    left, right, top = max(64.0, gutter(list(lanes))), WIDTH - 24.0, 18.0
    edges = np.linspace(0.0, end, round((right - left) / _POINT) + 1)
    drawn = []
    has_memory = any(one.memory for one in events)
    y = top + (_CURVE + 2 * _GAP if has_memory else 0)
    bottom = y + len(lanes) * (_LANE + _GAP)
    drawn.append(horizontal_axis(left, right, bottom, top, end, unit_of_seconds(end)))
    if has_memory:
        drawn.append(_curve(report, events, edges, left, right, top))
    for name, own in lanes.items():
        kind = "fill-compute" if name == "compute" else axis_fill(list(report.mesh), name)
        drawn.append(label(left - 8, y + _LANE - 6, name, "end"))
        drawn.append(line(left, y + _LANE, right, y + _LANE, "grid"))
        drawn.append(_area(_share(own, edges), left, y, kind, _told(name, own)))
        y += _LANE + _GAP
    return svg(WIDTH, bottom + 24, "the step from its start to its end", *drawn)


def _lanes(events: Sequence[TimelineEvent]) -> dict[str, list[TimelineEvent]]:
    """Events by what they wait for: computing first, then axes in the order of their time."""
    lanes: dict[str, list[TimelineEvent]] = {"compute": []}
    for one in events:
        name = joined(one.axes) if one.axes else "compute"
        lanes.setdefault(name, []).append(one)
    order = sorted(lanes, key=lambda name: (name != "compute", -_seconds(lanes[name])))
    return {name: lanes[name] for name in order if lanes[name]}


def _seconds(events: Sequence[TimelineEvent]) -> float:
    return math.fsum(one.seconds for one in events)


def _told(name: str, events: Sequence[TimelineEvent]) -> str:
    by_kind: dict[str, float] = {}
    for one in events:
        by_kind[one.what] = by_kind.get(one.what, 0.0) + one.seconds
    kinds = ", ".join(f"{kind} {human_seconds(seconds)}" for kind, seconds in by_kind.items())
    return kinds if name == "compute" else f"{name}: {kinds}"


def _share(events: Sequence[TimelineEvent], edges: np.ndarray) -> np.ndarray:
    """Of the time between each two edges, the share that the events take."""
    ordered = sorted(events, key=lambda one: one.start)
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
    for number, height in enumerate(heights):
        if height != before:
            path.append(f"H{left + number * _POINT:g}V{y + _LANE - height:g}")
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
    for one in events:
        first = min(int(one.start / width), len(alive) - 1)
        last = min(int((one.start + one.seconds) / width - 1e-9), len(alive) - 1)
        span = slice(first, max(first, last) + 1)
        alive[span] = np.maximum(alive[span], one.memory)
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
    for number, value in enumerate(alive):
        if number == 0 or value != alive[number - 1]:
            path.append(f"H{left + number * _POINT:g}V{bottom - value * scale:.1f}")
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
