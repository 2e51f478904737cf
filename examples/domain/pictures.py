"""Pictures of fields, with the borders of their shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
from matplotlib.figure import Figure


def fields(rows: Mapping[str, np.ndarray], times: Sequence[int], sizes: Sequence[int]) -> Figure:
    """Draw fields over time, one row of pictures for each origin.

    Args:
        rows: of whom -> [snapshots, 1, *grid]; of three axes of space the middle of the last one.
        times: the snapshots to draw.
        sizes: rows of each shard; a line is drawn where one ends.

    Returns:
        The figure.
    """
    flat = {name: _flat(series) for name, series in rows.items()}
    limit = max(abs(next(iter(flat.values()))).max(), 1e-6)
    wide, tall = 2.0, 2.0 * sum(sizes) / next(iter(flat.values())).shape[-1]
    size = (wide * len(times), min(tall, 3.2) * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(len(rows), len(times), squeeze=False)
    for line, (name, series) in zip(grid, flat.items(), strict=True):
        for axes, time in zip(line, times, strict=True):
            axes.imshow(series[time], cmap="RdBu_r", vmin=-limit, vmax=limit)
            for number, border in enumerate(accumulate(sizes)):
                if border < sum(sizes):
                    axes.axhline(border - 0.5, color="black", linewidth=1)
                axes.text(0.5, border - 1.5, str(number), fontsize=7, va="bottom")
            axes.set(xticks=[], yticks=[])
        line[0].set_ylabel(name, fontsize=9)
    for axes, time in zip(grid[0], times, strict=True):
        axes.set_title(f"interval {time}" if time else "held out", fontsize=9)
    return figure


def curves(losses: Mapping[str, Sequence[float]]) -> Figure:
    """Draw losses over steps.

    Args:
        losses: name -> one number for each step.

    Returns:
        The figure.
    """
    figure = Figure(figsize=(5, 2.8), layout="constrained")
    axes = figure.subplots()
    for number, (name, values) in enumerate(losses.items()):
        axes.plot(values, ("-", "--", ":")[number % 3], label=name, linewidth=3 - number)
    axes.set(xlabel="step", ylabel="loss", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _flat(series: np.ndarray) -> np.ndarray:
    """Of [snapshots, 1, ..] two axes of space."""
    series = series[:, 0]
    return series if series.ndim == 3 else series[..., series.shape[-1] // 2]
