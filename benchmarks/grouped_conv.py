"""Benchmark: convolutions in groups of a batch that is split over eight devices.

    python -m benchmarks.grouped_conv [--quick] [--rounds N]

One process with eight virtual CPU devices, which share the machine's cores. A compiled step
(`xs.compile`) computes a convolution, or its gradients, on one device; on eight, each of which
computes its rows; and on eight as XLA's partitioner splits it by itself, which gathers the batch.
They are called in turns, each until its results are computed.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import torch
from rich.table import Table

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.lowerings import conv
from tools.harness import tables, timing
from tools.harness.command import Benchmark

DEVICES = 8
SIZES = {  # batch, channels, height and width, groups, channels of the result
    "8 of 16": (32, 16, 24, 8, 16),
    "16 of 32": (32, 32, 24, 16, 32),
    "8 of 64": (32, 64, 24, 8, 64),
    "32 of 128": (32, 128, 12, 32, 128),
    "depthwise": (32, 64, 24, 64, 64),
}


def main() -> None:
    """Run the benchmark and save `benchmarks/results/grouped_conv.json`."""
    benchmark = Benchmark("grouped_conv", __doc__, rounds=7, quick=1)
    options = benchmark.parse()
    iso.simulate_devices(DEVICES)
    results = {
        f"{name}, {what}": measure(SIZES[name], what, options.rounds)
        for name in (["8 of 16"] if options.quick else SIZES)
        for what in STEPS
    }
    benchmark.finish(results, table(results))


def measure(sizes: tuple[int, ...], what: str, rounds: int) -> dict[str, Any]:
    """Time a step in its three forms, in turns.

    Args:
        sizes: see `SIZES`.
        what: one of `STEPS`.
        rounds: timed calls of each.

    Returns:
        Median milliseconds of each, and the medians of their ratios to one device.
    """
    batch, channels, side, groups, out = sizes
    torch.manual_seed(0)
    x, weight = torch.randn(batch, channels, side, side), torch.randn(out, channels // groups, 3, 3)
    mesh = iso.make_mesh((DEVICES,), ("batch",))
    unsharded = x.to("jax"), weight.to("jax")
    split = iso.shard(x.to("jax"), mesh, iso.P("batch")), iso.shard(weight.to("jax"), mesh, iso.P())
    calls = {
        "one device": _call(what, groups, unsharded),
        "eight devices": _call(what, groups, split),
    }
    with mock.patch.object(conv, "by_groups", lambda x: False):
        calls["eight by XLA alone"] = _call(what, groups, split, another=True)
    times = timing.interleave(calls, rounds=rounds)
    return {
        name: {
            "median_ms": statistics.median(times[name]) * 1e3,
            "ratio": timing.paired(times[name], times["one device"]),
        }
        for name in calls
    }


def _call(
    what: str, groups: int, operands: tuple[Any, Any], another: bool = False
) -> Callable[[], None]:
    """A call of a compiled step, which is compiled and has run.

    Programs of the same operations are compiled once, so `another` one has one more.
    """

    @xs.compile
    def step(x: Any, weight: Any) -> Any:
        return (*STEPS[what](x, weight, groups), *([weight.neg()] if another else []))

    def call() -> None:
        jax.block_until_ready([iso.to_jax(result) for result in step(*operands)])

    call()
    call()
    return call


def _forward(x: Any, weight: Any, groups: int) -> Any:
    return (torch.nn.functional.conv2d(x, weight, padding=1, groups=groups),)


def _gradients(x: Any, weight: Any, groups: int) -> Any:
    leaves = [leaf.detach().requires_grad_() for leaf in (x, weight)]
    return torch.autograd.grad(_forward(*leaves, groups)[0].square().sum(), leaves)


STEPS = {"forward": _forward, "gradients": _gradients}


def table(results: dict[str, dict[str, Any]]) -> Table:
    """Show what `measure` found."""
    rows = [((name, form), row) for name, forms in results.items() for form, row in forms.items()]
    columns = {"median": "{median_ms:.1f} ms", "to one device": "{ratio:.2f}"}
    return tables.table("Convolutions in groups", columns, rows, ("step", "form"))


if __name__ == "__main__":
    main()
