"""Steps of Flax models as planning takes them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from isoshard import P, Plan
from isoshard.core.errors import ShardingError
from isoshard.core.plan import PlanError
from isoshard.core.runtime.jaxprs import equations
from isoshard.jax_bridge import train_step
from isoshard.planner.machine.topologies import topology
from isoshard.planner.output_marks import marked_gradients, with_marks
from isoshard.planner.traced.of_step import traced_step
from isoshard.planner.traced.rolled_step import rolled_step
from tests.jax_bridge.models import Model

MESH = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
X = jax.ShapeDtypeStruct((16, 32), "float32")
PLAN = Plan({"*.kernel": (None, "model"), "*": None}, inputs=("data",))


def made():
    return Model(nnx.Rngs(0), 32, 64)


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
def test_nnx_objects_have_roles_and_all_state_is_replaced(jitted):
    step = nnx.jit(plain) if jitted else plain
    found = traced_step(step, (*objects(), X), {}, MESH, PLAN)
    roles = {one.name: one.role for one in found.inputs}
    assert (found.framework, found.name) == ("flax", "plain")
    assert roles["up.kernel"] == "parameter"
    assert roles["norm.mean"] == "buffer"
    assert roles["opt_state.0.mu.up.kernel"] == "optimizer"
    assert roles["x"] == "input"
    assert {roles[name] for name in roles if name.startswith("drop")} == {"random"}
    layouts = {one.name: one.sharding.spec for one in found.inputs}
    assert layouts["up.kernel"] == layouts["opt_state.0.mu.up.kernel"] == P(None, "model")
    assert layouts["x"] == P("data")
    with pytest.raises(
        ShardingError, match=r"batch=\('x',\) is for a JAX function; a step of flax"
    ):
        traced_step(step, (*objects(), X), {}, MESH, PLAN, batch=("x",))
    with pytest.raises(PlanError, match=r"up\.kernel: .*'rows'"):
        traced_step(step, (*objects(), X), {}, MESH, Plan({"up.kernel": ("rows",), "*": None}))
    kept = {found.inputs[one.replaces].name for one in found.results if one.replaces is not None}
    assert kept == {name for name, role in roles.items() if role != "input"}


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
    again = traced_step(step, (state, X), {}, MESH, None)
    assert [one.name for one in again.inputs] == [one.name for one in found.inputs]


def test_outputs_of_modules_are_marked_and_classes_stay():
    model, optimizer = objects()
    kinds = [type(module) for _, module in nnx.iter_modules(model)]
    found = traced_step(plain, (model, optimizer, X), {}, MESH, PLAN)
    names = [one.params["name"] for one in equations(found.program) if one.primitive.name == "name"]
    assert set(names) == {"module:", *(f"module:{one}" for one in ("up", "norm", "drop", "down"))}
    assert set(found.modules) == {"", "up", "norm", "drop", "down"}
    assert [type(module) for _, module in nnx.iter_modules(model)] == kinds


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


class Recomputed(Block):
    @nnx.remat
    def __call__(self, x):
        return super().__call__(x)


class Chain(nnx.Module):
    def __init__(self, depth, kind=Block):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([kind(rngs) for _ in range(depth)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Stacked(nnx.Module):
    def __init__(self, depth):
        self.layers = nnx.vmap(Block)(nnx.Rngs(0).split(depth))

    def __call__(self, x):
        return nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(
            self.layers, x
        )


def trained(model, x):
    grads = nnx.grad(loss)(model, x)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), grads))


def marks(make, step=trained, plan=None):
    found = traced_step(step, (nnx.eval_shape(make), X), {}, MESH, plan)
    return found, [
        one.params["name"] for one in equations(found.program) if one.primitive.name == "name"
    ]


@pytest.mark.parametrize(("depth", "jitted"), [(1, True), (5, False)])
def test_without_a_plan_gradients_are_marked_once_for_all_that_gave_the_output(depth, jitted):
    found, names = marks(lambda: Chain(depth), nnx.jit(trained) if jitted else trained)
    if depth > 1:  # marked layers are equal
        assert "scan" in {one.primitive.name for one in rolled_step(found).program.eqns}
    layers = [f"layers.{number}" for number in range(depth)]
    forward = [f"module:{one}{part}" for one in layers for part in (".up", ".down", "")]
    backward = [f"gradient:{one}{part}" for one in layers for part in (".up", f".down,{one}")]
    assert names == [*forward, "module:", f"{backward.pop()},", *reversed(backward)]


@pytest.mark.parametrize("make", [lambda: Chain(3, Recomputed), lambda: Stacked(3)])
def test_gradients_are_marked_in_what_is_computed_again_and_in_loops(make):
    _, names = marks(make)
    owners = [one.split(":")[1].split(",") for one in names if one.startswith("gradient:")]
    assert {"up", "down"} <= {one.rpartition(".")[2] for several in owners for one in several}


def test_a_step_that_isoshard_makes_is_compared_without_its_own_plan():
    laid = Plan({"*": None}, inputs=("data",), activations={"up": P("data", "model")})
    step = train_step(loss, optax.adam(1e-3), jax.make_mesh((2, 4), ("data", "model")), laid)
    for unplanned in (False, True):
        found = traced_step(step, (made, X), {}, MESH, unplanned=unplanned)
        program = list(equations(found.program))
        names = {one.params["name"] for one in program if one.primitive.name == "name"}
        gradients = {one for one in names if one.startswith("gradient:")}
        assert ({"gradient:down,", "gradient:up"} <= gradients) == unplanned == bool(gradients)
        assert set(found.modules) == {"", "up", "norm", "drop", "down"}
        assert {f"module:{one}" for one in found.modules} <= names
        constraints = [one for one in program if one.primitive.name == "sharding_constraint"]
        assert bool(constraints) != unplanned


def test_marks_compute_nothing():
    def plain(w, x):
        return (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).sum()

    def noted(w, x):
        for number in range(2):
            x = with_marks(with_marks(jnp.tanh(x @ w), f"{number}.a"), f"{number}")
        return (x**2).sum()

    w, x = jnp.eye(4) / 2, jnp.ones((3, 4))
    takes = (jax.hessian, lambda f: f)
    both = jax.checkpoint(noted), jax.checkpoint(plain)
    with marked_gradients():
        got, want = jax.jit(lambda w, x: [[take(of)(w, x) for take in takes] for of in both])(w, x)
        for one, other in zip(got, want, strict=True):
            np.testing.assert_array_equal(one, other)
        many = jax.vmap(jax.grad(jax.checkpoint(noted)), (None, 0))(w, x[:, None])
        np.testing.assert_array_equal(many, jax.vmap(jax.grad(plain), (None, 0))(w, x[:, None]))
