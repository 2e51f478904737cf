"""Flax NNX objects: sharded by name, in place, all or nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core import frameworks
from isoshard.core.errors import CopyError, ShardingError
from isoshard.core.layout.mesh import make_mesh
from isoshard.core.plan import Linear, Plan, PlanError
from isoshard.jax_bridge import create_sharded, modules

PLAN = Plan(
    {"tok.*": P("model", None), "*.up.*": Linear(out="model"), "*.down.*": Linear(into="model")}
)
SPECS = {
    "blocks.0.down.bias": P(),
    "blocks.0.down.kernel": P("model"),
    "blocks.0.drop.rngs.count": P(),
    "blocks.0.drop.rngs.key": P(),
    "blocks.0.norm.bias": P(),
    "blocks.0.norm.mean": P(),
    "blocks.0.norm.scale": P(),
    "blocks.0.norm.var": P(),
    "blocks.0.up.bias": P("model"),
    "blocks.0.up.kernel": P(None, "model"),
    "tok.embedding": P("model"),
}


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.tok = nnx.Embed(16, 8, rngs=rngs)
        self.blocks = nnx.List([Block(rngs)])


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.a = nnx.Linear(8, 8, use_bias=False, rngs=rngs)
        self.b = self.a


@pytest.fixture(scope="module")
def mesh():
    return make_mesh((2, 4), ("data", "model"))


@pytest.fixture
def model():
    return Model(nnx.Rngs(0))


def _specs(obj):
    return {name: sharding.spec for name, sharding in modules.sharding_of(obj).items()}


def _pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def _arrays(obj):
    return jax.tree.leaves(nnx.state(obj, nnx.Param))


def test_a_module_is_laid_out_in_place_by_name(model, mesh):
    before, kernel = [np.asarray(x) for x in _arrays(model)], model.blocks[0].up.kernel
    assert {layout.mesh.size for layout in modules.sharding_of(model).values()} == {1}
    assert modules.shard(model, mesh, PLAN) is model
    assert _specs(model) == SPECS and model.blocks[0].up.kernel is kernel
    for old, new in zip(before, _arrays(model), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan({"tok.*": P("nope")}, default=P()), r"tok\.embedding.*'nope'"),
        (Plan({"*.down.*": P("data", "model")}), r"blocks\.0\.down\.bias.*rank 1"),
        (Plan(replicate_below=64), r"4 leaves larger than 64 B match no rule:\n  blocks\.0\.down"),
        (P("data", "model"), r"blocks\.0\.norm\.bias"),
    ],
)
def test_an_error_leaves_the_module_as_it_was(model, mesh, plan, message):
    before = [id(x) for x in _arrays(model)]
    with pytest.raises(PlanError, match=message):
        modules.shard(model, mesh, plan)
    assert [id(x) for x in _arrays(model)] == before


def test_a_tied_weight_is_one_leaf(mesh):
    plan = Plan({"a.kernel": P("model")})
    created = create_sharded(lambda: Tied(nnx.Rngs(0)), mesh, plan)
    for tied in (modules.shard(Tied(nnx.Rngs(0)), mesh, plan), created):
        assert _specs(tied) == {"a.kernel": P("model")}
        assert tied.b.kernel is tied.a.kernel


def test_a_state_is_a_value(model, mesh):
    state = nnx.state(model, nnx.Param)
    laid_out = modules.shard(state, mesh, PLAN)
    assert isinstance(laid_out, nnx.State)
    assert _specs(laid_out)["tok.embedding"] == P("model")
    assert not isinstance(model.tok.embedding[...].sharding, NamedSharding)
    host = nnx.State({"a": {"kernel": nnx.Param(np.ones((8, 4), np.float32))}})
    placed = modules.shard(host, mesh, P("data"))
    assert modules.sharding_of(placed) == {"a.kernel": NamedSharding(mesh, P("data"))}


def test_a_variable_is_laid_out_in_place(model, mesh):
    kernel = model.blocks[0].up.kernel
    assert modules.shard(kernel, mesh, P(None, "model")) is kernel
    assert modules.sharding_of(model.blocks[0].up.kernel) == NamedSharding(mesh, P(None, "model"))
    assert modules.full(kernel)[...].sharding.spec == P()
    assert modules.reshard(kernel, P("model"))[...].sharding.spec == P("model")


def test_copy_false_moves_nothing(model, mesh):
    with pytest.raises(CopyError, match=r"(?s)\n  blocks\.0\.down\.bias: .*\n  tok\.embedding: "):
        modules.shard(model, mesh, PLAN, copy=False)
    modules.shard(model, mesh, PLAN)
    before = {address for x in _arrays(model) for address in _pointers(x)}
    modules.shard(model, mesh, PLAN, copy=False)
    assert {address for x in _arrays(model) for address in _pointers(x)} == before
    modules.shard(model, mesh, PLAN, copy=True)
    assert not before & {address for x in _arrays(model) for address in _pointers(x)}


def test_to_jax_shares_the_buffers(model, mesh):
    modules.shard(model, mesh, PLAN)
    arrays = modules.to_jax(model)
    assert list(arrays) == list(SPECS)
    kernel = model.blocks[0].up.kernel[...]
    assert _pointers(arrays["blocks.0.up.kernel"]) == _pointers(kernel)
    assert modules.to_jax(model.blocks[0].up.kernel) is not None
    whole = NamedSharding(mesh, P())
    assert modules.to_jax(model, whole)["tok.embedding"].sharding == whole
    with pytest.raises(CopyError, match=r"blocks\.0\.down\.kernel: .*must move"):
        modules.to_jax(model, whole, copy=False)
    copied = modules.to_jax(model, copy=True)["tok.embedding"]
    assert not set(_pointers(copied)) & set(_pointers(model.tok.embedding[...]))


def test_an_optimizer_follows_its_model(model, mesh):
    modules.shard(model, mesh, PLAN)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
    plan = PLAN.for_state(nnx.state(model, nnx.Param))
    specs = _specs(modules.shard(optimizer, mesh, plan))
    assert specs["opt_state.0.mu.blocks.0.up.kernel"] == P(None, "model")
    assert specs["opt_state.0.nu.tok.embedding"] == P("model")
    assert specs["opt_state.0.count"] == P()


def test_reshard_and_full(model, mesh):
    iso.shard(model, mesh, PLAN)
    assert iso.reshard(model, Plan({"tok.*": P("data")})) is model
    assert _specs(model)["tok.embedding"] == P("data")
    other = make_mesh((8,), ("x",))
    assert iso.reshard(model, other, Plan({"tok.*": P("x")})) is model
    assert iso.sharding_of(model)["tok.embedding"] == NamedSharding(other, P("x"))
    gathered = iso.full(model)
    assert isinstance(gathered, Model)
    assert set(_specs(gathered).values()) == {P()}
    assert _specs(model)["tok.embedding"] == P("x")
    assert frameworks.framework_of(nnx.state(model)).name == "flax"
    assert frameworks.framework_of({"a": jnp.ones(3)}) is None


def test_resharding_needs_one_mesh(model, mesh):
    modules.shard(model, mesh, PLAN)
    modules.shard(model.tok, make_mesh((8,), ("x",)), P())
    with pytest.raises(ShardingError, match="the arrays of the Model are on 2 different meshes; "):
        modules.reshard(model, PLAN)


def test_create_sharded_gives_the_module_of_jit(mesh):
    model = create_sharded(lambda: Model(nnx.Rngs(0)), mesh, PLAN)
    assert isinstance(model, Model)
    assert _specs(model) == SPECS
    expected = jax.jit(lambda: nnx.state(Model(nnx.Rngs(0)), nnx.Param))()
    for mine, theirs in zip(_arrays(model), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


def test_create_sharded_refuses_before_it_computes(mesh):
    ran = []

    def make():
        jax.debug.callback(lambda: ran.append(1))
        return {"w": jnp.zeros((7,))}

    with pytest.raises(PlanError, match="w"):
        create_sharded(make, mesh, Plan({"w": P("data")}))
    assert ran == []
