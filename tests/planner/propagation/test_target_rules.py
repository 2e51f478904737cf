"""What each rule of a target changes, on programs small enough to count by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.runtime.formatting import human_bytes
from isoshard.core.traced.traced_step import StepInput, StepResult, TracedStep
from isoshard.planner.machine.topologies import topology
from isoshard.planner.propagation.trace_depth import by_tracing


def program(function, machine, *inputs, dtype="bfloat16", axes=("x",)):
    """What one device does; inputs are (shape, spec)."""
    described = topology(machine)
    mesh = described.mesh((described.size,), axes)
    leaves = tuple(
        StepInput(f"x{n}", "parameter", shape, np.dtype(dtype), NamedSharding(mesh, spec))
        for n, (shape, spec) in enumerate(inputs)
    )
    structs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    traced = jax.make_jaxpr(function)(*structs)
    results = tuple(StepResult(f"y{n}") for n in range(len(traced.jaxpr.outvars)))
    return by_tracing(TracedStep("step", "jax", traced, leaves, results, mesh))


def collectives(planned):
    return [(op.name, op.sent, op.dtype) for op in planned.ops if op.is_collective]


SUM = (((64, 32), P(None, "x")), ((32, 16), P("x")))


def test_hosts_send_bfloat16_as_float32():
    assert collectives(program(jnp.matmul, "cpu:8", *SUM)) == [
        ("all-reduce", 64 * 16 * 4, "float32")
    ]
    assert collectives(program(jnp.matmul, "v5e:2x4", *SUM)) == [
        ("all-reduce", 64 * 16 * 2, "bfloat16")
    ]


def test_sums_that_are_only_added_are_one_all_reduce_but_on_hosts():
    def both(x, y, v, w):
        return x @ v + y @ w

    two = (SUM[0], SUM[0], SUM[1], SUM[1])
    assert len(collectives(program(both, "v5e:2x4", *two))) == 1
    assert len(collectives(program(both, "h100:1x8", *two))) == 1
    (collective,) = collectives(program(both, "cpu:8", *two))
    assert collective[1] == 2 * 64 * 16 * 4  # two, joined


def test_split_sums_that_are_only_added_are_one_reduce_scatter_but_on_hosts():
    def three(x, y, u, v, z):
        return (x @ u + y @ v + (x + y) @ u) * z

    inputs = (SUM[0], SUM[0], SUM[1], SUM[1], ((64, 16), P("x")))
    assert collectives(program(three, "v5e:2x4", *inputs)) == [
        ("reduce-scatter", 64 * 16 * 2, "bfloat16")
    ]
    assert collectives(program(three, "h100:1x8", *inputs)) == [
        ("reduce-scatter", 64 * 16 * 2, "bfloat16")
    ]
    (collective,) = collectives(program(three, "cpu:8", *inputs))
    assert collective[1] == 3 * 64 * 16 * 4


def test_gpus_copy_what_is_not_summed_last():
    def product(x, w):
        return jnp.sin(x).T @ w

    inputs = (((64, 32), P()), ((64, 16), P()))
    assert "reorder" in {op.name for op in program(product, "h100:1x8", *inputs).ops}
    assert "reorder" not in {op.name for op in program(product, "v5e:2x4", *inputs).ops}


def convolutions(x, *weights):
    """Gradients of a chain of them; what is kept for each is 4 GiB, and as much after its relu."""

    def loss(weights):
        y = x
        for weight in weights:
            y = jax.nn.relu(jax.lax.conv_general_dilated(
                y, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ))  # fmt: skip
        return jnp.mean(y)

    return jax.grad(loss)(weights)


@pytest.mark.parametrize(("layers", "note"), [(12, 60_136_628_848), (13, 64_432_186_744)])
def test_over_their_limit_gpus_compute_again_what_they_can(layers, note):
    """jax-cuda12-plugin 0.10.2 said so many bytes; compiling it again needs that package."""
    inputs = (((2048, 256, 256, 128), P("x")), *[((3, 3, 128, 128), P())] * layers)
    step = program(convolutions, "h100:1x8", *inputs)
    capacity = topology("h100:1x8").chip.memory
    assert step.memory.peak == pytest.approx(note, rel=0.06)
    assert (step.memory.peak > capacity) is (note > capacity)
    limit = step.notes[-1].partition("more than the ")[2].partition(" that XLA")[0]
    assert limit == "56.8 GiB"
    left = f"and {human_bytes(step.memory.peak)} are left"
    assert (left in step.notes[-1]) is (layers > 12)
    assert "max" in [op.name for op in step.ops[2 * layers :]]
    assert "schedules for" not in program(convolutions, "v5e:2x4", *inputs).notes[-1]


def test_hosts_and_gpus_look_up_where_rows_are_read():
    """Then all tables that are looked in are there at once; a TPU's compiler looks up by itself."""

    def step(left, right, at):
        return left[at[:, 0].astype("int32")] + right[at[:, 1].astype("int32")]

    tables = ((4096, 64), P("x"))
    rows, gathered = (1 << 17) // 8 * 64 * 2, 4096 * 64 * 2

    def peak_of(machine):
        planned = program(step, machine, tables, tables, ((1 << 17, 2), P("x")))
        rest = planned.memory.parameters + rows
        return [op.name for op in planned.ops].count("gather"), planned.memory.peak - rest

    count, needed = peak_of("h100:1x8")
    assert count == 0 and 2 * gathered <= needed < 3 * gathered
    count, needed = peak_of("v5e:2x4")
    assert count == 2 and needed >= rows


def test_gpus_gather_inputs_while_they_compute():
    inputs = (((2**17, 64), P("x")), ((64, 1024), P()), ((2**20, 64), P("x")))

    def ops(machine):
        mesh = topology(machine).mesh((16,), ("x",))

        def step(x, w, table):
            product = (x @ w).sum(1)
            gathered = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, P()))
            return product, jnp.sort(gathered, 1)[:, 0]

        return program(step, machine, *inputs, dtype="float32").ops

    def order(machine):
        names = ("dot_general", "all-gather")
        return [op.name for op in ops(machine) if op.name in names]

    assert order("v5e:4x4") == ["dot_general", "all-gather"]
    assert order("h100:2x8") == ["all-gather", "dot_general"]
