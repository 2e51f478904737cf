"""A picture of what processes cost, as SVG: small plots on the same axis of processes.

Dots are measured, lines are fitted to 2 and more processes; dashed where nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from xml.sax.saxutils import escape

from benchmarks.scaling.figure import opening

from .growth import Growth

PLOTS = {
    "requests of a comparison": ("comparison: requests", "comparison: requests, all"),
    "requests of a save": ("save: requests", "save: requests, busiest"),
    "bytes of a comparison": ("comparison: bytes",),
    "storage operations of a save": (
        "save: operations on storage",
        "save: operations on storage, busiest",
    ),
    "storage operations of a restore": ("restore: operations on storage",),
    "files of a checkpoint": ("save: files, all",),
    "start of the runtimes, ms of the processor": (
        "rendezvous: processor, ms",
        "rendezvous: processor, ms, busiest",
    ),
    "open files and connections": (
        "open files and connections",
        "open files and connections, busiest",
    ),
    "peak memory, MiB": ("peak memory, MiB", "peak memory, MiB, busiest"),
}
COLUMNS, WIDTH, HEIGHT = 3, 260, 150
LEFT, TOP, RIGHT, BOTTOM, HEAD = 50, 26, 14, 24, 44
PROCESSES = (1, 1024)
COLORS = ("#1f6feb", "#d9570a")
UNITS = {"ms": 1e-3, "MiB": 2.0**20}


def draw(growths: Mapping[str, tuple[Mapping[int, float], Growth]]) -> str:
    """Draw quantities.

    Args:
        growths: by name what was measured with so many processes, and how it grows.

    Returns:
        The SVG.
    """
    rows = -(-len(PLOTS) // COLUMNS)
    width, height = COLUMNS * WIDTH, HEAD + rows * HEIGHT
    parts = [
        *opening(width, height, "What processes cost, from 1 to 1,024"),
        '<text x="10" y="16" font-size="13">What a process costs, against their number</text>',
        *_legend(),
    ]
    for number, (title, names) in enumerate(PLOTS.items()):
        x, y = number % COLUMNS * WIDTH, HEAD + number // COLUMNS * HEIGHT
        plot = _plot(title, {name: growths[name] for name in names})
        parts += [f'<g transform="translate({x} {y})">', *plot, "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts, x = [], 10
    for color, label in zip(COLORS, ("a rank", "the busiest rank, or all together"), strict=True):
        parts += [
            f'<circle cx="{x + 4}" cy="30" r="2.5" fill="{color}"/>',
            f'<path d="M{x + 10} 30h16" stroke="{color}"/>',
            f'<text x="{x + 31}" y="33">{label}</text>',
        ]
        x += 90 if color == COLORS[0] else 215
    return [*parts, f'<text x="{x}" y="33">dots: measured; lines: fitted to 2 and more</text>']


def _plot(title: str, lines: Mapping[str, tuple[Mapping[int, float], Growth]]) -> list[str]:
    unit = next((size for name, size in UNITS.items() if name in title), 1.0)
    shown = [value / unit for dots, _ in lines.values() for value in dots.values() if value]
    shown += [growth.at(PROCESSES[1]) / unit for _, growth in lines.values()]
    top = 10.0 ** math.ceil(math.log10(max(shown)))
    low = min(10.0 ** math.floor(math.log10(min(shown))), top / 100)
    x0, x1, y0, y1 = _x(PROCESSES[0]), _x(PROCESSES[1]), HEIGHT - BOTTOM, TOP
    parts = [
        f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>',
        f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="#999"/>',
    ]
    for n in (1, 4, 16, 64, 256, 1024):
        parts.append(f'<text x="{_x(n)}" y="{y0 + 13}" text-anchor="middle">{n}</text>')
    decades = round(math.log10(top / low))
    for power in range(decades + 1):
        if decades > 4 and power % 2:
            continue
        y = _y(low * 10**power, low, top)
        parts.append(
            f'<text x="{x0 - 4}" y="{y + 3}" text-anchor="end">{_formatted(low * 10**power)}</text>'
        )
        parts.append(f'<path d="M{x0} {y}H{x1}" stroke="#eee"/>')
    for name, (dots, growth) in lines.items():
        color = COLORS[name.endswith((", all", ", busiest"))]
        last = max(dots)
        for start, end, dashed in ((2, last, False), (last, PROCESSES[1], True)):
            points = [
                2.0 ** (power / 4)
                for power in range(round(4 * math.log2(start)), round(4 * math.log2(end)) + 1)
            ]
            way = " ".join(f"{_x(n)},{_y(growth.at(n) / unit, low, top)}" for n in points)
            dash = ' stroke-dasharray="3 2"' if dashed else ""
            parts.append(f'<polyline points="{way}" fill="none" stroke="{color}"{dash}/>')
        parts += [
            f'<circle cx="{_x(n)}" cy="{_y(value / unit, low, top)}" r="2.5" fill="{color}"/>'
            for n, value in dots.items()
            if value
        ]
    return parts


def _formatted(value: float) -> str:
    for size, name in ((1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{value / size:g}{name}"
    return f"{value:g}"


def _x(n: float) -> float:
    low, high = (math.log2(count) for count in PROCESSES)
    return round(LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(n) - low) / (high - low), 1)


def _y(value: float, low: float, top: float) -> float:
    part = math.log10(max(value, low) / low) / math.log10(top / low)
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * part, 1)
