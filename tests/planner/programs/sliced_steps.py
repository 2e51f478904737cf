"""A training step over slices, for machines that are not here, and programs of it by libtpu.

python -m tests.planner.programs.sliced_steps

compiles it for 2 and 32 slices (`pip install libtpu`, or ISOSHARD_COMPILER_PYTHON), writes the
programs that the tests read, without configurations of single kernels, and says what goes over DCN.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax

from isoshard import Plan
from isoshard.planner.machine.topologies import topology
from isoshard.planner.programs.compiling import compiled, exported, target_of
from isoshard.planner.programs.slice_crossings import check_crossings
from isoshard.planner.traced.of_step import traced_step

RECORDED = Path(__file__).with_name("recorded")
MACHINES = {2: "v5e:2*4x4", 32: "v5e:32*16x16"}
BATCH = 16384
PARAMETERS = {"up": (512, 2048), "down": (2048, 512)}
PARAMETER_BYTES = 4 * 2 * 512 * 2048
GRADIENTS = Plan(dcn={"replica": "all-reduce"})
HSDP = Plan.fsdp("data", min_bytes=0) * Plan.data_parallel("replica") * GRADIENTS
"""Parameters split within a slice, the batch over slices; gradients may cross."""


def step(params, x):
    """One step of gradient descent of an MLP."""

    def loss(params):
        return ((jax.nn.relu(x @ params["up"]) @ params["down"]) ** 2).mean()

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def mesh_of(slices):
    """("replica", "data"): slices, and the devices of one."""
    machine = topology(MACHINES[slices])
    return machine.mesh((slices, machine.size // slices), ("replica", "data"))


def arguments():
    """Shapes of the parameters and the batch, float32."""
    params = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in PARAMETERS.items()}
    return params, jax.ShapeDtypeStruct((BATCH, 512), "float32")


def recorded(slices):
    """The text of libtpu's program."""
    return (RECORDED / f"v5e_slices_{slices}.hlo").read_text()


def main():
    """Compile, write, tell."""
    for slices in MACHINES:
        mesh = mesh_of(slices)
        traced = traced_step(step, arguments(), {}, mesh, HSDP)
        target = target_of(mesh, topology(MACHINES[slices]))
        text = compiled(exported(traced, "tpu"), target, cache=False).text
        text = re.sub(r", backend_config=\{.*\}(?=(, metadata|$))", "", text, flags=re.MULTILINE)
        (RECORDED / f"v5e_slices_{slices}.hlo").write_text(text)
        for one in check_crossings(text, mesh, HSDP):
            print(slices, one.kind, one.axes, one.slices, one.count, "x", one.bytes, one.line)


if __name__ == "__main__":
    main()
