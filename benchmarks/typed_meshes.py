"""Benchmark: a replayed step on a mesh with Explicit axes, beside the same step on Auto ones.

    python -m benchmarks.typed_meshes [--quick] [--rounds N]

A captured training step (`xs.compile`, AdamW) of an MLP whose weights are split over one axis of a
(2, 4) mesh and whose batch is split over the other: once on the mesh as `jax.make_mesh` makes it,
once on one with Auto axes. Both are called in turns, each until its results are computed. They run
equal programs, and results keep the types of their mesh; the target is that the types cost nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import AxisType
from rich.console import Console
from rich.table import Table

import isoshard as iso
import isoshard.torch_bridge as xs
from benchmarks import timing
from isoshard import P, Plan

LAYERS = (2, 50)
WIDTH, BATCH = 64, 64
WARMUP = 5


def main() -> None:
    """Run the benchmark and save `benchmarks/results/typed_meshes.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.typed_meshes")
    parser.add_argument("--quick", action="store_true", help="few layers and rounds, not saved")
    parser.add_argument("--rounds", type=int, help="timed calls of each")
    options = parser.parse_args()
    iso.simulate_devices(8)
    rounds = options.rounds or (20 if options.quick else 200)
    results = {f"{n} layers": measure(n, rounds) for n in LAYERS[: 1 if options.quick else None]}
    Console(width=100).print(table(results))
    if not options.quick:
        print(f"wrote {timing.save('typed_meshes', results)}")


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
    pairs = zip(times["Explicit"], times["Auto"], strict=True)
    medians = {kind: statistics.median(taken) for kind, taken in times.items()}
    return {
        "explicit_ms": medians["Explicit"] * 1e3,
        "auto_ms": medians["Auto"] * 1e3,
        "ratio": medians["Explicit"] / medians["Auto"],
        "paired_ratio": statistics.median(ours / theirs for ours, theirs in pairs),
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
    shown = Table(title="a replayed training step, medians in ms")
    for title in ("", "Explicit axes", "Auto axes", "ratio", "median of ratios"):
        shown.add_column(title, justify="right")
    for name, row in results.items():
        figures = [f"{row[key]:.3f}" for key in ("explicit_ms", "auto_ms", "ratio", "paired_ratio")]
        shown.add_row(name, *figures)
    return shown


if __name__ == "__main__":
    main()
