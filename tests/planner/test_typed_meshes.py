"""Planning on meshes with Explicit axes, as `jax.make_mesh` makes them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from isoshard import P, Plan
from isoshard.planner.estimating import estimate
from isoshard.planner.plan_search.searching import search

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
MIXED = (EXPLICIT, AUTO)
LAYERS, WIDTH = 4, 64


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


@pytest.mark.parametrize(("types", "depth"), [((EXPLICIT,) * 2, "partition"), (MIXED, "trace")])
def test_arrays_that_have_types_are_planned_as_those_that_have_none(types, depth):
    """Layers are a loop; what it carries has the types that the step gives it."""
    given, want = (
        estimate(step, arguments(mesh), mesh, depth=depth, progress=False)
        for mesh in (mesh_of(types), mesh_of((AUTO,) * 2))
    )
    assert told(given) == told(want)
    assert ("all-reduce", ("data",)) in told(given)[0]


@pytest.mark.parametrize("typed", [False, True])
def test_under_a_plan_layouts_are_its_own(typed):
    """On Explicit axes a shape without a type would be replicated, and the step with it."""
    plan = Plan({"*": None}, inputs=("data",))
    mesh = mesh_of((EXPLICIT,) * 2)
    given = arguments(mesh if typed else None)
    found = estimate(step, given, mesh, plan)
    want = estimate(step, arguments(), mesh_of((AUTO,) * 2), plan)
    assert told(found) == told(want)
    assert ("all-reduce", ("data",)) in told(found)[0]


def test_the_same_plan_is_found():
    mesh = mesh_of((EXPLICIT,) * 2)
    found = search(step, arguments(mesh), mesh)
    want = search(step, arguments(), mesh_of((AUTO,) * 2))
    assert str(found.plan) == str(want.plan)
    assert found.cost == want.cost
