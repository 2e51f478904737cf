"""Training steps whose optimizer state, or parameters, rest in the memory of the host."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType

import isoshard as iso
from isoshard import P, Plan, metrics
from isoshard.core.plan import PlanError
from isoshard.jax_bridge import create_opt_state, train_step
from tests.jax_faults import host_memory_of_the_cpu

HOST = "pinned_host"
RULES = {"*.kernel": (None, "y"), "*": P()}


@pytest.fixture(params=[AxisType.Auto])
def typed(request):
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(request.param,) * 2)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x):
        return self.down(jnp.tanh(self.up(x)))


def loss_of(model, x):
    return (model(x) ** 2).mean()


def trained(mesh, memory):
    plan = Plan(RULES, memory=memory)
    step = train_step(loss_of, optax.adam(0.1), mesh, plan)
    state = step.init(lambda: Net(nnx.Rngs(0)))
    x = iso.shard(np.arange(64, dtype=np.float32).reshape(8, 8) / 64, mesh, P("x"))
    metrics.reset()
    losses = []
    for _ in range(2):
        state, loss = step(state, x)
        losses.append(float(loss))
    assert metrics.counters()["compilations"] == 1
    return state, losses


def kinds(tree):
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf.sharding.memory_kind for path, leaf in leaves}


@pytest.fixture(scope="module")
def on_devices():
    return trained(jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2), {})


@host_memory_of_the_cpu
def test_state_on_the_host_gives_the_same_training(typed, on_devices):
    memory = {"*.mu.*": HOST}
    plain, losses = on_devices
    state, found = trained(typed, memory)
    assert found == losses
    jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, plain.opt_state)
    for name, kind in kinds(state.opt_state).items():
        rests = any(f".{slot}" in name for slot in ("mu", "nu") if f"*.{slot}.*" in memory)
        assert kind == (HOST if rests else "device"), name
    assert set(kinds(state.params).values()) == {"device"}
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(state.opt_state)} == {typed}


@host_memory_of_the_cpu
@pytest.mark.parametrize("typed", [AxisType.Explicit], indirect=True)
def test_parameters_on_the_host_and_their_slots_with_them(typed, on_devices):
    plain, losses = on_devices
    state, found = trained(typed, {"up.*": HOST})
    assert found == losses
    jax.tree.map(np.testing.assert_array_equal, state.params, plain.params)
    for name, kind in (kinds(state.params) | kinds(state.opt_state)).items():
        assert kind == (HOST if "up" in name else "device"), name


def test_a_rule_that_matches_nothing(typed):
    params = {"w": jnp.ones((8, 4))}
    plan = Plan({"w": P("x")}, memory={"*.momentum.*": HOST})
    with pytest.raises(PlanError, match=r"'\*\.momentum\.\*' match no parameter.*0\.mu\.w"):
        create_opt_state(optax.adam(0.1), params, typed, plan)


def test_a_memory_that_the_devices_lack(typed):
    params = {"w": jnp.ones((8, 4))}
    plan = Plan({"w": P("x")}, memory={"0.mu.w": "disk"})
    with pytest.raises(iso.ShardingError, match=r"0\.mu\.w: its devices \(cpu\) have no memory"):
        create_opt_state(optax.adam(0.1), params, typed, plan)
