"""Benchmark: does `iso.planner.estimate` put published training steps in the order they ran in?

    python -m benchmarks.planning_ranking [--quick]

MaxText publishes what its 16B, 32B, 64B and 128B models reach on 1 to 32 slices of v5e-256, and the
scripts that ran them. Here the training step of each (`benchmarks/maxtext_decoder.py`) is estimated
for that machine at depth "trace", as it is written. Nothing runs on a device, nothing is compiled.

Shown are published and predicted seconds, and the rank correlation (Spearman) of both, over all
rows and over those of 1 and 32 slices; and that of the TFLOP/s a chip, which is harder, since sizes
and batches no longer order the rows. Nothing is fitted to the rows but one bound: that products
reach 0.95 of a TPU's peak (`COMPUTE_REACH`) was chosen with the 32B row in sight.

Rows: MaxText/configs/v5e/README.md of https://github.com/AI-Hypercomputer/maxtext; which operations
its TFLOP/s count, and so the seconds of a row: `calculate_tflops_training_per_device` of
maxtext_utils.py. What the rows leave open, and how it is taken here:

- they name no commit; batch, sequence (2,048) and what is computed again are of the scripts beside
  the table;
- 128b.sh ends with `fused_qkv=True fused_mlp=True` behind a line without its backslash; they are
  taken as meant;
- attention is JAX's splash kernel, its blocks 512: the planner counts its whole grid, the blocks
  too that the causal mask lets a chip skip;
- the scripts' flags for the compiler (asynchronous and fused collectives) are not modelled:
  `serial` overlaps nothing, `overlapped` what loops are given, such as gathers of weights;
- data is synthetic, and nothing is loaded or saved; copies to the host, of products that are kept
  there, take the time in which memory is read and written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import isoshard as iso
from benchmarks.maxtext_decoder import MODELS, PLAN, Decoder, mesh_of, shapes, step_of
from tools.harness import tables
from tools.harness.command import Benchmark

PUBLISHED = {
    # model: TFLOP/s a chip on 1, 2, 4, 8, 16 and 32 slices
    "16B": (120, 117, 117, 115, 111, 108),
    "32B": (132, 128, 126, 125, 123, 119),
    "64B": (118, 112, 110, 108, 105, 99),
    "128B": (110, 110, 108, 104, 100, 91),
}
SLICES = (1, 2, 4, 8, 16, 32)
SUMS = ("serial", "overlapped")

COLUMNS = {
    "published, s": "{published_s:.2f}",
    "`serial`, s": "{serial_s:.2f}",
    "/ published": "{serial_ratio:.2f}",
    "`overlapped`, s": "{overlapped_s:.2f}",
    "/ published ": "{overlapped_ratio:.2f}",
    "published, TFLOP/s a chip": "{published:.0f}",
    "`serial`": "{serial:.0f}",
    "`overlapped`": "{overlapped:.0f}",
    "peak, GiB": "{peak_gib:.1f}",
}


def row_of(model: Decoder, slices: int, rate: float) -> dict[str, Any]:
    """One published row and what is predicted for it.

    Args:
        model: which.
        slices: of 256 chips.
        rate: TFLOP/s a chip that are published.
    """
    mesh = mesh_of(model, slices)
    report = iso.planner.estimate(step_of(model), shapes(model, mesh), mesh, PLAN, depth="trace")
    published = model.counted / rate / 1e12
    row: dict[str, Any] = {"slices": slices, "published": rate, "published_s": published}
    for how in SUMS:
        taken = getattr(report.time, how)
        row |= {
            how: model.counted / taken / 1e12,
            f"{how}_s": taken,
            f"{how}_ratio": taken / published,
        }
    peak = report.memory.peak / 2**30
    return {**row, "limit": report.time.limit, "fits": report.fits, "peak_gib": peak}


def measure(slices: Sequence[int] = SLICES) -> dict[str, Any]:
    """Predict published rows.

    Args:
        slices: of which numbers of slices.

    Returns:
        `rows`, and `spearman` of seconds and TFLOP/s for both sums of the roofline.
    """
    rows = [
        {"model": name, **row_of(model, count, rate)}
        for name, model in MODELS.items()
        for count, rate in zip(SLICES, PUBLISHED[name], strict=True)
        if count in slices
    ]
    results = {}
    for how in SUMS:
        for unit, text in (("_s", "seconds"), ("", "TFLOP/s")):
            for which, some in (("all rows", SLICES), ("1 and 32 slices", (1, 32))):
                chosen = [row for row in rows if row["slices"] in some]
                pairs = ([row[f"{who}{unit}"] for row in chosen] for who in ("published", how))
                results[f"{how}, {text}, {which}"] = spearman(*pairs)
    return {"rows": rows, "spearman": results}


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values have the mean of their ranks.

    Args:
        first: values.
        second: as many.

    Example:
        >>> spearman([1, 2, 3], [10, 30, 20])
        0.5
    """
    ranks, other = (_ranks(np.array(values, float)) for values in (first, second))
    return float(round(np.corrcoef(ranks, other)[0, 1], 6))


def _ranks(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    below = (values[:, None] > values[None, :]).sum(1)
    equal = (values[:, None] == values[None, :]).sum(1)
    return below + (equal - 1) / 2


def named_rows(results: Mapping[str, Any]) -> list[tuple[list[str], Mapping[str, Any]]]:
    """The rows with the names that tables give them."""
    return [([row["model"], f"{row['slices']} x 256"], row) for row in results["rows"]]


def markdown(results: Mapping[str, Any]) -> str:
    """The table of docs/planning.md.

    Args:
        results: what `measure` found.
    """
    rows = [[*names, *tables.cells(COLUMNS, row)] for names, row in named_rows(results)]
    return tables.markdown(["model", "chips", *(title.strip() for title in COLUMNS)], rows)


def main() -> None:
    """Run the benchmark and save `benchmarks/results/planning_ranking.json`."""
    benchmark = Benchmark("planning_ranking", __doc__, quick=1, docs=("planning.md", markdown))
    options = benchmark.parse()
    results = measure((1, 32) if options.quick else SLICES)
    lines = [f"Spearman of {what} {r:.3f}" for what, r in results["spearman"].items()]
    shown = tables.table("MaxText on v5e", COLUMNS, named_rows(results), ("model", "chips"))
    benchmark.finish(results, shown, *lines)


if __name__ == "__main__":
    main()
