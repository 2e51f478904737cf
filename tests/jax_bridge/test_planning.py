"""Steps of Flax models as planning takes them."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from isoshard import P, Plan
from isoshard.core.errors import ShardingError
from isoshard.core.plan import PlanError
from isoshard.core.planner.machine.topologies import topology
from isoshard.core.planner.traced.of_step import traced_step
from isoshard.core.runtime.jaxprs import equations
from isoshard.jax_bridge import train_step

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
X = jax.ShapeDtypeStruct((16, 32), "float32")
PLAN = Plan({"*.kernel": (None, "model"), "*": None}, inputs=("data",))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.norm = nnx.BatchNorm(64, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(self.drop(jax.nn.relu(self.norm(self.up(x)))))


def made():
    return Model(nnx.Rngs(0))


def loss(model, x):
    return (model(x) ** 2).mean()


def plain(model, optimizer, x):
    value, grads = nnx.value_and_grad(loss)(model, x)
    optimizer.update(model, grads)
    return value


def objects():
    model = nnx.eval_shape(made)
    tx = optax.adam(1e-3)
    return model, nnx.eval_shape(lambda: nnx.Optimizer(model, tx, wrt=nnx.Param))


@pytest.mark.parametrize("jitted", [False, True])
def test_nnx_objects_have_roles(jitted):
    step = nnx.jit(plain) if jitted else plain
    found = traced_step(step, (*objects(), X), {}, MESH, PLAN)
    roles = {one.name: one.role for one in found.inputs}
    assert found.framework == "flax"
    assert found.name == "plain"
    assert roles["up.kernel"] == "parameter"
    assert roles["norm.mean"] == "buffer"
    assert roles["opt_state.0.mu.up.kernel"] == "optimizer"
    assert roles["x"] == "input"
    assert {roles[name] for name in roles if name.startswith("drop")} == {"random"}
    layouts = {one.name: one.sharding.spec for one in found.inputs}
    assert layouts["up.kernel"] == layouts["opt_state.0.mu.up.kernel"] == P(None, "model")
    assert layouts["x"] == P("data")


def test_all_state_is_replaced():
    found = traced_step(plain, (*objects(), X), {}, MESH, PLAN)
    kept = {found.inputs[one.replaces].name for one in found.results if one.replaces is not None}
    assert kept == {one.name for one in found.inputs if one.role != "input"}


def test_the_step_that_isoshard_makes():
    real = jax.make_mesh((2, 4), ("data", "model"))
    step = train_step(loss, optax.adam(1e-3), real, PLAN)
    found = traced_step(step, (made, X), {}, MESH, None)
    roles = {one.name: one.role for one in found.inputs}
    assert roles["up.kernel"] == "parameter"
    assert roles["norm.mean"] == "buffer"
    assert roles["0.mu.up.kernel"] == "optimizer"
    assert found.mesh is MESH
    layouts = {one.name: one.sharding.spec for one in found.inputs}
    assert layouts["0.nu.down.kernel"] == P(None, "model")
    state = step.init(made)
    state, _ = step(state, np.ones((16, 32), np.float32))  # planning left the step as it was
    again = traced_step(step, (state, X), {}, MESH, None)
    assert [one.name for one in again.inputs] == [one.name for one in found.inputs]


def test_activations_of_the_plan_are_in_the_program():
    def constraints(plan):
        found = traced_step(plain, (*objects(), X), {}, MESH, plan)
        return [
            one for one in equations(found.program) if one.primitive.name == "sharding_constraint"
        ]

    laid_out = Plan({"*": None}, activations={"up": P("data", "model")})
    assert len(constraints(laid_out)) > len(constraints(Plan({"*": None})))


def test_outputs_of_modules_are_marked_and_classes_stay():
    model, optimizer = objects()
    kinds = [type(module) for _, module in nnx.iter_modules(model)]
    found = traced_step(plain, (model, optimizer, X), {}, MESH, PLAN)
    names = [one.params["name"] for one in equations(found.program) if one.primitive.name == "name"]
    assert set(names) == {"module:", *(f"module:{one}" for one in ("up", "norm", "drop", "down"))}
    assert set(found.modules) == {"", "up", "norm", "drop", "down"}
    assert [type(module) for _, module in nnx.iter_modules(model)] == kinds


def test_the_batch_is_not_named_where_a_step_says_it_itself():
    with pytest.raises(
        ShardingError, match=r"batch=\('x',\) is for a JAX function; a step of flax"
    ):
        traced_step(plain, (*objects(), X), {}, MESH, PLAN, batch=("x",))


def test_a_plan_that_does_not_fit_names_the_leaf():
    with pytest.raises(PlanError, match=r"up\.kernel: .*'rows'"):
        traced_step(plain, (*objects(), X), {}, MESH, Plan({"up.kernel": ("rows",), "*": None}))


def test_the_search_for_a_plan_begins_without_that_of_the_step():
    mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
    plan = Plan({"*": None}, inputs=("data",), activations={"layers.0": (None, "model")})

    def loss(model, x):
        return (model(x) ** 2).mean()

    def make():
        return nnx.Sequential(
            nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(1))
        )

    step = train_step(loss, optax.adam(1e-3), mesh, plan)
    given = (make, jax.ShapeDtypeStruct((16, 8), "float32"))
    own, free = (
        str(one.traced_step(given, {}, mesh).program) for one in (step, step.without_plan())
    )
    for name in ("layers.0", "layers.1"):
        assert f"module:{name}" in own and f"module:{name}" in free
    split = "P(None, 'model')"
    assert split in own and split not in free
