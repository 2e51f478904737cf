"""Layouts of modules' outputs put into a program, at any depth, and what they change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.planner.plan_search.constrained_step import (
    constrained,
    module_of,
    with_free_results,
)
from isoshard.core.planner.traced.traced_step import StepInput, StepResult, TracedStep


def model(params, x):
    x = checkpoint_name(x @ params["first"], "module:first")

    @jax.checkpoint
    def block(x, weight):
        return checkpoint_name(jnp.tanh(x @ weight), "module:layers.block"), None

    x, _ = jax.lax.scan(block, x, params["layers"])
    return jnp.sum(checkpoint_name(x, "not a module"))


@pytest.fixture
def traced():
    params = {"first": jnp.full((8, 8), 0.1), "layers": jnp.full((3, 8, 8), 0.2)}
    args = (params, jnp.arange(64.0).reshape(8, 8) / 64)
    return jax.make_jaxpr(jax.grad(model))(*args), jax.tree.leaves(args)


def names(jaxpr) -> list[str]:
    found = []
    for equation in jaxpr.eqns:
        found.append(equation.primitive.name)
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += names(inner)
    return found


def test_modules_in_loops_get_them_too(traced):
    program, _ = traced
    layout = NamedSharding(make_mesh((8,), ("data",), axis_types=AxisType.Auto), P("data"))
    first = names(constrained(program, {"first": layout}).jaxpr)
    block = names(constrained(program, {"layers.block": layout}).jaxpr)
    assert names(program.jaxpr).count("sharding_constraint") == 0
    assert first.count("sharding_constraint") == 1
    assert block.count("sharding_constraint") >= 1


def test_values_stay(traced):
    program, leaves = traced
    layout = NamedSharding(make_mesh((8,), ("data",), axis_types=AxisType.Auto), P("data"))
    new = constrained(program, {"first": layout, "layers.block": layout})
    wanted = jax.jit(jax.extend.core.jaxpr_as_fun(program))(*leaves)
    found = jax.jit(jax.extend.core.jaxpr_as_fun(new))(*leaves)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_nothing_to_say_leaves_the_program_as_it_is(traced):
    program, _ = traced
    layout = NamedSharding(make_mesh((8,), ("data",), axis_types=AxisType.Auto), P("data"))
    assert constrained(program, {}) is program
    assert constrained(program, {"head": layout}) is program


def test_other_names_are_no_modules(traced):
    program, _ = traced
    marked = [module_of(one) for one in program.jaxpr.eqns if one.primitive.name == "name"]
    assert "first" in marked
    assert "not a module" not in marked


def test_gradients_that_are_marked_get_the_layout_of_the_output():
    def step(w, x):
        gradient = checkpoint_name(2 * (x @ w), "gradient:head")
        return checkpoint_name(x @ w, "module:head"), x.T @ gradient

    args = (jnp.ones((8, 8)), jnp.ones((8, 8)))
    layout = NamedSharding(make_mesh((8,), ("data",), axis_types=AxisType.Auto), P("data"))
    program = constrained(jax.make_jaxpr(step)(*args), {"head": layout})
    assert names(program.jaxpr).count("sharding_constraint") == 2


def test_what_is_updated_may_lie_otherwise_than_before():
    mesh = make_mesh((8,), ("data",), axis_types=AxisType.Auto)
    whole = NamedSharding(mesh, P())

    def step(w, x):
        new = jax.lax.with_sharding_constraint(w - x, whole)
        return new, jax.lax.with_sharding_constraint(new * 2, whole)

    program = jax.make_jaxpr(step)(jnp.ones(8), jnp.ones(8))
    inputs = tuple(
        StepInput(name, role, (8,), np.dtype(np.float32), whole)
        for name, role in (("w", "parameter"), ("x", "input"))
    )
    results = (StepResult("w", replaces=0, sharding=whole), StepResult("y", sharding=whole))
    traced = TracedStep("step", "jax", program, inputs, results, mesh)
    found = with_free_results(traced)
    assert names(found.program.jaxpr) == ["sub", "mul", "sharding_constraint"]
    assert with_free_results(found) is found
    ran = jax.jit(jax.extend.core.jaxpr_as_fun(found.program))(jnp.ones(8), jnp.full(8, 3.0))
    np.testing.assert_array_equal(ran[1], np.full(8, -4.0))


def test_what_is_updated_by_a_copy_of_another_update_is_free_too():
    mesh = make_mesh((8,), ("data",), axis_types=AxisType.Auto)
    whole = NamedSharding(mesh, P())

    def step(w, average):
        new = jax.lax.with_sharding_constraint(w - 1, whole)
        return new, jax.lax.with_sharding_constraint(new, whole)

    program = jax.make_jaxpr(step)(jnp.ones(8), jnp.ones(8))
    kind = np.dtype(np.float32)
    inputs = tuple(StepInput(name, "parameter", (8,), kind, whole) for name in ("w", "average"))
    results = tuple(StepResult(one.name, number, whole) for number, one in enumerate(inputs))
    found = with_free_results(TracedStep("step", "jax", program, inputs, results, mesh))
    assert names(found.program.jaxpr) == ["sub"]
    ran = jax.jit(jax.extend.core.jaxpr_as_fun(found.program))(jnp.ones(8), jnp.ones(8))
    np.testing.assert_array_equal(ran, np.zeros((2, 8)))


def test_a_gradient_that_is_laid_out_as_its_parameter_lies_as_others_put_it():
    layout = NamedSharding(make_mesh((8,), ("data",)), P())

    def step(weight, momentum, x):
        slope = jax.grad(lambda weight: ((x @ weight) ** 2).sum())(weight)
        slope = jax.lax.with_sharding_constraint(slope, layout)
        x = jax.lax.with_sharding_constraint(x, layout)  # no gradient: it stays
        momentum = jnp.where(momentum > 0, 0.9 * momentum + 0.1 * slope, slope)
        return weight - 0.1 * momentum, momentum, x.sum()

    given = [np.zeros((8, 8), np.float32)] * 3
    program = jax.make_jaxpr(step)(*given)
    roles = {"w": "parameter", "m": "optimizer", "x": "input"}
    inputs = tuple(StepInput(n, role, (8, 8), np.dtype("float32"), layout)
                   for n, role in roles.items())  # fmt: skip
    results = StepResult("w", 0, layout), StepResult("m", 1, layout), StepResult("loss")
    traced = TracedStep("step", "jax", program, inputs, results, layout.mesh)
    assert names(program.jaxpr).count("sharding_constraint") == 2
    free = with_free_results(traced)
    left = [one for one in free.program.eqns if one.primitive.name == "sharding_constraint"]
    assert [one.invars[0] for one in left] == [free.program.jaxpr.invars[2]]
