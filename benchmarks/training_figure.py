"""A picture of what `benchmarks.training` kept: step times as ratios to hand-written JAX, as SVG.

    python -m benchmarks.training_figure     # docs/training.svg

Each model is a plot with a logarithmic axis, each way to run it a line; a dot left of 1 is faster.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from tools.harness import results

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "training.svg"
MODELS = {
    "mlp": "MLP, SGD",
    "gpt2": "GPT-2 small's shape, AdamW",
    "resnet50": "ResNet-50, SGD with momentum",
    "vit": "ViT-B's shape, AdamW",
}
WAYS = {
    "torch, compiled": "isoshard, xs.compile",
    "torch, lazy": "isoshard, lazy",
    "torchax, jitted": "torchax, jitted",
    "torch_xla, SPMD": "torch_xla 2.9, SPMD",
    "DTensor, gloo": "DTensor, 4 processes, gloo",
    "torch, CPU": "torch, one CPU device",
}
OURS = ("torch, compiled", "torch, lazy")
RATIOS = (0.18, 32.0)
MARKS = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
COLUMNS, WIDTH, LEFT, RIGHT = 2, 470, 160, 40
HEAD, TOP, ROW, BOTTOM = 40, 26, 17, 26


def draw(kept: dict[str, Any]) -> str:
    """Draw results.

    Args:
        kept: model -> what the benchmark wrote of it.

    Returns:
        The SVG.
    """
    plot = TOP + len(WAYS) * ROW + BOTTOM
    width, height = COLUMNS * WIDTH, HEAD + math.ceil(len(MODELS) / COLUMNS) * plot
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'role="img" aria-labelledby="title" font-family="Helvetica, Arial, sans-serif" '
        'font-size="11" fill="#222">',
        '<title id="title">Time of a training step, as a ratio to hand-written JAX</title>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        '<text x="10" y="18" font-size="13">Median time of a training step on 8 virtual CPU '
        "devices, as a ratio to the same step written by hand in JAX (left is faster)</text>",
    ]
    for number, (model, title) in enumerate(MODELS.items()):
        x, y = number % COLUMNS * WIDTH, HEAD + number // COLUMNS * plot
        figures = kept[model]
        ways = {**figures["contestants"], **figures["peers"]}
        parts += [f'<g transform="translate({x} {y})">', *_plot(title, ways), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _plot(title: str, ways: dict[str, Any]) -> list[str]:
    bottom = TOP + len(WAYS) * ROW
    parts = [f'<text x="{LEFT}" y="16" font-weight="bold">{escape(title)}</text>']
    for mark in MARKS:
        stroke = "#666" if mark == 1 else "#e4e4e4"
        parts.append(f'<path d="M{_x(mark)} {TOP - 4}V{bottom}" stroke="{stroke}"/>')
        parts.append(f'<text x="{_x(mark)}" y="{bottom + 14}" text-anchor="middle">{mark:g}</text>')
    for number, (way, label) in enumerate(WAYS.items()):
        y = TOP + number * ROW + ROW // 2
        color = "#1f6feb" if way in OURS else "#8a8a8a"
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')
        ratio = ways.get(way, {}).get("ratio")
        if ratio is None:
            parts.append(f'<text x="{_x(1) + 8}" y="{y + 4}" fill="#b00020">fails</text>')
            continue
        parts.append(f'<path d="M{_x(1)} {y}H{_x(ratio)}" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<circle cx="{_x(ratio)}" cy="{y}" r="4" fill="{color}"/>')
        side, anchor = (9, "start") if ratio >= 1 else (-9, "end")
        parts.append(
            f'<text x="{round(_x(ratio) + side, 1)}" y="{y + 4}" text-anchor="{anchor}">'
            f"{ratio:.2f}</text>"
        )
    return parts


def _x(ratio: float) -> float:
    low, high = map(math.log, RATIOS)
    return round(LEFT + (WIDTH - LEFT - RIGHT) * (math.log(ratio) - low) / (high - low), 1)


def main() -> int:
    """Write the picture."""
    FIGURE.write_text(draw(results.saved("training")))
    print(FIGURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
