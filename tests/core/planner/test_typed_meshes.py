"""Planning on meshes with Explicit axes, as `jax.make_mesh` makes them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from isoshard import P, Plan
from isoshard.core.planner.axes.border_layouts import spread_layouts
from isoshard.core.planner.estimating import estimate
from isoshard.core.planner.plan_search.searching import search

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MIXED = (EXPLICIT, AUTO)
LAYERS, WIDTH = 12, 64


def mesh_of(types):
    return jax.make_mesh((2, 4), ("data", "x"), axis_types=types)


def step(weights, x):
    def loss(weights):
        y = x
        for w in weights:
            y = jax.nn.gelu(y @ w) @ w.T
        return (y * y).sum()

    value, grads = jax.value_and_grad(loss)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], value


def arguments(mesh=None):
    layouts = [None if mesh is None else NamedSharding(mesh, P(*one)) for one in ((), ("data",))]
    w = jax.ShapeDtypeStruct((WIDTH, WIDTH), np.float32, sharding=layouts[0])
    return [w] * LAYERS, jax.ShapeDtypeStruct((32, WIDTH), np.float32, sharding=layouts[1])


def told(report):
    found = {}
    for one in report.collectives:
        key = one.kind, one.axes
        found[key] = found.get(key, 0) + one.bytes * one.count
    return found, report.memory.parameters, report.memory.inputs


@pytest.mark.parametrize("depth", ["trace", "partition"])
@pytest.mark.parametrize("types", [(EXPLICIT,) * 2, MIXED])
def test_arrays_that_have_types_are_planned_as_those_that_have_none(types, depth):
    """Layers are a loop; what it carries has the types that the step gives it."""
    given, want = (
        estimate(step, arguments(mesh), mesh, depth=depth, progress=False)
        for mesh in (mesh_of(types), mesh_of((AUTO,) * 2))
    )
    assert told(given) == told(want)
    assert ("all-reduce", ("data",)) in told(given)[0]


@pytest.mark.parametrize("typed", [False, True], ids=["shapes", "typed"])
@pytest.mark.parametrize("depth", ["trace", "partition"])
def test_under_a_plan_layouts_are_its_own(depth, typed):
    """On Explicit axes a shape without a type would be replicated, and the step with it."""
    plan = Plan({"*": None}, inputs=("data",))
    mesh = mesh_of((EXPLICIT,) * 2)
    given = arguments(mesh if typed else None)
    found = estimate(step, given, mesh, plan, depth=depth, progress=False)
    want = estimate(step, arguments(), mesh_of((AUTO,) * 2), plan, depth=depth, progress=False)
    assert told(found) == told(want)
    assert ("all-reduce", ("data",)) in told(found)[0]


@pytest.mark.parametrize("typed", [False, True], ids=["shapes", "typed"])
def test_the_same_plan_is_found(typed):
    mesh = mesh_of((EXPLICIT,) * 2)
    found = search(step, arguments(mesh if typed else None), mesh)
    want = search(step, arguments(), mesh_of((AUTO,) * 2))
    assert str(found.plan) == str(want.plan)
    assert found.cost == want.cost


def test_explicit_axes_are_not_said_again():
    """A constraint may not name them, and an axis of which nothing else is known stays open."""
    program = jax.make_jaxpr(lambda x: x * 2)(np.ones((8, 4), np.float32))
    for types, want in (
        ((AUTO, AUTO), P("data", "x")),
        (MIXED, P(P.UNCONSTRAINED, "x")),
        ((EXPLICIT, EXPLICIT), None),
    ):
        mesh = AbstractMesh((2, 4), ("data", "x"), axis_types=types)
        laid = NamedSharding(mesh, P("data", "x"))
        found = spread_layouts(program, mesh, [laid])
        layout = found.get(program.jaxpr.outvars[0])
        assert (None if layout is None else layout.spec) == want
