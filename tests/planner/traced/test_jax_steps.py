"""A JAX step as a traced step: names, roles, layouts, donation, keys, constants, lines."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

from isoshard import P, Plan
from isoshard.core.errors import ShardingError
from isoshard.core.plan import PlanError
from isoshard.core.runtime.jaxprs import equations
from isoshard.core.traced.jax_steps import traced_jax_step
from isoshard.core.traced.source_lines import line_of
from isoshard.planner.machine.topologies import topology

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def two_layers(count=2):
    return {"layers": [{"w": shape(512, 512), "b": shape(512)} for _ in range(count)]}


TX = optax.adam(1e-3)
PLAN = Plan({"*.w": (None, "model"), "*.b": None}, inputs=("data",))


def loss(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return (x**2).mean()


def train(params, state, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    updates, state = TX.update(grads, state)
    return optax.apply_updates(params, updates), state, value


def traced(step=train, plan=PLAN, mesh=MESH, **more):
    params = two_layers()
    state = jax.eval_shape(TX.init, params)
    return traced_jax_step(step, (params, state, shape(64, 512)), {}, mesh, plan, **more)


def table(step):
    return {one.name: (one.role, one.sharding.spec, one.follows) for one in step.inputs}


def test_parameters_state_and_batch_are_told_apart():
    found = table(traced())
    assert found["layers.0.w"] == ("parameter", P(None, "model"), None)
    assert found["0.mu.layers.1.w"] == ("optimizer", P(None, "model"), "layers.1.w")
    assert found["0.nu.layers.1.b"] == ("optimizer", P(), "layers.1.b")
    assert found["0.count"] == ("number", P(), None)
    assert found["x"] == ("input", P("data"), None)


def test_results_replace_what_they_renew():
    step = traced()
    names = [one.name for one in step.inputs]
    for result in step.results[:-1]:
        assert names[result.replaces] == result.name
        assert result.sharding is step.inputs[result.replaces].sharding
    assert step.results[-1].replaces is None


def test_a_jitted_step_donates_what_it_says():
    kept = traced(jax.jit(train))
    assert all(one.replaces is None for one in kept.results)
    assert kept.results[0].sharding is not None
    given = traced(jax.jit(train, donate_argnums=0))
    names = {one.name for one in given.results if one.replaces is not None}
    assert names == {"layers.0.b", "layers.0.w", "layers.1.b", "layers.1.w"}


def test_keyword_arguments_keep_their_names():
    def step(w, *, second, first):
        return (first @ w).sum() + (second @ w).sum()

    given = {"second": shape(2, 8), "first": shape(4, 8)}
    plan = Plan({"*": None}, inputs={"first": ("model",), "second": ("data",)})
    found = traced_jax_step(step, (shape(8, 8),), given, MESH, plan)
    assert [(one.name, one.shape, one.sharding.spec) for one in found.inputs] == [
        ("w", (8, 8), P()),
        ("first", (4, 8), P("model")),
        ("second", (2, 8), P("data")),
    ]
    assert [one.shape for one in found.program.in_avals] == [one.shape for one in found.inputs]


def test_the_batch_may_be_named():
    def step(frozen, params, x):
        return jax.tree.map(lambda a, b: a - b, params, frozen), x.sum()

    given = (two_layers(), two_layers(), shape(64, 512))
    told = traced_jax_step(step, given, {}, MESH, PLAN, batch=("x",))
    assert [one.role for one in told.inputs] == ["parameter"] * 8 + ["input"]
    with pytest.raises(ShardingError, match=r"batch=\('y',\) names no argument.*frozen, params, x"):
        traced_jax_step(step, given, {}, MESH, PLAN, batch=("y",))


def test_a_plan_that_does_not_fit_names_the_leaf():
    with pytest.raises(PlanError, match=r"layers\.0\.w: .*'rows'"):
        traced(plan=Plan({"*.w": ("rows", None), "*.b": None}))
    with pytest.raises(PlanError, match=r"x: .*axis 0 has size 64"):
        traced(plan=Plan({"*": None}, inputs=("data",)), mesh=_mesh_of(3))


def _mesh_of(size):
    return topology("cpu:6").mesh((size, 2), ("data", "model"))


def test_arrays_keep_their_layout_without_a_plan():
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    w = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh, P(None, "model")))
    found = traced_jax_step(lambda w, x: x @ w, (w, shape(4, 8)), {}, MESH, None)
    assert [one.sharding for one in found.inputs] == [
        NamedSharding(MESH, P(None, "model")),
        NamedSharding(MESH, P()),
    ]


def test_keys_are_words_and_constants_are_inputs():
    table = jnp.arange(32.0)

    def step(params, key, x):
        drop = jax.random.bernoulli(key, 0.5, x.shape)
        return params, jnp.where(drop, x, 0).sum() + table.sum() + params

    key = jax.eval_shape(lambda: jax.random.key(0))
    found = traced_jax_step(step, (shape(4), key, shape(8)), {}, MESH, None)
    assert [(one.name, one.role, one.dtype.name) for one in found.inputs] == [
        ("closed_over.0", "buffer", "float32"),
        ("params", "parameter", "float32"),
        ("key", "random", "uint32"),
        ("x", "input", "float32"),
    ]
    assert found.program.consts == []
    assert found.results[0].replaces == 1
    run = jax.extend.core.jaxpr_as_fun(found.program)
    word = jax.random.key_data(jax.random.key(0))
    got = run(table, jnp.ones(4), word, jnp.ones(8))[1]
    want = step(jnp.ones(4), jax.random.key(0), jnp.ones(8))[1]
    np.testing.assert_array_equal(got, want)


def test_lines_are_the_users_forward_and_backward():
    found = {line_of(one) for one in equations(traced().program)}
    first = loss.__code__.co_firstlineno
    assert f"test_jax_steps.py:{first + 2} (loss)" in found
    products = [one for one in equations(traced().program) if one.primitive.name == "dot_general"]
    assert {line_of(one) for one in products} == {f"test_jax_steps.py:{first + 2} (loss)"}


def test_other_layouts_for_the_same_program():
    step = traced(plan=Plan({"*": None}))
    rows = NamedSharding(MESH, P("model"))
    moved = step.resharded({"layers.0.w": rows})
    by_name = {one.name: one.sharding.spec for one in moved.inputs}
    assert by_name["layers.0.w"] == by_name["0.mu.layers.0.w"] == P("model")
    assert by_name["layers.1.w"] == P()
    assert moved.program is step.program
    at = [one.name for one in moved.inputs].index("layers.0.w")
    (result,) = [one for one in moved.results if one.replaces == at]
    assert result.sharding is rows
