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
from isoshard.core.traced.traced_step import StepInput, StepResult, TracedStep
from isoshard.planner.plan_search.constrained_step import constrained, module_of, with_free_results


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


def test_values_stay(traced):
    program, leaves = traced
    layout = NamedSharding(make_mesh((8,), ("data",), axis_types=AxisType.Auto), P("data"))
    assert names(program.jaxpr).count("sharding_constraint") == 0
    assert constrained(program, {"head": layout}) is constrained(program, {}) is program
    new = constrained(program, {"first": layout, "layers.block": layout})  # one in a loop
    assert names(new.jaxpr).count("sharding_constraint") >= 2
    marked = [module_of(one) for one in program.jaxpr.eqns if one.primitive.name == "name"]
    assert "first" in marked and "not a module" not in marked
    wanted = jax.jit(jax.extend.core.jaxpr_as_fun(program))(*leaves)
    found = jax.jit(jax.extend.core.jaxpr_as_fun(new))(*leaves)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


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
