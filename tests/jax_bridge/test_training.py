"""Training steps and optimizers: the values of plain JAX, the layout of the plan, one program."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.core.layout.spec import same_layout
from isoshard.core.runtime import metrics
from isoshard.jax_bridge import create_opt_state, create_optimizer, train_step
from tests.jax_bridge.compiling import counting
from tests.jax_bridge.models import AUTO, EXPLICIT, Model, mesh_of, pointers

PLAN = iso.Plan(
    {"*up.kernel": P(None, "model"), "*up.bias": P("model"), "*down.kernel": P("model")},
    activations={"up": P("data", "model")},
)


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, x):
        x = linen.Dense(32, name="up")(x)
        x = linen.BatchNorm(use_running_average=False, name="norm")(x)
        return linen.Dense(8, name="down")(linen.relu(x))


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


@pytest.fixture
def batches(mesh):
    random = np.random.default_rng(0)
    source = [random.standard_normal((16, 8)).astype(np.float32) for _ in range(2)]
    return source, list(iso.data.loader(source, mesh, P("data")))


def nnx_loss(model, x):
    return ((model(x) - x) ** 2).mean()


def make_nnx():
    return Model(nnx.Rngs(0))


def specs(tree):
    return {name: array.sharding.spec for name, array in named_leaves(tree)}


def assert_close(got, want):
    want = dict(named_leaves(want))
    for name, array in named_leaves(got):
        if not jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(array, want[name], rtol=1e-4, atol=2e-5, err_msg=name)


class TestNNXStep:
    def test_values_of_flax_layouts_of_the_plan_and_one_program(self, mesh, batches):
        tx = optax.sgd(0.1, momentum=0.9)  # Adam makes noise of the gradient 0 that a bias has here
        model, wants = make_nnx(), []
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def of_flax(model, optimizer, x):
            value, grads = nnx.value_and_grad(nnx_loss)(model, x)
            optimizer.update(model, grads)
            return value

        for plain in batches[0]:
            wants.append(of_flax(model, optimizer, plain))
        step = train_step(nnx_loss, tx, mesh, PLAN)
        state = step.init(make_nnx)
        before, structure = specs(state), jax.tree.structure(state)
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
        assert before["params.up.kernel"] == P(None, "model")
        assert before["opt_state.0.trace.up.kernel"] == P(None, "model")
        assert before["rest.norm.mean"] == P()
        assert pointers(state.params.up.kernel[...]) == pointers(state.model.up.kernel[...])
        metrics.reset()
        first = state
        state, got = step(state, batches[1][0])
        np.testing.assert_allclose(got, wants[0], rtol=1e-4)
        assert first.params.up.kernel[...].is_deleted()
        with counting() as compiled:
            for sharded, want in zip(batches[1][1:], wants[1:], strict=True):
                state, got = step(state, sharded)
                np.testing.assert_allclose(got, want, rtol=1e-4)
            assert compiled() == 0
            jax.jit(lambda x: x * 3.25 + 7)(jnp.ones(3))
            assert compiled() > 0
        assert [c.what for c in metrics.compilations()] == ["training step"]
        assert metrics.counters()["executions"] == len(wants) == int(state.step)
        assert (specs(state), jax.tree.structure(state)) == (before, structure)
        assert_close(nnx.state(state.model), nnx.state(model))
        assert set(step.constrained.modules) == {"up"}
        assert "all-reduce" in step.lower(state, batches[1][0]).compile().as_text()

    def test_aux_and_a_filter_on_a_model_that_exists(self, mesh, batches):
        def loss(model, x, scale):
            y = model(x)
            return scale * ((y - x) ** 2).mean(), {"mean": y.mean()}

        model = make_nnx()
        values = {name: np.asarray(x) for name, x in named_leaves(nnx.state(model, nnx.Param))}
        down = nnx.All(nnx.Param, nnx.PathContains("down"))
        step = train_step(loss, optax.sgd(0.1), mesh, PLAN, has_aux=True, wrt=down)
        state = step.start(model)
        for name, array in named_leaves(state.params):
            np.testing.assert_array_equal(array, values[name])
        assert specs(state.params) == {"down.kernel": P("model"), "down.bias": P()}
        state, _, aux = step(state, batches[1][0], 2.0)
        assert set(aux) == {"mean"}
        np.testing.assert_array_equal(state.rest.up.kernel[...], values["up.kernel"])

    def test_a_loss_that_changes_the_model(self, mesh, batches):
        def loss(model, x):
            model.seen = nnx.Variable(x.mean())
            return nnx_loss(model, x)

        step = train_step(loss, optax.sgd(0.1), mesh, PLAN)
        with pytest.raises(
            iso.ShardingError, match=r"changed the structure of the model.*: seen is new"
        ):
            step(step.init(make_nnx), batches[1][0])


class TestTreeStep:
    def test_linen_with_batch_statistics(self, mesh, batches):
        model = LinenModel()

        def loss(variables, x):
            y, updates = model.apply(variables, x, mutable=["batch_stats"])
            return ((y - x) ** 2).mean(), updates

        def make():
            return model.init(jax.random.key(0), jnp.ones((1, 8)))

        tx = optax.sgd(0.1, momentum=0.9)
        plan = iso.Plan(
            {"params.up.kernel": P(None, "model"), "*down.kernel": P("model")},
            activations={"up": P("data", "model")},
        )
        step = train_step(loss, tx, mesh, plan, mutable=True)
        state = step.init(make)
        variables = jax.jit(make)()
        params, stats = variables["params"], variables["batch_stats"]
        opt_state = tx.init(params)
        reference = jax.jit(
            jax.value_and_grad(
                lambda p, s, x: loss({"params": p, "batch_stats": s}, x), has_aux=True
            )
        )
        for plain, sharded in zip(*batches, strict=True):
            (want, new), grads = reference(params, stats, plain)
            updates, opt_state = tx.update(grads, opt_state)
            params, stats = optax.apply_updates(params, updates), new["batch_stats"]
            state, got = step(state, sharded)
            np.testing.assert_allclose(got, want, rtol=1e-4)
        assert_close(state.model, {"params": params, "batch_stats": stats})
        assert specs(state)["opt_state.0.trace.params.up.kernel"] == P(None, "model")

    def test_frozen_leaves_by_name(self, mesh, batches):
        def loss(params, x):
            return ((x @ params["a"] @ params["b"]) ** 2).mean()

        plan = iso.Plan({"*": P("model")})
        step = train_step(loss, optax.sgd(0.1), mesh, plan, wrt="b", donate=False)
        state = step.init(lambda: {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))})
        after, _ = step(state, batches[1][0])
        assert not state.model["b"].is_deleted()
        np.testing.assert_array_equal(after.model["a"], np.ones((8, 8)))
        assert not np.array_equal(after.model["b"], np.ones((8, 8)))
        with pytest.raises(iso.ShardingError, match=r"wrt='c' leaves nothing.*are none"):
            train_step(loss, optax.sgd(0.1), mesh, plan, wrt="c").init(dict)

    def test_inside_of_a_program_of_the_user(self):
        def loss(params, x):
            hidden = x @ params["w"]
            return ((hidden @ params["w"]) ** 2).mean(), hidden

        mesh = mesh_of(EXPLICIT, AUTO)
        step = train_step(loss, optax.sgd(0.1), mesh, P("model"), has_aux=True, donate=False)
        state = step.init(lambda: {"w": jnp.eye(8)})
        x = iso.shard(np.ones((16, 8), np.float32), mesh, P("data"))

        def twice(state, x):
            return jax.lax.scan(lambda state, _: step(state, x)[:2], state, None, length=2)

        after, losses = jax.jit(twice)(state, x)
        one = step(state, x)
        two = step(one[0], x)
        assert one[2].sharding.mesh == mesh
        np.testing.assert_allclose(losses, [one[1], two[1]], rtol=1e-5)
        np.testing.assert_allclose(after.params["w"], two[0].params["w"], rtol=1e-5)
        assert jax.typeof(after.params["w"]) == jax.typeof(state.params["w"])
        assert same_layout(after.params["w"].sharding, state.params["w"].sharding, 2)

    def test_a_state_of_another_plan(self, mesh, batches):
        step = train_step(nnx_loss, optax.sgd(0.1), mesh, PLAN)
        other = train_step(nnx_loss, optax.sgd(0.1), mesh, P())
        with pytest.raises(
            iso.ShardingError,
            match=r"(?s)params\.down\.kernel: is sharded as.*params\.up.*\.init",
        ):
            step(other.init(make_nnx), batches[1][0])


@custom_partitioning
def sine(x):
    return jnp.sin(x)


sine.def_partition(
    partition=lambda mesh, args, result: (mesh, jnp.sin, args[0].sharding, (args[0].sharding,)),
    sharding_rule="i j -> i j",
)


@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO)])
def test_an_operator_that_splits_itself(kinds):
    """JAX wants one type for all meshes with devices in a program that has one."""

    @jax.custom_vjp
    def sines(x):
        return sine(x)

    sines.defvjp(lambda x: (sine(x), x), lambda x, g: (g * jnp.cos(x),))
    mesh = mesh_of(*kinds)
    plan = iso.Plan({"w": P("model")}, activations=PLAN.activations)

    def loss(params, x):
        return sines(iso.shard(x @ params["w"], mesh, P("data", "model"))).mean()

    step = train_step(loss, optax.sgd(0.1), mesh, plan)
    state = step.init(lambda: {"w": jnp.eye(8)})
    x = np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)
    state, value = step(state, iso.shard(x, mesh, P("data")))
    np.testing.assert_allclose(value, np.sin(x).mean(), rtol=1e-5)
    assert state.params["w"].sharding == NamedSharding(mesh, P("model"))


class TestOptimizers:
    def test_state_follows_its_parameters(self, mesh):
        model = iso.create_sharded(make_nnx, mesh, PLAN)
        tx = optax.adamw(1e-3)
        optimizer = create_optimizer(model, tx, mesh, PLAN)
        want = nnx.Optimizer(model, tx, wrt=nnx.Param)
        assert jax.tree.structure(optimizer) == jax.tree.structure(want)
        found = specs(nnx.state(optimizer))
        assert found["opt_state.0.mu.up.kernel"] == P(None, "model")
        assert found["opt_state.0.nu.down.kernel"] == P("model")
        assert found["opt_state.0.count"] == found["step"] == P()
        assert all(isinstance(x.sharding, NamedSharding) for _, x in named_leaves(optimizer))

    def test_it_never_lies_whole_on_a_device(self, mesh, counted):
        params = iso.create_sharded(
            lambda: {"w": jnp.ones((1024, 256))}, mesh, iso.Plan({"w": P("data", "model")})
        )
        metrics.reset()
        create_opt_state(optax.adam(1e-3), params, mesh, iso.Plan({"w": P("data", "model")}))
        shards = 2 * params["w"].nbytes // 8
        assert shards <= counted("peak_bytes") < 1.3 * shards

    def test_factored_slots_have_no_rule_of_their_own(self, mesh):
        params = iso.shard({"w": jnp.ones((256, 256))}, mesh, iso.Plan({"w": P("data", "model")}))
        tx = optax.adafactor(1e-3)
        state = create_opt_state(tx, params, mesh, iso.Plan({"w": P("data", "model")}))
        layouts = {x.sharding.spec for _, x in named_leaves(state)}
        assert layouts == {P()}
        with pytest.raises(iso.PlanError, match=r"(?s)match.* no rule:.*v_row\.w"):
            plan = iso.Plan({"w": P("data", "model")}, replicate_below=64)
            create_opt_state(tx, params, mesh, plan)

    def test_what_is_no_nnx_module(self, mesh):
        with pytest.raises(TypeError, match=r"takes an NNX module, not a dict; .*create_opt_state"):
            create_optimizer({}, optax.sgd(0.1), mesh, P())
