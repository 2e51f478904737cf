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
    made = tuple(
        StepInput(f"x{n}", "parameter", shape, np.dtype(dtype), NamedSharding(mesh, spec))
        for n, (shape, spec) in enumerate(inputs)
    )
    structs = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in made]
    traced = jax.make_jaxpr(function)(*structs)
    results = tuple(StepResult(f"y{n}") for n in range(len(traced.jaxpr.outvars)))
    return by_tracing(TracedStep("step", "jax", traced, made, results, mesh))


def sent(found):
    return [(op.name, op.sent, op.dtype) for op in found.ops if op.is_collective]


SUM = (((64, 32), P(None, "x")), ((32, 16), P("x")))


def test_hosts_send_bfloat16_as_float32():
    assert sent(program(jnp.matmul, "cpu:8", *SUM)) == [("all-reduce", 64 * 16 * 4, "float32")]
    assert sent(program(jnp.matmul, "v5e:2x4", *SUM)) == [("all-reduce", 64 * 16 * 2, "bfloat16")]


def test_sums_that_are_only_added_are_sent_once_but_on_hosts():
    def both(x, y, v, w):
        return x @ v + y @ w

    two = (SUM[0], SUM[0], SUM[1], SUM[1])
    assert len(sent(program(both, "v5e:2x4", *two))) == 1
    assert len(sent(program(both, "h100:1x8", *two))) == 1
    (one,) = sent(program(both, "cpu:8", *two))
    assert one[1] == 2 * 64 * 16 * 4  # two, joined


def test_split_sums_that_are_only_added_are_sent_once_but_on_hosts():
    def three(x, y, u, v, z):
        return (x @ u + y @ v + (x + y) @ u) * z

    inputs = (SUM[0], SUM[0], SUM[1], SUM[1], ((64, 16), P("x")))
    assert sent(program(three, "v5e:2x4", *inputs)) == [("reduce-scatter", 64 * 16 * 2, "bfloat16")]
    assert sent(program(three, "h100:1x8", *inputs)) == [
        ("reduce-scatter", 64 * 16 * 2, "bfloat16")
    ]
    (one,) = sent(program(three, "cpu:8", *inputs))
    assert one[1] == 3 * 64 * 16 * 4


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


@pytest.mark.parametrize(("layers", "said"), [(12, 60_136_628_848), (13, 64_432_186_744)])
def test_over_their_limit_gpus_compute_again_what_they_can(layers, said):
    """jax-cuda12-plugin 0.10.2 said so many bytes; compiling it again needs that package."""
    inputs = (((2048, 256, 256, 128), P("x")), *[((3, 3, 128, 128), P())] * layers)
    found = program(convolutions, "h100:1x8", *inputs)
    capacity = topology("h100:1x8").chip.memory
    assert found.memory.peak == pytest.approx(said, rel=0.06)
    assert (found.memory.peak > capacity) is (said > capacity)
    limit = found.notes[-1].partition("more than the ")[2].partition(" that XLA")[0]
    assert limit == "56.8 GiB"
    left = f"and {human_bytes(found.memory.peak)} are left"
    assert (left in found.notes[-1]) is (layers > 12)
    assert "max" in [op.name for op in found.ops[2 * layers :]]
    assert "XLA's scheduler for GPUs" not in program(convolutions, "v5e:2x4", *inputs).notes[-1]


def test_hosts_and_gpus_look_up_where_rows_are_read():
    """Then all tables that are looked in are there at once; a TPU's compiler looks up by itself."""

    def step(one, two, at):
        return one[at[:, 0].astype("int32")] + two[at[:, 1].astype("int32")]

    tables = ((4096, 64), P("x"))
    rows, whole = (1 << 17) // 8 * 64 * 2, 4096 * 64 * 2

    def made(machine):
        found = program(step, machine, tables, tables, ((1 << 17, 2), P("x")))
        rest = found.memory.parameters + rows
        return [op.name for op in found.ops].count("gather"), found.memory.peak - rest

    count, needed = made("h100:1x8")
    assert count == 0 and 2 * whole <= needed < 3 * whole
    count, needed = made("v5e:2x4")
    assert count == 2 and needed >= rows


def test_gpus_gather_what_is_there_while_they_compute():
    inputs = (((2**17, 64), P("x")), ((64, 1024), P()), ((2**20, 64), P("x")))

    def ops(machine):
        mesh = topology(machine).mesh((16,), ("x",))

        def step(x, w, table):
            product = (x @ w).sum(1)
            whole = jax.lax.with_sharding_constraint(table, NamedSharding(mesh, P()))
            return product, jnp.sort(whole, 1)[:, 0]

        return program(step, machine, *inputs, dtype="float32").ops

    def order(machine):
        wanted = ("dot_general", "all-gather")
        return [one.name for one in ops(machine) if one.name in wanted]

    assert order("v5e:4x4") == ["dot_general", "all-gather"]
    assert order("h100:2x8") == ["all-gather", "dot_general"]
