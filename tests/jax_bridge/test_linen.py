"""Linen: variables are pytrees; boxes with axis names go by their own names."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.jax_bridge import create_opt_state


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


def boxed(wrap):
    init = linen.initializers.lecun_normal()
    dense = linen.Dense(32, kernel_init=wrap(init, ("embed", "mlp")))
    return jax.jit(dense.init)(jax.random.key(0), jnp.ones((1, 8)))


WRAPS = [linen.with_partitioning, linen.with_logical_partitioning]
PLAN = iso.Plan({"params.kernel": P("data", "model"), "params.bias": P("model")})
LOGICAL = iso.Plan({"params.bias": P("model")}, axes={"embed": "data", "mlp": "model"})


def test_variables_are_laid_out_by_name(mesh):
    variables = jax.jit(linen.Dense(32).init)(jax.random.key(0), jnp.ones((1, 8)))
    placed = iso.shard(variables, mesh, PLAN)
    assert placed["params"]["kernel"].sharding == NamedSharding(mesh, P("data", "model"))
    np.testing.assert_array_equal(placed["params"]["kernel"], variables["params"]["kernel"])
    again = iso.reshard(placed, iso.Plan({"*kernel": P("model"), "*bias": None}))
    assert again["params"]["kernel"].sharding.spec == P("model")
    assert iso.full(again)["params"]["kernel"].sharding.spec == P()


@pytest.mark.parametrize("wrap", WRAPS)
def test_boxes_stay_boxes(wrap, mesh):
    variables = boxed(wrap)
    box = iso.shard(variables, mesh, PLAN)["params"]["kernel"]
    assert type(box) is type(variables["params"]["kernel"])
    assert box.names == ("embed", "mlp")
    assert box.value.sharding == NamedSharding(mesh, P("data", "model"))
    alone = iso.shard(box, mesh, P(None, "model"))
    assert alone.value.sharding == NamedSharding(mesh, P(None, "model"))


@pytest.mark.parametrize("wrap", WRAPS)
def test_names_in_boxes_are_followed_where_no_rule_matches(wrap, mesh):
    made = iso.create_sharded(lambda: boxed(wrap), mesh, LOGICAL)
    assert made["params"]["kernel"].value.sharding == NamedSharding(mesh, P("data", "model"))
    assert made["params"]["bias"].sharding == NamedSharding(mesh, P("model"))
    state = create_opt_state(
        optax.adam(1e-3),
        made["params"],
        mesh,
        iso.Plan({"bias": P("model")}, axes={"embed": "data", "mlp": "model"}),
    )
    assert state[0].mu["kernel"].value.sharding == NamedSharding(mesh, P("data", "model"))
    assert state[0].nu["bias"].sharding == NamedSharding(mesh, P("model"))


def test_every_fault_of_the_variables_at_once(mesh):
    variables = jax.jit(linen.Dense(30).init)(jax.random.key(0), jnp.ones((1, 9)))
    with pytest.raises(iso.PlanError, match=r"(?s)params\.bias.*params\.kernel"):
        iso.shard(variables, mesh, PLAN)
    with pytest.raises(iso.PlanError, match=r"(?s)params\.bias.*params\.kernel"):
        iso.create_sharded(lambda: variables, mesh, PLAN)
