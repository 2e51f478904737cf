"""Flax, optax and Equinox on meshes of every axis type: made, laid out, stepped, types intact."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.jax_bridge import constrain_activations, create_optimizer
from isoshard.jax_bridge.layout import mesh_first
from tests.jax_bridge.compiling import counting
from tests.jax_bridge.models import AUTO, EXPLICIT, mesh_of

PLAN = iso.Plan(
    {"*up.kernel": P(None, "model"), "*up.bias": P("model"), "*down.kernel": P("model")}
)
X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


@pytest.fixture
def mesh():
    return mesh_of(EXPLICIT, AUTO)


class Spoken(nnx.Module):
    """A model that tells the layout of every value: along Explicit axes, and to the compiler."""

    def __init__(self, rngs, mesh=None):
        init = nnx.initializers.lecun_normal()
        said = nnx.with_partitioning(init, (None, "model"), mesh=mesh)
        self.up = nnx.Linear(8, 32, kernel_init=said, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        typed = jax.sharding.get_abstract_mesh().are_all_axes_explicit
        specs = [P("data", "model"), P("data")] if typed else [None, None]
        hidden = nnx.relu(self.up(x, out_sharding=specs[0]))
        return self.down(hidden, out_sharding=specs[1])


def make_equinox(key):
    return eqx.nn.MLP(8, 8, 32, 1, key=key)


def orthogonal():
    """What XLA computes whole, and JAX refuses along split Explicit axes."""
    return {"up": {"kernel": nnx.initializers.orthogonal()(jax.random.key(0), (32, 32))}}


CREATED = {
    "nnx": (lambda key: Spoken(nnx.Rngs(0)), PLAN),
    "orthogonal": (lambda key: orthogonal(), iso.Plan({"up.kernel": P("data", "model")})),
}


def facts(tree):
    """By name: the spec and the bytes of each array."""
    found = {}
    for name, array in named_leaves(nnx.state(tree) if isinstance(tree, nnx.Module) else tree):
        if isinstance(array, jax.Array):
            key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
            data = jax.random.key_data(array) if key else array
            found[name] = array.sharding.spec, np.asarray(data).tobytes()
    return found


def bare(found):
    """Specs without the None at their ends, with which JAX fills them up in types."""
    specs = {name: [*spec] for name, (spec, _) in found.items()}
    for entries in specs.values():
        while entries and entries[-1] is None:
            entries.pop()
    return specs


def meshes(tree):
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    assert arrays
    return {array.sharding.mesh for array in arrays}


class TestCreated:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            ("nnx", EXPLICIT),
            ("orthogonal", EXPLICIT),
        ],
    )
    def test_under_the_mesh_that_is_set(self, name, kind):
        make, plan = CREATED[name]
        mesh = mesh_of(EXPLICIT, kind)
        key = jax.device_put(jax.random.key(0), NamedSharding(mesh, P()))
        with jax.set_mesh(mesh):
            made = iso.create_sharded(make, plan, key)
        with jax.set_mesh(auto(mesh)):
            want = iso.create_sharded(make, auto(mesh), plan, jax.random.key(0))
        assert meshes(made) == {mesh} and facts(made) == facts(want)

    def test_other_meshes_than_the_one_that_is_set(self, mesh):
        other = jax.make_mesh((8,), ("model",))
        with jax.set_mesh(mesh):
            made = iso.create_sharded(orthogonal, other, iso.Plan({"*": P("model")}))
        assert meshes(made) == {other}
        with jax.set_mesh(auto(mesh)):
            made = iso.create_sharded(lambda: Spoken(nnx.Rngs(0)), mesh, PLAN)
        assert meshes(made) == {mesh}

    def test_no_mesh_and_no_plan(self):
        with pytest.raises(
            iso.ShardingError, match=r"set_mesh has set none; pass one: iso\.create"
        ):
            iso.create_sharded(orthogonal, PLAN)
        with pytest.raises(
            TypeError, match=r"pass a plan, or one spec for all arrays: iso\.create"
        ):
            iso.create_sharded(orthogonal, mesh_of(AUTO, AUTO))
        with (
            jax.set_mesh(mesh_of(AUTO, AUTO)),
            pytest.raises(iso.ShardingError, match="no devices"),
        ):
            jax.jit(lambda: iso.create_sharded(orthogonal, PLAN))()

    def test_what_begins_with_a_mesh(self, mesh):
        for plan in (PLAN, P("data")):
            with pytest.raises(TypeError, match=r"a mesh is a jax\.sharding\.Mesh.*not a str"):
                iso.create_sharded(orthogonal, "data", plan)
        assert mesh_first("f", mesh, PLAN, 1) == (mesh, PLAN, 1)
        layout = NamedSharding(mesh, P("data"))
        assert mesh_first("f", layout) == mesh_first("f", None, layout) == (mesh, layout)


class TestLaidOut:
    def test_modules(self, mesh):
        model, module = Plain(nnx.Rngs(0)), make_equinox(jax.random.key(0))
        with jax.set_mesh(mesh):
            assert iso.shard(model, PLAN) is model
            placed = iso.shard(module, iso.Plan({"layers.*.weight": P("model")}))
        assert meshes(nnx.state(model)) == meshes(placed) == {mesh}
        assert model.up.kernel[...].sharding == NamedSharding(mesh, P(None, "model"))
        assert iso.sharding_of(model)["up.bias"] == NamedSharding(mesh, P("model"))
        iso.reshard(model, iso.Plan({"up.kernel": P("data", "model")}))
        assert model.up.kernel[...].sharding == NamedSharding(mesh, P("data", "model"))
        assert meshes(nnx.state(iso.full(model))) == {mesh}
        assert placed.layers[0].weight.sharding == NamedSharding(mesh, P("model"))
        assert meshes(iso.full(placed)) == {mesh}
        with pytest.raises(iso.ShardingError, match="abstract mesh, which has no devices"):
            iso.shard(model, mesh.abstract_mesh, PLAN)
        for module in (Plain(nnx.Rngs(0)), make_equinox(jax.random.key(0))):
            with pytest.raises(iso.ShardingError, match="set_mesh has set none; pass one"):
                iso.reshard(module, iso.Plan({"*": None}))
            with jax.set_mesh(mesh):
                assert meshes(iso.reshard(module, iso.Plan({"*": None}))) == {mesh}

    def test_in_jit(self, mesh):
        model = iso.shard(Plain(nnx.Rngs(0)), mesh, P())

        @nnx.jit
        def laid(model):
            iso.shard(model, PLAN)

        with jax.set_mesh(mesh):
            laid(model)
        assert meshes(nnx.state(model)) == {mesh}
        layout = NamedSharding(mesh, P(None, "model"))
        assert model.up.kernel[...].sharding.is_equivalent_to(layout, 2)

    def test_activations(self, mesh):
        def run(state, x):
            model = nnx.merge(graph, state)
            with constrain_activations({"up": P("data", "model")}, model) as seen:
                hidden = model.up(x)
            assert seen.modules == {"up": "up"}
            return hidden

        graph, state = nnx.split(Plain(nnx.Rngs(0)))
        want = jax.jit(lambda x: nnx.merge(graph, state).up(x))(X)
        with jax.set_mesh(mesh):
            got = jax.jit(run)(state, X)
            outside = run(state, X)
        layout = NamedSharding(mesh, P("data", "model"))
        for hidden in (got, outside):
            assert hidden.sharding.mesh == mesh
            assert hidden.sharding.is_equivalent_to(layout, 2)
            np.testing.assert_allclose(hidden, want, rtol=1e-5, atol=1e-6)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 32, rngs=rngs)
        self.down = nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def loss(model, x):
    return ((model(x) - x) ** 2).mean()


class TestStepsOfTheUser:
    def nnx_steps(self, kind):
        mesh, tx = mesh_of(kind, kind), optax.adamw(1e-2)

        @nnx.jit
        def step(model, optimizer, x):
            value, grads = nnx.value_and_grad(loss)(model, x)
            optimizer.update(model, grads)
            iso.shard(model, PLAN)
            iso.shard(optimizer, PLAN.for_state(nnx.state(model, nnx.Param)))
            return value

        with jax.set_mesh(mesh):
            model = iso.create_sharded(lambda: Spoken(nnx.Rngs(0)), PLAN)
            optimizer = create_optimizer(model, tx, PLAN)
            before = facts(nnx.state((model, optimizer)))
            x = iso.shard(X, P("data"))
            losses = [step(model, optimizer, x)]
            with counting() as compiled:
                losses.append(step(model, optimizer, x))
                assert compiled() == 0
        state = nnx.state((model, optimizer))
        assert meshes(state) == {mesh}
        return before, facts(state), [x.item() for x in losses]

    def test_nnx_jit(self):
        before, after, losses = self.nnx_steps(EXPLICIT)
        first, last, wanted = self.nnx_steps(AUTO)
        assert before == first and len(before) == 14
        assert losses == wanted and losses[-1] < losses[0]
        assert {name: data for name, (_, data) in after.items()} == {
            name: data for name, (_, data) in last.items()
        }
        assert bare(after) == bare(before)
