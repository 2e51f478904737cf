"""`jax.ShapeDtypeStruct`s go in and come out with a layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import ShardingError, SpecError, UnevenError

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}


@pytest.fixture(params=["explicit"])
def kind(request):
    return KINDS[request.param]


@pytest.fixture(params=["auto", "explicit, abstract"])
def typed(request):
    name, _, abstract = request.param.partition(", ")
    mesh = iso.make_mesh((2, 4), ("x", "y"), axis_types=KINDS[name])
    return mesh.abstract_mesh if abstract else mesh


def struct(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class State:
    step: object
    params: object
    opt_state: object


def init():
    params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
    return State(0, params, optax.adam(1e-2).init(params))


def step(state, x):
    def loss(params):
        return ((x @ params["w"] + params["b"]) ** 2).mean()

    grads = jax.grad(loss)(state.params)
    updates, opt_state = optax.adam(1e-2).update(grads, state.opt_state)
    return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state)


PLAN = iso.Plan({"*.w": P("x", "y"), "*": P()})


def test_one(typed):
    got = iso.shard(struct(8, 4), typed, P("x", None))
    assert (got.shape, got.dtype) == ((8, 4), np.float32)
    assert got.sharding == iso.sharding_of(got) == NamedSharding(typed, P("x"))
    assert iso.reshard(got, P("y")).sharding == NamedSharding(typed, P("y"))
    assert iso.full(got).sharding == NamedSharding(typed, P())


def test_what_else_it_says_is_kept(typed):
    weak = jax.ShapeDtypeStruct((), np.float32, weak_type=True)
    assert iso.shard(weak, typed, P()).weak_type
    key = jax.eval_shape(jax.random.key, 0)
    assert iso.shard(key, typed, P()).dtype == key.dtype


def test_faults(typed):
    with pytest.raises(UnevenError, match=r"w: shape \(6, 4\).*4 shards"):
        iso.shard(struct(6, 4), typed, P("y"), name="w")
    with pytest.raises(SpecError, match=r"2 leaves.*\n  a: .*'z'.*\n  b: .*'z'"):
        iso.shard({"a": struct(8), "b": struct(8)}, typed, P("z"))
    with pytest.raises(ShardingError, match=r"uneven='pad' is of arrays, and a is a jax\.Shape"):
        iso.shard({"a": struct(6)}, typed, P("y"), uneven="pad")
    with pytest.raises(ShardingError, match=r"ShapeDtypeStruct of shape \(8,\) has no sharding"):
        iso.sharding_of({"a": struct(8)})
    with pytest.raises(ShardingError, match="there is no mesh argument"):
        iso.reshard(struct(8), P("x"))


def test_a_state_by_a_plan(typed):
    shapes = jax.eval_shape(init)
    got = iso.shard(shapes, typed, PLAN)
    assert jax.tree.structure(got) == jax.tree.structure(shapes)
    for tree in (got.params, got.opt_state[0].mu, got.opt_state[0].nu):
        assert tree["w"].sharding == NamedSharding(typed, P("x", "y"))
        assert tree["b"].sharding == NamedSharding(typed, P())
    assert iso.sharding_of(got).params["w"] == NamedSharding(typed, P("x", "y"))


@pytest.mark.parametrize("kind", KINDS, indirect=True)
def test_arrays_and_structs_in_one_tree(kind):
    mesh = iso.make_mesh((2, 4), ("x", "y"), axis_types=kind)
    got = iso.shard({"a": np.ones(8), "s": struct(8), "n": 3}, mesh, P("x"))
    assert got["a"].sharding == got["s"].sharding == NamedSharding(mesh, P("x"))
    again = iso.reshard(got, P("y"))
    assert again["a"].sharding == again["s"].sharding == NamedSharding(mesh, P("y"))
    with pytest.raises(ShardingError, match="has no devices, and data needs some"):
        iso.shard({"a": np.ones(8), "s": struct(8)}, mesh.abstract_mesh, P("x"))


def test_compiled_ahead(kind):
    mesh = iso.make_mesh((2, 4), ("x", "y"), axis_types=kind)
    structs = iso.shard(jax.eval_shape(init), mesh, PLAN)
    batch = iso.shard(struct(8, 8), mesh, P())
    shardings = iso.sharding_of(structs)
    with jax.set_mesh(mesh):
        compiled = jax.jit(step, out_shardings=shardings).lower(structs, batch).compile()
        made = jax.jit(init, out_shardings=shardings)()
    x = iso.shard(np.ones((8, 8)), mesh, P())
    assert jax.tree.map(lambda a: a.sharding, made) == shardings
    got = compiled(made, x)
    assert iso.sharding_of(got) == shardings
    want = step(init(), jnp.ones((8, 8)))
    np.testing.assert_allclose(got.params["w"], want.params["w"], rtol=1e-6)


def test_laid_out_over_an_abstract_mesh_and_lowered_for_another_platform(kind):
    mesh = AbstractMesh((2, 4), ("x", "y"), axis_types=(kind,) * 2)
    x = iso.shard(struct(8, 8), mesh, P("x", "y"))
    text = jax.jit(lambda x: x * 2).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "num_partitions = 8" in text


def test_in_jit_and_eval_shape(kind):
    mesh = iso.make_mesh((2, 4), ("x", "y"), axis_types=kind)
    got = jax.eval_shape(lambda x: iso.shard(x * 2, mesh, P("x")), struct(8, 4))
    assert got.shape == (8, 4)
    if kind == AxisType.Explicit:
        assert iso.sharding_of(got).spec[0] == "x"
