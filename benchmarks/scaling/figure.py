"""A picture of the scaling results, as SVG: one small plot per operator, all on the same axes.

Lines are what the formulas say, forward and backward together; dots are compiled programs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any
from xml.sax.saxutils import escape

COLUMNS = 5
WIDTH, HEIGHT = 200, 128  # of a plot with its margins
LEFT, TOP, RIGHT, BOTTOM = 40, 24, 14, 22
HEAD = 44
DEVICES = (2, 512)
BYTES = (10, 1e8)
COLORS = {"weak": "#1f6feb", "strong": "#d9570a"}


def opening(width: int, height: int, title: str) -> list[str]:
    """The first lines of a figure's SVG.

    Args:
        width: in pixels.
        height: likewise.
        title: what readers of the page are told who do not see it.
    """
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'role="img" aria-labelledby="title" font-family="Helvetica, Arial, sans-serif" '
        'font-size="10" fill="#222">',
        f'<title id="title">{title}</title>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]


def draw(results: dict[str, Any]) -> str:
    """Draw results as `benchmarks.domain_scaling.grouped` gives them.

    Args:
        results: by name, split and scaling.

    Returns:
        The SVG.
    """
    rows = -(-len(results) // COLUMNS)
    width, height = COLUMNS * WIDTH, HEAD + rows * HEIGHT
    parts = [
        *opening(width, height, "What domain operators send, from 2 to 512 devices"),
        *_legend(),
    ]
    for number, (name, splits) in enumerate(results.items()):
        x, y = number % COLUMNS * WIDTH, HEAD + number // COLUMNS * HEIGHT
        parts += [f'<g transform="translate({x} {y})">', *_plot(name, splits), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts = [
        '<text x="10" y="16" font-size="13">Bytes that the busiest device receives, '
        "forward and backward, against the number of devices</text>"
    ]
    x = 10
    for scaling, label in (("weak", "4 rows per device"), ("strong", "2,048 rows in all")):
        parts += [
            f'<path d="M{x} 30h18" stroke="{COLORS[scaling]}"/>',
            f'<text x="{x + 23}" y="33">{label}, on paper</text>',
        ]
        x += 175
    for split, label in (("even", "compiled, even blocks"), ("uneven", "compiled, uneven blocks")):
        parts += [_dot(x + 6, 30, split, "#222"), f'<text x="{x + 15}" y="33">{label}</text>']
        x += 150
    return parts


def _plot(name: str, splits: dict[str, Any]) -> list[str]:
    x0, x1 = _x(DEVICES[0]), _x(DEVICES[1])
    y0, y1 = _y(BYTES[0]), _y(BYTES[1])
    parts = [
        f'<text x="{LEFT}" y="16" font-weight="bold">{escape(name)}</text>',
        f'<path d="M{x0} {y1}V{y0}H{x1}" fill="none" stroke="#999"/>',
    ]
    for devices in (2, 8, 32, 128, 512):
        parts.append(f'<text x="{_x(devices)}" y="{y0 + 13}" text-anchor="middle">{devices}</text>')
    for size, label in ((1e2, "100"), (1e4, "10 k"), (1e6, "1 M"), (1e8, "100 M")):
        y = _y(size)
        parts.append(f'<text x="{x0 - 4}" y="{y + 3}" text-anchor="end">{label}</text>')
        parts.append(f'<path d="M{x0} {y}H{x1}" stroke="#eee"/>')
    for split in ("even", "uneven"):
        for scaling, curve in splits.get(split, {}).items():
            color = COLORS[scaling]
            parts.append(_line(curve["devices"], _total(curve, "_paper"), split, color))
            points = zip(curve["devices"], _total(curve, ""), strict=True)
            parts += [_dot(_x(n), _y(size), split, color) for n, size in points]
    return parts


def _total(curve: dict[str, Any], kind: str) -> list[float]:
    return [
        sum(pair) for pair in zip(curve[f"forward{kind}"], curve[f"backward{kind}"], strict=True)
    ]


def _line(devices: Sequence[int], sizes: Sequence[float], split: str, color: str) -> str:
    points = " ".join(f"{_x(n)},{_y(size)}" for n, size in zip(devices, sizes, strict=True))
    dashed = ' stroke-dasharray="3 2"' if split == "uneven" else ""
    return f'<polyline points="{points}" fill="none" stroke="{color}"{dashed}/>'


def _dot(x: float, y: float, split: str, color: str) -> str:
    if split == "even":
        return f'<circle cx="{x}" cy="{y}" r="2" fill="{color}"/>'
    return f'<circle cx="{x}" cy="{y}" r="3.2" fill="none" stroke="{color}"/>'


def _x(devices: float) -> float:
    low, high = (math.log2(n) for n in DEVICES)
    return round(LEFT + (WIDTH - LEFT - RIGHT) * (math.log2(devices) - low) / (high - low), 1)


def _y(size: float) -> float:
    """No bytes at all stand on the axis."""
    low, high = (math.log10(n) for n in BYTES)
    at = (math.log10(max(size, BYTES[0])) - low) / (high - low)
    return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * at, 1)
