"""Operators that split themselves are planned as they run, where devices talk in them."""

from __future__ import annotations

import collections

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.runtime.hlo_collectives import collectives
from isoshard.core.runtime.jaxprs import equations
from isoshard.core.traced.traced_step import StepInput, StepResult, TracedStep
from isoshard.domain.attention.partitioned_attention import Attention
from isoshard.planner.programs.compiling import by_partitioner
from isoshard.planner.programs.device_ops import collective_axes
from isoshard.planner.propagation.self_split import CUSTOM_PARTITIONING, with_custom_partitions

ATTEND = Attention(False, 1.0)
SHAPE = (4, 2, 64, 8)


def attended(x):
    return ATTEND(x, x, x)[0]


@jax.custom_vjp
def with_gradient(x):
    return attended(x)


with_gradient.defvjp(lambda x: (attended(x), x), lambda x, g: (g,))


def traced(function, spec) -> TracedStep:
    mesh = make_mesh((2, 4), ("data", "x"), axis_types=AxisType.Auto)  # where operators are
    layout = NamedSharding(mesh, spec)
    program = jax.make_jaxpr(function)(np.ones(SHAPE, np.float32))
    given = StepInput("x", "input", SHAPE, np.dtype("float32"), layout)
    return TracedStep("attention", "jax", program, (given,), (StepResult("y"),), layout.mesh)


def names(program) -> set[str]:
    return {one.primitive.name for one in equations(program)}


def compared(function, step, values):
    """The collectives of a step as planned, which are those of the program that runs."""
    told = collections.Counter[object]()
    for op in by_partitioner(step, progress=False).ops:
        if op.is_collective:
            told[op.name, op.axes, op.sent] += op.times
    placed = [jax.device_put(x, one.sharding) for x, one in zip(values, step.inputs, strict=True)]
    ran = collections.Counter[object]()
    for one in collectives(jax.jit(function).lower(*placed).compile().as_text()):
        kind = one.kind.replace("_", "-")
        ran[kind, collective_axes(kind, one.bytes, one.groups, step.mesh), one.bytes] += one.times
    assert told == ran
    return ran


def test_a_ring_is_planned_with_the_collectives_that_run():
    step = traced(with_gradient, P("data", None, "x"))
    ran = compared(with_gradient, step, [np.ones(SHAPE, np.float32)])
    assert any("permute" in str(one) for one in ran)


def test_what_splits_without_talking_is_left_to_the_partitioner():
    step = traced(attended, P("data", "x"))
    assert {"shard_map", "ppermute"}.isdisjoint(names(with_custom_partitions(step)))
    assert CUSTOM_PARTITIONING in names(with_custom_partitions(step))
    plain = traced(lambda x: x + 1, P("data"))
    assert with_custom_partitions(plain) is plain.program


def test_what_an_answer_needs_does_not_spread_to_what_is_around_it():
    mesh = auto(make_mesh((2, 4), ("data", "x")))
    rows, columns = (NamedSharding(mesh, spec) for spec in (P("data", "x"), P(None, ("data", "x"))))
    shapes, layouts = {"x": (4, 32, 64), "weight": (64, 64)}, {"x": rows, "weight": columns}

    def attention(weight, x):
        """Heads are split by the weight, the result by what it meets."""
        mask = jax.numpy.tril(jax.numpy.ones((32, 32), bool))
        heads = (x @ weight).reshape(4, 32, 8, 8).transpose(0, 2, 1, 3)
        y = ATTEND(heads, -heads, heads, mask)[0].transpose(0, 2, 1, 3).reshape(4, 32, 64)
        return jax.lax.with_sharding_constraint(x + y, rows).sum()

    def step(x, weight):
        return attention(weight, x)

    given = [np.full(shape, 0.1, np.float32) for shape in shapes.values()]
    program = jax.make_jaxpr(step)(*given)
    inputs = tuple(
        StepInput(n, "input", shape, np.dtype("float32"), layouts[n]) for n, shape in shapes.items()
    )
    traced = TracedStep("step", "jax", program, inputs, (StepResult("slope"),), mesh)
    assert "ppermute" in names(with_custom_partitions(traced))
    assert compared(step, traced, given)
