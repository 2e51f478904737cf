"""Benchmark: a replayed step on a mesh with Explicit axes, beside the same step on Auto ones.

    python -m benchmarks.typed_meshes [--quick] [--rounds N]

A captured training step (`xs.compile`, AdamW) of an MLP whose weights are split over one axis of a
(2, 4) mesh and whose batch is split over the other: once on the mesh as `jax.make_mesh` makes it,
once on one with Auto axes. Both are called in turns, each until its results are computed. They run
equal programs, and results keep the types of their mesh; the target is that the types cost nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import AxisType
from rich.table import Table

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P, Plan
from tools.harness import tables, timing
from tools.harness.command import Benchmark

LAYERS = (2, 50)
WIDTH, BATCH = 64, 64
WARMUP = 5


def main() -> None:
    """Run the benchmark and save `benchmarks/results/typed_meshes.json`."""
    benchmark = Benchmark(
        "typed_meshes", __doc__, rounds=200, quick=20, docs=("benchmarks.md", markdown)
    )
    options = benchmark.parse()
    iso.simulate_devices(8)
    layers = LAYERS[: 1 if options.quick else None]
    results = {f"{n} layers": measure(n, options.rounds) for n in layers}
    benchmark.finish(results, table(results))


def measure(layers: int, rounds: int) -> dict[str, float]:
    """Time the step on both meshes in turns.

    Args:
        layers: of the model.
        rounds: timed calls of each.

    Returns:
        Median milliseconds of both, the ratio of the medians, and the median of the ratios.
    """
    steps = {kind.name: replayed(layers, kind) for kind in (AxisType.Explicit, AxisType.Auto)}
    times = timing.interleave(steps, rounds=rounds, warmup=WARMUP)
    medians = {kind: statistics.median(taken) for kind, taken in times.items()}
    return {
        "explicit_ms": medians["Explicit"] * 1e3,
        "auto_ms": medians["Auto"] * 1e3,
        "ratio": medians["Explicit"] / medians["Auto"],
        "paired_ratio": timing.paired(times["Explicit"], times["Auto"]),
    }


def replayed(layers: int, kind: AxisType) -> Callable[[], Any]:
    """A captured training step on a mesh whose axes have one type."""
    torch.manual_seed(0)
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))
    model: Any = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    iso.shard(model, mesh, Plan({"*.weight": ("y",), "*": P()}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = iso.shard(torch.ones(BATCH, WIDTH), mesh, P("x"))

    @xs.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def call() -> None:
        step(batch)
        xs.sync(wait=True)

    for _ in range(WARMUP):
        call()
    assert iso.sharding_of(model[0].weight).mesh == mesh
    return call


def table(results: dict[str, dict[str, float]]) -> Table:
    """Show what `measure` found."""
    columns = {
        "Explicit axes": "{explicit_ms:.3f}",
        "Auto axes": "{auto_ms:.3f}",
        "ratio": "{ratio:.3f}",
        "median of ratios": "{paired_ratio:.3f}",
    }
    return tables.by_name("a replayed training step, medians in ms", columns, results)


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
