"""Rules for an optimizer's slots: moments split though parameters are not, and warnings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.traced.jax_steps import traced_jax_step
from isoshard.jax_bridge import create_opt_state, train_step

ZERO = {"*mu*": P("data"), "*": None}


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


def make():
    return {"up": jnp.ones((8, 4)), "b": jnp.ones(4)}


def loss(params, x):
    return ((x @ params["up"] + params["b"]) ** 2).mean()


def specs(tree):
    return {name: x.sharding.spec for name, x in named_leaves(tree)}


@pytest.mark.parametrize("name", ["*mu*", "*.mu.*", "re:[0-9.]*mu[.].*"])
@pytest.mark.parametrize("behind", [False, True])
def test_a_training_step_splits_the_moments_that_a_rule_names(mesh, name, behind):
    rules = [(name, P("data")), ("*", None)]
    plan = iso.Plan(rules[::-1] if behind else rules)
    step = train_step(loss, optax.adam(0.1), mesh, plan)
    state = step.init(make)
    x = np.ones((8, 8), np.float32)
    for _ in range(2):
        found = specs(state.opt_state)
        assert (found["0.mu.up"], found["0.mu.b"], found["0.nu.up"]) == (P("data"), P("data"), P())
        assert found["0.count"] == P() and set(specs(state.params).values()) == {P()}
        state, value = step(state, x)
    plain = train_step(loss, optax.adam(0.1), mesh, iso.Plan({"*": None}))
    other = plain.init(make)
    for _ in range(2):
        other, want = plain(other, x)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    np.testing.assert_allclose(state.params["up"], other.params["up"], rtol=1e-6)


def test_a_factor_without_a_rule_splits_a_slot_as_its_parameter(mesh):
    plan = iso.Plan({"*.mu.*": P("data"), "b": None}) * iso.Plan({"up": P(None, "model")})
    state = create_opt_state(optax.adam(0.1), make(), mesh, plan)
    found = specs(state)
    assert (found["0.mu.up"], found["0.nu.up"]) == (P("data", "model"), P(None, "model"))
    assert found["0.mu.b"] == P("data")


def test_slots_of_another_shape(mesh):
    params = {"w": jnp.ones((256, 128))}
    plan = iso.Plan({"*v_row*": P("data"), "*": None}, default=None)
    found = specs(create_opt_state(optax.adafactor(0.1), params, mesh, plan))
    assert {spec for name, spec in found.items() if "v_row" in name} == {P("data")}
    assert {spec for name, spec in found.items() if "v_col" in name} == {P()}


def test_rules_of_parameters_are_no_rules_for_slots(mesh):
    params = [{"w": jnp.ones((8, 4))}, {"w": jnp.ones((8, 4))}]
    plan = iso.Plan({"0.*": P("data"), "*.w": P("model")})
    found = specs(create_opt_state(optax.adam(0.1), params, mesh, plan))
    assert (found["0.mu.0.w"], found["0.mu.1.w"]) == (P("data"), P("model"))


def test_state_plans_and_the_planner(mesh):
    params, plan = make(), iso.Plan(ZERO)
    tx = optax.adam(0.1)
    state = iso.shard(tx.init(params), mesh, plan.for_state(params))
    assert (specs(state)["0.mu.up"], specs(state)["0.nu.up"]) == (P("data"), P())

    def step(params, state, x):
        updates, state = tx.update(jax.grad(loss)(params, x), state)
        return optax.apply_updates(params, updates), state

    traced = traced_jax_step(step, (params, tx.init(params), jnp.ones((8, 8))), {}, mesh, plan)
    found = {one.name: one.sharding.spec for one in traced.inputs}
    assert (found["0.mu.up"], found["0.nu.up"], found["up"]) == (P("data"), P(), P())


@pytest.mark.parametrize("name", ["*.momentum.*", "opt_state.*", "*.up"])
def test_rules_that_name_no_slot_are_told(mesh, name):
    step = train_step(loss, optax.adam(0.1), mesh, iso.Plan({name: P("data"), "*": None}))
    with pytest.warns(iso.errors.UnusedRuleWarning, match=f"'{name[:4]}.*no leaf is called so"):
        step.init(make)


def test_a_rule_that_does_not_fit_a_slot(mesh):
    plan = iso.Plan({"*.mu.*": P("model", "data"), "*": None})
    with pytest.raises(iso.PlanError, match=r"0\.mu\.b: .*rank 1.*\[rule '\*\.mu\.\*'\]"):
        train_step(loss, optax.adam(0.1), mesh, plan).init(make)
