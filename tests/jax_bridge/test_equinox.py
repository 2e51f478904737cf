"""Equinox modules: arrays are sharded, functions and numbers remain as they are."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.frameworks import framework_of
from isoshard.jax_bridge import train_step

PLAN = iso.Plan({"*.weight": P("model"), "*.bias": P("model")})


class Model(eqx.Module):
    mlp: eqx.nn.MLP
    drop: eqx.nn.Dropout
    norm: eqx.nn.LayerNorm
    act: object
    rate: float
    name: str = eqx.field(static=True)

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(8, 8, 32, 1, key=key)
        self.drop = eqx.nn.Dropout(0.0)
        self.norm = eqx.nn.LayerNorm(8)
        self.act = jax.nn.gelu
        self.rate = 0.5
        self.name = "m"

    def __call__(self, x):
        return self.rate * self.act(self.norm(self.mlp(self.drop(x, inference=True))))


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


@pytest.fixture
def model():
    return Model(jax.random.key(0))


def check(got, like, mesh):
    assert isinstance(got, Model)
    assert (got.act, got.rate, got.name) == (jax.nn.gelu, 0.5, "m")
    assert got.drop.p == 0.0
    weight = got.mlp.layers[0].weight
    assert weight.sharding == NamedSharding(mesh, P("model"))
    np.testing.assert_allclose(weight, like.mlp.layers[0].weight, rtol=1e-5, atol=1e-7)


def test_shard_and_created_sharded(model, mesh):
    assert framework_of(model).name == "equinox"
    placed = iso.shard(model, mesh, PLAN)
    check(placed, model, mesh)
    assert not isinstance(model.mlp.layers[0].weight.sharding, NamedSharding)
    specs = {name: layout.spec for name, layout in iso.sharding_of(placed).items()}
    assert specs["mlp.layers.1.bias"] == P("model")
    assert set(specs) == set(iso.to_jax(placed))
    assert PLAN.resolve(model, mesh).specs["mlp.layers.1.weight"] == P("model")
    check(iso.create_sharded(Model, mesh, PLAN, jax.random.key(0)), model, mesh)


def test_reshard_and_full(model, mesh):
    placed = iso.reshard(iso.shard(model, mesh, None), PLAN)
    check(placed, model, mesh)
    assert iso.full(placed).mlp.layers[0].weight.sharding.spec == P()


def test_copy_false_and_faults(model, mesh):
    with pytest.raises(iso.errors.CopyError, match=r"(?s)mlp\.layers\.0\.weight: .*must move"):
        iso.shard(model, mesh, PLAN, copy=False)
    with pytest.raises(iso.PlanError, match=r"(?s)mlp\.layers\.0\.bias.*norm\.weight.*'z'"):
        iso.shard(model, mesh, iso.Plan({"*": P("z")}))


def test_a_step_trains(model, mesh):
    def loss(model, x):
        return (jax.vmap(model)(x) ** 2).mean()

    step = train_step(loss, optax.sgd(0.1), mesh, PLAN)
    state = step.init(Model, jax.random.key(0))
    x = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    losses = []
    for _ in range(2):
        state, value = step(state, iso.shard(x, mesh, P("data")))
        losses.append(float(value))

    params, static = eqx.partition(model, eqx.is_array)
    reference = jax.jit(jax.value_and_grad(lambda p: loss(eqx.combine(p, static), x)))
    for want in losses:
        value, grads = reference(params)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    check(state.model, eqx.combine(params, static), mesh)


def test_any_pytree_with_functions_among_its_leaves(mesh):
    def make():
        return {"w": jnp.ones((8, 8)), "act": jnp.tanh, "p": 0.5}

    made = iso.create_sharded(make, mesh, iso.Plan({"w": P("model")}))
    assert made["act"] is jnp.tanh
    assert made["w"].sharding.spec == P("model")
    assert made["p"].shape == ()
