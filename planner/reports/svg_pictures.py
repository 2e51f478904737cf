"""Pictures of a report as SVG: bars of memory and of time on axes with units.

Colours are classes that the style of `html_report.py` fills, so that one picture serves light and
dark pages. Every text in a picture is escaped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from isoshard.core.kit import human_bytes, human_seconds

from .key_figures import shares, traffic

if TYPE_CHECKING:
    from .report import Report


WIDTH = 920
"""Of every picture that spans the page, in its own units."""
_LEAST = 600  # below which letters are too small: then the page scrolls
_RIGHT = 24
_ROW = 34
_LETTER = 6.4  # width of a letter of a label, about


def svg(width: float, height: float, title: str, *content: str) -> str:
    """A picture that shrinks with the page, as far as its letters can be read."""
    picture = (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(title)}" '
        f'style="width:{width:g}px;min-width:{min(width, _LEAST):g}px">{"".join(content)}</svg>'
    )
    return f'<div class="wide">{picture}</div>'


def label(x: float, y: float, text: str, anchor: str = "start", kind: str = "") -> str:
    """A text.

    Args:
        x: where it is anchored.
        y: of its base line.
        text: any; it is escaped.
        anchor: "start", "middle" or "end".
        kind: a class, "dim" for what is said by the way.
    """
    said = f' class="{kind}"' if kind else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{said}>{escape(text)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str, title: str = "") -> str:
    """A filled rectangle, with what is told of it under the mouse."""
    told = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:g}" '
        f'class="{kind}">{told}</rect>'
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} class="{kind}"/>'


def ticks(most: float, count: int = 6) -> list[float]:
    """Round numbers from 0 on, in steps of 1, 2 or 5 times a power of ten.

    Example:
        >>> ticks(14.9)
        [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]
    """
    if most <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / count))
    step = next(size * power for size in (1, 2, 5, 10) if most / (size * power) <= count * 1.5)
    return [index * step for index in range(int(most / step + 1e-9) + 1)]


def unit_of_bytes(most: float) -> tuple[str, float]:
    """The unit for an axis of bytes, and its size."""
    for name, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if most >= 1024.0**power:
            return name, 1024.0**power
    return "B", 1.0


def unit_of_seconds(most: float) -> tuple[str, float]:
    """The unit for an axis of time, and its size."""
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if most >= size:
            return name, size
    return "us", 1e-6


def horizontal_axis(
    left: float, right: float, y: float, top: float, most: float, unit: tuple[str, float]
) -> str:
    """An axis below a picture: round numbers, thin lines up from them, the unit at its end."""
    name, size = unit
    drawn = [line(left, y, right, y, "axis")]
    for at in ticks(most / size):
        x = left + (right - left) * at * size / most
        drawn.append(line(x, top, x, y + 4, "grid"))
        drawn.append(label(x, y + 16, f"{at:g}{f' {name}' if at == 0 else ''}", "middle", "dim"))
    return "".join(drawn)


def gutter(names: Sequence[str]) -> float:
    """How much room labels at the left need."""
    return min(220.0, max(24.0, 14 + 7.2 * max(map(len, names), default=0)))


def memory_bars(rows: Sequence[tuple[str, Report]]) -> str:
    """The memory of one device by role against its capacity, a row for each report."""
    left = gutter([name for name, _ in rows])
    right, top = WIDTH - _RIGHT, 20
    most = max(max(row.memory.peak, row.memory.capacity, 1) for _, row in rows)
    bottom = top + _ROW * len(rows)
    scale = (right - left) / most
    drawn = [horizontal_axis(left, right, bottom, top, most, unit_of_bytes(most))]
    for index, (name, row) in enumerate(rows):
        y, x = top + _ROW * index + 5, left
        drawn.append(label(left - 8, y + 16, _short(name), "end"))
        for role, size in shares(row.memory):
            told = f"{role} {human_bytes(size)}"
            drawn.append(box(x, y, size * scale, _ROW - 10, f"fill-{role}", told))
            if len(told) * _LETTER + 12 < size * scale:
                drawn.append(label(x + size * scale / 2, y + 16, told, "middle", "on-fill"))
            x += size * scale
        end = left + row.memory.capacity * scale
        drawn.append(line(end, y - 5, end, y + _ROW - 5, "limit"))
    capacities = {row.memory.capacity for _, row in rows}
    if len(capacities) == 1:
        [capacity] = capacities
        end = left + capacity * scale
        anchor = "end" if end > WIDTH / 2 else "start"
        drawn.append(label(end, 13, f"capacity {human_bytes(capacity)}", anchor, "limit-text"))
    return svg(WIDTH, bottom + 24, "memory of one device by role", *drawn)


def time_bars(rows: Sequence[tuple[str, Report]]) -> str:
    """The time of one step, computing and collectives one after the other, a row for each report.

    Args:
        rows: names and reports; a mark stands at the time with overlap.
    """
    left = gutter([name for name, _ in rows])
    right, top = WIDTH - _RIGHT, 20
    most = max(max(row.time.serial, row.time.overlapped, 1e-9) for _, row in rows)
    bottom = top + _ROW * len(rows)
    scale = (right - left) / most
    axes = axes_of([row for _, row in rows])
    drawn = [horizontal_axis(left, right, bottom, top, most, unit_of_seconds(most))]
    for index, (name, row) in enumerate(rows):
        y, x = top + _ROW * index + 5, left
        drawn.append(label(left - 8, y + 16, _short(name), "end"))
        stretches = [("computing", row.time.busy, "fill-compute")]
        stretches += [(t.axes, t.seconds, axis_fill(axes, t.axes)) for t in traffic(row)]
        for what, seconds, kind in stretches:
            told = f"{what} {human_seconds(seconds)}"
            drawn.append(box(x, y, seconds * scale, _ROW - 10, kind, told))
            if len(told) * _LETTER + 12 < seconds * scale:
                drawn.append(label(x + seconds * scale / 2, y + 16, told, "middle", "on-fill"))
            x += seconds * scale
        end = left + row.time.overlapped * scale
        drawn.append(f'<path d="M{end - 5:.1f},{y - 6}h10l-5,7z" class="mark"/>')
    first = rows[0][1].time.overlapped
    end = left + first * scale
    words = f"with overlap {human_seconds(first)}" if len(rows) == 1 else "with overlap"
    drawn.append(label(end, 13, words, "end" if end > WIDTH / 2 else "start", "dim"))
    return svg(WIDTH, bottom + 24, "time of one step, nothing overlapping", *drawn)


def axes_of(reports: Sequence[Report]) -> list[str]:
    """The names of the axes of meshes, each once."""
    return list(dict.fromkeys(name for report in reports for name in report.mesh))


def axis_fill(axes: Sequence[str], along: str) -> str:
    """The class that colours what is sent along axes.

    Args:
        axes: all there are, in order.
        along: those in question, joined by "+".
    """
    return f"fill-axis{axes.index(along) % 4}" if along in axes else "fill-axes"


def _short(name: str) -> str:
    return name if len(name) <= 32 else f"{name[:30]}.."
