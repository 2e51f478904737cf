"""The sizes of the models of `benchmarks.planned_steps`, chosen by predictions alone.

    python -m benchmarks.planned_steps --sizes

Of eight sizes of each model those count at which the six hand plans are told farthest apart: the
least relative distance between two that are neighbours in their order is largest (depth "trace",
torch). No step is measured for it. Least relative distances, with rates of 27 November 2026
(178 GFLOP/s, 43 GB/s):

| MLP: layers, width, inner, batch | least distance |
|---|---|
| 6, 768, 1536, 256 | 0.0278, taken |
| 6, 1024, 1024, 256 | 0.0268 |
| 4, 1024, 1024, 256 | 0.0267 |
| 4, 1024, 2048, 256 | 0.0228 |
| 4, 1024, 2048, 512 | 0.0148 |
| 8, 512, 2048, 512 | 0.0135 |
| 6, 768, 1536, 512 | 0.0061 |
| 4, 1024, 1024, 512 | 0.0002 |

| Llama: layers, width, inner, vocabulary, batch, length (8 heads) | least distance |
|---|---|
| 4, 256, 512, 4096, 8, 32 | 0.0147, taken |
| 4, 512, 1024, 2048, 8, 16 | 0.0080 |
| 3, 512, 1536, 4096, 8, 32 | 0.0073 |
| 6, 256, 512, 2048, 8, 64 | 0.0065 |
| 4, 512, 1024, 2048, 8, 32 | 0.0061 |
| 6, 256, 512, 2048, 16, 16 | 0.0057 |
| 6, 256, 512, 2048, 8, 16 | 0.0037 |
| 4, 256, 1024, 2048, 16, 32 | 0.0009 |

Data parallelism and FSDP are told far from the rest; plans with tensor parallelism are near each
other at all sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import isoshard as iso
from benchmarks.planned_training import MODELS, hand_layouts, planned
from tools.harness import tables

_MLP = ("layers", "width", "inner", "batch")
_LLAMA = ("layers", "width", "inner", "heads", "kv_heads", "vocabulary", "batch", "length")

TRIED: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]] = {
    "MLP": (
        _MLP,
        (
            (4, 1024, 1024, 256),
            (4, 1024, 1024, 512),
            (4, 1024, 2048, 256),
            (4, 1024, 2048, 512),
            (6, 1024, 1024, 256),
            (6, 768, 1536, 256),
            (6, 768, 1536, 512),
            (8, 512, 2048, 512),
        ),
    ),
    "Llama": (
        _LLAMA,
        (
            (6, 256, 512, 8, 8, 2048, 8, 16),
            (6, 256, 512, 8, 8, 2048, 16, 16),
            (6, 256, 512, 8, 8, 2048, 8, 64),
            (4, 256, 1024, 8, 8, 2048, 16, 32),
            (4, 256, 512, 8, 8, 4096, 8, 32),
            (4, 512, 1024, 8, 8, 2048, 8, 16),
            (4, 512, 1024, 8, 8, 2048, 8, 32),
            (3, 512, 1536, 8, 8, 4096, 8, 32),
        ),
    ),
}
"""Names of sizes, and those that are tried."""


def spread(seconds: Sequence[float]) -> float:
    """The least relative distance between neighbours.

    Args:
        seconds: of several plans.

    Example:
        >>> spread([4.0, 1.0, 1.5])
        0.5
    """
    return min(b / a - 1 for a, b in itertools.pairwise(sorted(seconds)))


def predicted(name: str, sizes: dict[str, int]) -> dict[str, float]:
    """Seconds of a step of torch by hand plan, at depth "trace".

    Args:
        name: of the model.
        sizes: of it.
    """
    models, results = MODELS[name][0](**sizes), dict[str, float]()
    for plan, layout in hand_layouts(name).items():
        step, args = planned(models, "torch", layout)
        results[plan] = iso.planner.estimate(step, args, layout.mesh, layout.plan).time.serial
    return results


def show() -> None:
    """Print what each size is told to take, the one that is chosen first."""
    for name, (words, tried) in TRIED.items():
        rows = dict[str, Any]()
        for numbers in tried:
            sizes = dict(zip(words, numbers, strict=True))
            seconds_of = predicted(name, sizes)
            line = ", ".join(f"{plan} {seconds * 1e3:.0f}" for plan, seconds in seconds_of.items())
            title = " ".join(f"{word} {size}" for word, size in sizes.items())
            rows[title] = {"apart": spread(list(seconds_of.values())), "told": line}
            print(title, rows[title], flush=True)
        ordered = dict(sorted(rows.items(), key=lambda row: -row[1]["apart"]))
        tables.show(tables.by_name(name, {"apart": "{apart:.3f}", "ms": "{told}"}, ordered))
