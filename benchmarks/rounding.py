"""Benchmark: what it costs that each operation in bfloat16 is rounded, as torch rounds.

    python -m benchmarks.rounding [--quick] [--rounds N]

Captured training steps (`xs.compile`, SGD) of a bfloat16 transformer block and of a bfloat16 MLP:
once as programs are compiled by default, once where `xs.excess_precision()` lets XLA leave out
roundings between operations. Both are called in turns, each until its results are computed. Beside
the times stand the fusions, conversions of dtype and temporaries of both programs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

import isoshard.torch_bridge as xs
from tools.harness import tables, timing
from tools.harness.command import Benchmark

SIZES = {"width": 256, "heads": 8, "rows": 128, "batch": 4}
SMALL = {"width": 32, "heads": 2, "rows": 8, "batch": 2}
PROGRAMS = {"rounded": False, "free": True}
COUNTED = {"fusions": " fusion(", "converts": " convert("}


def main() -> None:
    """Run the benchmark and save `benchmarks/results/rounding.json`."""
    benchmark = Benchmark("rounding", __doc__, rounds=60, quick=5, docs=("benchmarks.md", markdown))
    options = benchmark.parse()
    sizes = SMALL if options.quick else SIZES
    results = {name: measure(name, sizes, options.rounds) for name in MODELS}
    benchmark.finish({"sizes": sizes, **results}, table(results))


def measure(name: str, sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    """Time the step of a model as both programs, in turns.

    Args:
        name: of the model.
        sizes: see `SIZES`.
        rounds: timed calls of each.

    Returns:
        For both, median milliseconds, fusions, conversions and temporaries in MiB; and the median
        of the ratios of times, rounded by free.
    """
    steps = {kind: step(name, sizes, free) for kind, free in PROGRAMS.items()}
    times = timing.interleave({kind: call for kind, (call, _) in steps.items()}, rounds=rounds)
    results: dict[str, Any] = {}
    for kind, (_, captured) in steps.items():
        text = xs.program_text(captured)
        results[kind] = {
            "median_ms": statistics.median(times[kind]) * 1e3,
            **{what: text.count(mark) for what, mark in COUNTED.items()},
            "temporaries_mib": xs.memory_analysis(captured).temp_size_in_bytes / 2**20,
        }
    return {**results, "paired_ratio": timing.paired(times["rounded"], times["free"])}


def step(name: str, sizes: dict[str, int], free: bool) -> tuple[Callable[[], None], Any]:
    """A captured training step of a model; a function that calls it, and itself."""
    torch.manual_seed(0)
    width = sizes["width"]
    model = MODELS[name](sizes).to("jax", torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batch = torch.randn(sizes["batch"], sizes["rows"], width).to("jax", torch.bfloat16)

    @xs.compile
    def train(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def call() -> None:
        with xs.excess_precision(free):
            train(batch)
        xs.sync(wait=True)

    return call, train


def _block(sizes: dict[str, int]) -> Any:
    return torch.nn.TransformerEncoderLayer(
        sizes["width"],
        sizes["heads"],
        4 * sizes["width"],
        dropout=0.0,
        activation="gelu",
        batch_first=True,
        norm_first=True,
    )


def _mlp(sizes: dict[str, int]) -> Any:
    width = sizes["width"]
    return torch.nn.Sequential(
        torch.nn.Linear(width, 4 * width),
        torch.nn.GELU(),
        torch.nn.Linear(4 * width, 4 * width),
        torch.nn.GELU(),
        torch.nn.Linear(4 * width, width),
    )


MODELS = {"transformer block": _block, "mlp": _mlp}


def table(results: dict[str, dict[str, Any]]) -> Table:
    """Show what `measure` found."""
    pairs = {
        name: {"rounded": {**row["rounded"], "ratio": row["paired_ratio"]}, "free": row["free"]}
        for name, row in results.items()
    }
    return tables.by_pair(
        "a bfloat16 training step; rounded after each operation, and free",
        ("", ""),
        {
            "ms": "{median_ms:.2f}",
            **{what: f"{{{what}}}" for what in COUNTED},
            "temporaries, MiB": "{temporaries_mib:.2f}",
            "rounded / free": "{ratio:.3f}",
        },
        pairs,
    )


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md.

    Args:
        results: the results.
    """
    return tables.in_markdown(table({name: results[name] for name in MODELS}))


if __name__ == "__main__":
    main()
