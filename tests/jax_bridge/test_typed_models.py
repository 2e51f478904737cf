"""Flax, optax and Equinox on meshes of every axis type: made, laid out, stepped, types intact."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.jax_bridge import constrain_activations, create_opt_state, create_optimizer
from isoshard.jax_bridge.layout import mesh_first
from tests.jax_bridge.compiling import counting

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "auto": (AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT),
    "mixed": (EXPLICIT, AUTO),
}
PLAN = iso.Plan(
    {"*up.kernel": P(None, "model"), "*up.bias": P("model"), "*down.kernel": P("model")}
)
X = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=KINDS[kind])


@pytest.fixture(params=["explicit", "mixed"])
def mesh(request):
    return mesh_of(request.param)


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


class Boxed(linen.Module):
    wrap: object

    @linen.compact
    def __call__(self, x):
        init = self.wrap(linen.initializers.lecun_normal(), (None, "model"))
        return linen.Dense(8, name="down")(linen.Dense(32, kernel_init=init, name="up")(x))


def make_equinox(key):
    return eqx.nn.MLP(8, 8, 32, 1, key=key)


def orthogonal():
    """What XLA computes whole, and JAX refuses along split Explicit axes."""
    return {"up": {"kernel": nnx.initializers.orthogonal()(jax.random.key(0), (32, 32))}}


CREATED = {
    "nnx": (lambda key: Spoken(nnx.Rngs(0)), PLAN),
    "partitioned": (lambda key: Boxed(linen.with_partitioning).init(key, X), PLAN),
    "logical": (lambda key: Boxed(linen.with_logical_partitioning).init(key, X), PLAN),
    "equinox": (make_equinox, iso.Plan({"layers.*.weight": P("model")})),
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
    @pytest.mark.parametrize("name", CREATED)
    def test_under_the_mesh_that_is_set(self, name, mesh):
        make, plan = CREATED[name]
        with jax.set_mesh(mesh):
            made = iso.create_sharded(make, plan, jax.random.key(0))
            same = iso.create_sharded(make, mesh, plan, jax.random.key(0))
        assert meshes(made) == meshes(same) == {mesh}
        with jax.set_mesh(auto(mesh)):
            want = iso.create_sharded(make, auto(mesh), plan, jax.random.key(0))
        assert facts(made) == facts(same) == facts(want)

    @pytest.mark.parametrize("name", ["equinox", "orthogonal", "logical"])
    def test_with_arguments_on_the_mesh(self, name, mesh):
        make, plan = CREATED[name]
        key = jax.device_put(jax.random.key(0), NamedSharding(mesh, P()))
        made = iso.create_sharded(make, mesh, plan, key)
        assert meshes(made) == {mesh}
        assert facts(made) == facts(iso.create_sharded(make, auto(mesh), plan, jax.random.key(0)))

    def test_the_mesh_in_the_metadata(self):
        mesh = mesh_of("explicit")
        made = iso.create_sharded(lambda: Spoken(nnx.Rngs(0), mesh), mesh, PLAN)
        assert jax.typeof(made.up.kernel[...]).sharding.spec == P(None, "model")
        assert meshes(made) == {mesh}

    def test_names_of_the_metadata_where_no_rule_matches(self, mesh):
        plan = iso.Plan({"up.bias": P("model")}, axes={"model": "model"})
        with jax.set_mesh(mesh):
            made = iso.create_sharded(lambda: Spoken(nnx.Rngs(0)), plan)
            assert made.up.kernel[...].sharding == NamedSharding(mesh, P(None, "model"))
            assert made.down.kernel[...].sharding == NamedSharding(mesh, P())

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
            iso.ShardingError, match=r"set_mesh has set none; give one: iso\.create"
        ):
            iso.create_sharded(orthogonal, PLAN)
        with pytest.raises(TypeError, match=r"Give a plan, or one spec for all: iso\.create_shard"):
            iso.create_sharded(orthogonal, mesh_of("auto"))
        with jax.set_mesh(mesh_of("auto")), pytest.raises(iso.ShardingError, match="no devices"):
            jax.jit(lambda: iso.create_sharded(orthogonal, PLAN))()

    def test_what_begins_with_a_mesh(self, mesh):
        for plan in (PLAN, P("data")):
            with pytest.raises(TypeError, match=r"a mesh is a jax\.sharding\.Mesh.*given was str"):
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

    def test_a_module_that_lies_on_no_mesh(self, mesh):
        for module in (Plain(nnx.Rngs(0)), make_equinox(jax.random.key(0))):
            with jax.set_mesh(mesh):
                assert meshes(iso.reshard(module, iso.Plan({"*": None}))) == {mesh}
        for module in (Plain(nnx.Rngs(0)), make_equinox(jax.random.key(0))):
            with pytest.raises(iso.ShardingError, match="set_mesh has set none; give one"):
                iso.reshard(module, iso.Plan({"*": None}))

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

    def test_an_abstract_mesh(self, mesh):
        model = Plain(nnx.Rngs(0))
        with pytest.raises(iso.ShardingError, match="abstract mesh, which has no devices"):
            iso.shard(model, mesh.abstract_mesh, PLAN)
        assert not isinstance(model.up.kernel[...].sharding, NamedSharding)

    def test_boxes(self, mesh):
        for wrap in (linen.with_partitioning, linen.with_logical_partitioning):
            variables = Boxed(wrap).init(jax.random.key(0), X)
            with jax.set_mesh(mesh):
                placed = iso.shard(variables, PLAN)
            assert meshes(placed) == {mesh}
            assert placed["params"]["up"]["kernel"].names == (None, "model")
            assert placed["params"]["up"]["kernel"].value.sharding.spec == P(None, "model")

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
    def nnx_steps(self, kind, make, loss_fn):
        mesh, tx = mesh_of(kind), optax.adamw(1e-2)

        @nnx.jit
        def step(model, optimizer, x):
            loss, grads = nnx.value_and_grad(loss_fn)(model, x)
            optimizer.update(model, grads)
            iso.shard(model, PLAN)
            iso.shard(optimizer, PLAN.for_state(nnx.state(model, nnx.Param)))
            return loss

        with jax.set_mesh(mesh):
            model = iso.create_sharded(lambda: make(nnx.Rngs(0)), PLAN)
            optimizer = create_optimizer(model, tx, PLAN)
            before = facts(nnx.state((model, optimizer)))
            x = iso.shard(X, P("data"))
            losses = [step(model, optimizer, x)]
            with counting() as compiled:
                losses += [step(model, optimizer, x) for _ in range(3)]
                assert compiled() == 0
        state = nnx.state((model, optimizer))
        assert meshes(state) == {mesh}
        return before, facts(state), [x.item() for x in losses]

    def test_nnx_jit(self):
        self.compare(self.nnx_steps("explicit", Spoken, loss), self.nnx_steps("auto", Spoken, loss))

    def test_nnx_jit_of_a_model_that_leaves_layouts_open(self):
        on_auto = jax.sharding.auto_axes(loss, out_sharding=P())
        with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
            self.nnx_steps("explicit", Plain, loss)
        want = self.nnx_steps("auto", Plain, loss)
        self.compare(self.nnx_steps("explicit", Plain, on_auto), want)

    def compare(self, got, want):
        before, after, losses = got
        first, last, wanted = want
        assert before == first and len(before) == 14
        assert losses == wanted and losses[-1] < losses[0]
        assert {name: data for name, (_, data) in after.items()} == {
            name: data for name, (_, data) in last.items()
        }
        assert bare(after) == bare(before)

    def optax_steps(self, kind):
        mesh, tx = mesh_of(kind), optax.adam(1e-2)
        plan = iso.Plan({"w": P(None, "model")})

        @jax.jit
        def step(params, opt_state, x):
            def loss(params):
                return ((x @ params["w"]) ** 2).mean()

            value, grads = jax.value_and_grad(loss)(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return iso.shard(optax.apply_updates(params, updates), plan), opt_state, value

        with jax.set_mesh(mesh):
            params = iso.create_sharded(lambda: {"w": jnp.ones((8, 16))}, plan)
            opt_state = create_opt_state(tx, params, plan)
            x = iso.shard(X, P("data"))
            losses = []
            for _ in range(3):
                params, opt_state, value = step(params, opt_state, x)
                losses.append(value.item())
        assert meshes((params, opt_state)) == {mesh}
        return facts(params), losses

    def test_optax(self):
        want, wanted = self.optax_steps("auto")
        for kind in ("explicit", "mixed"):
            got, losses = self.optax_steps(kind)
            assert losses == wanted
            assert got["w"][1] == want["w"][1]
            assert got["w"][0] == P(None, "model")

    def tree_steps(self, kind, name):
        mesh, tx, plan = mesh_of(kind), optax.adamw(1e-2), OWN[name][1]
        make, _, loss_of = OWN[name]

        @jax.jit
        def step(params, opt_state, x):
            loss = jax.sharding.auto_axes(loss_of(static), out_sharding=P())
            value, grads = jax.value_and_grad(loss)(params, x)
            updates, opt_state = tx.update(grads, opt_state, params)
            return iso.shard(optax.apply_updates(params, updates), plan), opt_state, value

        with jax.set_mesh(mesh):
            params, static = eqx.partition(iso.create_sharded(make, plan), eqx.is_array)
            opt_state = create_opt_state(tx, params, plan)
            before, x, losses = facts(params), iso.shard(X, P("data")), []
            for _ in range(3):
                params, opt_state, value = step(params, opt_state, x)
                losses.append(value.item())
        assert meshes((params, opt_state)) == {mesh}
        after = facts(params)
        assert bare(after) == bare(before)
        return {name: data for name, (_, data) in after.items()}, losses

    @pytest.mark.parametrize("name", ["linen", "equinox"])
    def test_linen_and_equinox(self, name):
        want = self.tree_steps("auto", name)
        assert self.tree_steps("explicit", name) == want
        assert self.tree_steps("mixed", name) == want


def linen_loss(static):
    return lambda variables, x: ((Open().apply(variables, x) - x) ** 2).mean()


def equinox_loss(static):
    return lambda params, x: ((jax.vmap(eqx.combine(params, static))(x) - x) ** 2).mean()


class Open(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(8, name="down")(linen.relu(linen.Dense(32, name="up")(x)))


OWN = {
    "linen": (lambda: Open().init(jax.random.key(0), X), PLAN, linen_loss),
    "equinox": (
        lambda: make_equinox(jax.random.key(0)),
        iso.Plan({"layers.0.weight": P("model"), "layers.1.weight": P(None, "model")}),
        equinox_loss,
    ),
}
