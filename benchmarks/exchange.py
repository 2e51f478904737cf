"""Benchmark: 64 MB across the frameworks, against the bare calls that share memory.

    python -m benchmarks.exchange [--rounds 100]

From JAX to torch, `iso.local_shards(a, framework="torch")` stands against `torch.from_dlpack` of
each shard; from torch to JAX, `iso.to_jax(t, sharding, copy=False)` against `jax.device_put` of the
tensor's NumPy view. Nothing is copied, so the time does not depend on the bytes; a copy is timed
beside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.table import Table

import isoshard as iso
from tools.harness import tables, timing
from tools.harness.command import Benchmark

DEVICES = 8
SIZES_MB = (1, 64)
COLUMNS = 1024


@dataclasses.dataclass(frozen=True)
class Direction:
    """One way across.

    Attributes:
        ours: the call of isoshard; returns what it made.
        bare: the calls of JAX and torch that it stands for.
        copied: the same with a copy.
        pointers: of a result, one address per device.
        expected: the addresses that share memory with the source.
    """

    ours: Callable[[], Any]
    bare: Callable[[], Any]
    copied: Callable[[], Any]
    pointers: Callable[[Any], list[int]]
    expected: list[int]


def main() -> None:
    """Run the benchmark and save `benchmarks/results/exchange.json`."""
    benchmark = Benchmark("exchange", __doc__, rounds=100, docs=("benchmarks.md", markdown))
    rounds = benchmark.parse().rounds
    iso.simulate_devices(DEVICES)
    mesh = iso.make_mesh((DEVICES,), ("x",))
    results = {
        direction: {f"{size} MB": measure(make, size, mesh, rounds) for size in SIZES_MB}
        for direction, make in {"jax to torch": to_torch, "torch to jax": to_jax}.items()
    }
    benchmark.finish(results, table(results))


def measure(
    make: Callable[[int, Mesh], Direction], megabytes: int, mesh: Mesh, rounds: int
) -> dict[str, Any]:
    """Time one direction at one size.

    Args:
        make: prepares the direction for a number of rows.
        megabytes: of float32 to exchange.
        mesh: of one axis "x".
        rounds: timed calls.

    Returns:
        Times and ratios by contestant, and how many buffers are shared.
    """
    direction = make(megabytes * 2**20 // (4 * COLUMNS), mesh)
    shared = [
        ours == expected
        for ours, expected in zip(
            direction.pointers(direction.ours()), direction.expected, strict=True
        )
    ]
    times = timing.interleave(
        {"bare calls": direction.bare, "isoshard": direction.ours}, rounds=rounds, warmup=10
    )
    copied = timing.interleave({"copy": direction.copied}, rounds=max(3, rounds // 10))
    return {
        **timing.summary(times | copied, "bare calls"),
        "shared": sum(shared),
        "buffers": len(shared),
    }


def to_torch(rows: int, mesh: Mesh) -> Direction:
    """From a row-sharded `jax.Array` to torch tensors, one per device."""
    array = jax.device_put(
        np.ones((rows, COLUMNS), np.float32), NamedSharding(mesh, P("x", None))
    ).block_until_ready()
    return Direction(
        ours=lambda: [shard.data for shard in iso.local_shards(array, framework="torch")],
        bare=lambda: [torch.from_dlpack(shard.data) for shard in array.addressable_shards],
        copied=lambda: [torch.from_dlpack(s.data).clone() for s in array.addressable_shards],
        pointers=lambda tensors: [tensor.data_ptr() for tensor in tensors],
        expected=[shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards],
    )


def to_jax(rows: int, mesh: Mesh) -> Direction:
    """From a CPU tensor to a row-sharded `jax.Array`."""
    tensor = torch.ones(rows, COLUMNS)
    sharding = NamedSharding(mesh, P("x", None))
    shard_bytes = tensor.nbytes // mesh.size
    return Direction(
        ours=lambda: iso.to_jax(tensor, sharding, copy=False),
        bare=lambda: jax.device_put(tensor.numpy(), sharding),
        copied=lambda: jax.block_until_ready(iso.to_jax(tensor, sharding, copy=True)),
        pointers=lambda array: [s.data.unsafe_buffer_pointer() for s in array.addressable_shards],
        expected=[tensor.data_ptr() + number * shard_bytes for number in range(mesh.size)],
    )


def table(results: dict[str, Any]) -> Table:
    """Show what `measure` found."""
    columns = {
        "bare calls": "{bare calls[median_ms]:.3f} ms",
        "isoshard": "{isoshard[median_ms]:.3f} ms",
        "ratio": "{isoshard[ratio]:.2f}",
        "copy": "{copy[median_ms]:.3f} ms",
        "shared": "{shared} of {buffers}",
    }
    return tables.by_pair(f"float32 over {DEVICES} devices", ("", "size"), columns, results)


markdown = tables.documented(table)


if __name__ == "__main__":
    main()
