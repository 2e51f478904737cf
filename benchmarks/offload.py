"""Benchmark: memory of a TPU's devices with optimizer state in the memory of the host.

    pip install libtpu
    python -m benchmarks.offload [--layers N] [--width N] [--batch N]

A training step (`train_step`, Adam) of an MLP over 8 chips of v5e is compiled by the TPU's own
compiler, which needs no TPU: once as it is, once with both averages of Adam in `pinned_host`
(`Plan(.., memory=..)`). The figures are the compiler's, for one device: what the step is given, its
temporaries, and what it takes of the host. The target is that the sum on the device falls by the
size of the state.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from rich.table import Table

import isoshard as iso
from isoshard import P, Plan
from isoshard.jax_bridge import train_step
from tools.harness import tables
from tools.harness.command import Benchmark

CHIPS = "v5e:2x4"
MIB = 2**20
# Read when libtpu is loaded: there is no TPU to ask for these.
ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def main() -> None:
    """Run the benchmark and save `benchmarks/results/offload.json`."""
    benchmark = Benchmark("offload", __doc__, docs=("benchmarks.md", markdown))
    for name, size in (("layers", 16), ("width", 2048), ("batch", 8192)):
        benchmark.add(f"--{name}", type=int, default=size)
    options = benchmark.parse()
    if importlib.util.find_spec("libtpu") is None:
        sys.exit("the compiler for TPUs is not installed: pip install libtpu")
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_platforms", "cpu")
    iso.simulate_devices(8)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS).devices
    mesh = Mesh(np.array(devices).reshape(8), ("x",), axis_types=(AxisType.Explicit,))
    sizes = (options.layers, options.width, options.batch)
    results = {
        "on the device": measure(mesh, {}, *sizes),
        "on the host": measure(mesh, {"*.mu.*": "pinned_host", "*.nu.*": "pinned_host"}, *sizes),
    }
    benchmark.finish({"sizes": sizes, "state": results}, table(results))


def measure(mesh: Mesh, memory: Any, layers: int, width: int, batch: int) -> dict[str, float]:
    """Compile the step for a mesh of described devices.

    Args:
        mesh: of the devices.
        memory: the memory rules of the plan.
        layers: of the model.
        width: of a layer.
        batch: rows.

    Returns:
        MiB on one device, and of the host for one device.
    """
    plan = Plan({"*": P("x")}, memory=memory)
    optimizer = optax.adam(1e-3)
    here = jax.make_mesh((8,), ("x",))
    train_state = train_step(loss_of, optimizer, here, plan).init(lambda: parameters(layers, width))
    step = train_step(loss_of, optimizer, mesh, plan)
    state = jax.tree.map(
        lambda x, layout: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout),
        train_state,
        step.layouts(train_state),
    )
    rows = jax.ShapeDtypeStruct((batch, width), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    analysis = step.lower(state, rows).compile().memory_analysis()
    grown = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    return {
        "given_mib": arguments / MIB,
        "temporaries_mib": temporaries / MIB,
        "device_mib": (arguments + temporaries + grown) / MIB,
        "host_mib": analysis.host_argument_size_in_bytes / MIB,
    }


def parameters(layers: int, width: int) -> dict[str, jax.Array]:
    """The weights of the model."""
    return {f"w{n}": jnp.full((width, width), 1 / width) for n in range(layers)}


def loss_of(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """The mean square of what the layers make of a batch."""
    for weight in weights.values():
        x = jnp.tanh(x @ weight)
    return (x**2).mean()


def table(results: dict[str, dict[str, float]]) -> Table:
    """Show what `measure` found."""
    columns = {
        "given": "{given_mib:.1f}",
        "temporaries": "{temporaries_mib:.1f}",
        "on the device": "{device_mib:.1f}",
        "on the host": "{host_mib:.1f}",
    }
    shown = tables.by_name(f"a training step on {CHIPS}, MiB of one device", columns, results)
    before, after = (row["device_mib"] for row in results.values())
    shown.caption = f"{before - after:.1f} MiB less on each device"
    return shown


def markdown(results: dict[str, Any]) -> str:
    """The table of docs/benchmarks.md.

    Args:
        results: what `measure` returns.
    """
    return tables.in_markdown(table(results["state"]))


if __name__ == "__main__":
    main()
