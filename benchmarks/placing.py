"""Benchmark: what `iso.shard` of a `jax.Array` costs beside the bare `jax.device_put`.

    python -m benchmarks.placing [--rounds 1000]

The array is small (8 x 4 float32 over 8 devices), so the time is that of the host: reading the
spec, checking it, finding the layout. It comes from one device, from another layout, from a mesh of
the same devices with the other axis type, or lies where it is wanted already, which both give back.
Both contestants return before the data has moved, and wait for it outside the time.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

import isoshard as iso
from benchmarks import timing

DEVICES = 8
SHAPE = (8, 4)
LIMIT = 1.2
KINDS = (AxisType.Auto, AxisType.Explicit)


def main() -> None:
    """Run the benchmark and save `benchmarks/results/placing.json`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placing")
    parser.add_argument("--rounds", type=int, default=1000, help="timed calls of each contestant")
    options = parser.parse_args()
    iso.simulate_devices(DEVICES)
    results = {kind.name: measure(kind, options.rounds) for kind in KINDS}
    console = Console()
    console.print(table(results))
    console.print(f"wrote {timing.save('placing', results)}")


def measure(kind: AxisType, rounds: int) -> dict[str, Any]:
    """Time every way to a mesh of one type.

    Args:
        kind: the type of its axis.
        rounds: timed calls of each contestant.

    Returns:
        By source the times and ratios of the contestants.
    """
    mesh = iso.make_mesh((DEVICES,), ("x",), axis_types=kind)
    wanted = NamedSharding(mesh, P("x", None))
    found = {}
    for source, x in sources(mesh).items():
        calls = {
            "jax.device_put": lambda x=x: jax.device_put(x, wanted),
            "iso.shard": lambda x=x: iso.shard(x, mesh, P("x", None)),
        }
        assert calls["iso.shard"]().sharding.is_equivalent_to(wanted, 2)
        found[source] = timing.summary(in_turns(calls, rounds), "jax.device_put")
    return found


def sources(mesh: Mesh) -> dict[str, jax.Array]:
    """The same array in four places."""
    host = np.ones(SHAPE, np.float32)
    other = next(kind for kind in KINDS if kind not in mesh.axis_types)
    twin = Mesh(mesh.devices, mesh.axis_names, axis_types=(other,))
    return {
        "one device": jax.device_put(host),
        "another layout": jax.device_put(host, NamedSharding(mesh, P())),
        "the other axis type": jax.device_put(host, NamedSharding(twin, P("x", None))),
        "there already": jax.device_put(host, NamedSharding(mesh, P("x", None))),
    }


def in_turns(calls: dict[str, Callable[[], jax.Array]], rounds: int) -> dict[str, list[float]]:
    """Time the calls as `timing.interleave`, and wait for the result outside the time."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    gc.collect()
    gc.disable()
    for number in range(-rounds // 10, rounds):
        for name in names[:: 1 if number % 2 else -1]:
            started = time.perf_counter()
            made = calls[name]()
            taken = time.perf_counter() - started
            made.block_until_ready()
            if number >= 0:
                times[name].append(taken)
    gc.enable()
    return times


def table(results: dict[str, Any]) -> Table:
    """Show what `measure` found."""
    shown = Table(title=f"float32 {SHAPE} over {DEVICES} devices, host time, {LIMIT} at most")
    for title in ("axis", "from", "jax.device_put", "iso.shard", "ratio"):
        shown.add_column(title, justify="right" if "." in title or title == "ratio" else "left")
    for kind, ways in results.items():
        for source, row in ways.items():
            shown.add_row(
                kind,
                source,
                *(f"{row[name]['median_ms'] * 1e3:.1f} us" for name in row),
                f"{row['iso.shard']['ratio']:.2f}",
            )
    return shown


if __name__ == "__main__":
    main()
