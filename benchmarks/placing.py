"""Benchmark: what `iso.shard` of a `jax.Array` costs beside the bare `jax.device_put`.

    python -m benchmarks.placing [--rounds 1000]

The array is small (8 x 4 float32 over 8 devices), so the time is that of the host: reading the
spec, checking it, finding the layout. It comes from one device, from another layout, from a mesh of
the same devices with the other axis type, or lies where it is wanted already, which both give back.
Both contestants return before the data has moved, and wait for it outside the time.
"""

from __future__ import annotations

import gc
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

import isoshard as iso
from tools.harness import tables, timing
from tools.harness.command import Benchmark

DEVICES = 8
SHAPE = (8, 4)
LIMIT = 1.2
KINDS = (AxisType.Auto, AxisType.Explicit)


def main() -> None:
    """Run the benchmark and save `benchmarks/results/placing.json`."""
    benchmark = Benchmark("placing", __doc__, rounds=1000, docs=("benchmarks.md", markdown))
    rounds = benchmark.parse().rounds
    iso.simulate_devices(DEVICES)
    gc.disable()  # calls take microseconds
    results = {kind.name: measure(kind, rounds) for kind in KINDS}
    benchmark.finish(results, table(results))


def measure(kind: AxisType, rounds: int) -> dict[str, Any]:
    """Time every way to a mesh of one type.

    Args:
        kind: the type of its axis.
        rounds: timed calls of each contestant.

    Returns:
        By source the times and ratios of the contestants.
    """
    mesh = iso.make_mesh((DEVICES,), ("x",), axis_types=kind)
    sharding = NamedSharding(mesh, P("x", None))
    results = {}
    for source, x in sources(mesh).items():
        calls = {
            "jax.device_put": lambda x=x: jax.device_put(x, sharding),
            "iso.shard": lambda x=x: iso.shard(x, mesh, P("x", None)),
        }
        assert calls["iso.shard"]().sharding.is_equivalent_to(sharding, 2)
        times = timing.interleave(
            calls, rounds=rounds, warmup=rounds // 10, settle=jax.block_until_ready
        )
        results[source] = timing.summary(times, "jax.device_put")
    return results


def sources(mesh: Mesh) -> dict[str, jax.Array]:
    """The same array in four places."""
    host = np.ones(SHAPE, np.float32)
    other = next(kind for kind in KINDS if kind not in mesh.axis_types)
    other_mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(other,))
    return {
        "one device": jax.device_put(host),
        "another layout": jax.device_put(host, NamedSharding(mesh, P())),
        "the other axis type": jax.device_put(host, NamedSharding(other_mesh, P("x", None))),
        "there already": jax.device_put(host, NamedSharding(mesh, P("x", None))),
    }


def table(results: dict[str, Any]) -> Table:
    """Show what `measure` found."""
    rows = {
        kind: {
            source: {"bare": row["jax.device_put"], "ours": row["iso.shard"]}
            for source, row in ways.items()
        }
        for kind, ways in results.items()
    }
    return tables.by_pair(
        f"float32 {SHAPE} over {DEVICES} devices, host time, {LIMIT} at most",
        ("axis", "from"),
        {
            "jax.device_put": "{bare[median_ms]:.4f} ms",
            "iso.shard": "{ours[median_ms]:.4f} ms",
            "ratio": "{ours[ratio]:.2f}",
        },
        rows,
    )


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
