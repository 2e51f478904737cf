"""Training steps on meshes of every axis type: numbers and programs of Auto, the user's types."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.leaf_paths import named_leaves
from isoshard.jax_bridge import train_step
from tests.jax_bridge.compiling import counting
from tests.jax_bridge.models import AUTO, EXPLICIT, Model, mesh_of
from tests.jax_faults import OF_JAX_11

KINDS = {"explicit": (EXPLICIT, EXPLICIT), "mixed": (EXPLICIT, AUTO)}
PLAN = iso.Plan(
    {
        "*up.kernel": P(None, "model"),
        "*up.bias": P("model"),
        "*down.kernel": P("model"),
    },
    activations={"up": P("data", "model")},
)
TX = optax.sgd(0.1, momentum=0.9)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
        x = linen.Dense(32, kernel_init=init, name="up")(x)
        x = linen.BatchNorm(use_running_average=False, name="norm")(x)
        return linen.Dense(8, name="down")(linen.relu(x))


def of_nnx(model, x):
    return ((model(x) - x) ** 2).mean()


def of_linen():
    def loss(variables, x):
        y, updates = Linen().apply(variables, x, mutable=["batch_stats"])
        return ((y - x) ** 2).mean(), updates

    return loss, lambda: Linen().init(jax.random.key(0), jnp.ones((1, 8)))


def of_tree(params, x):
    rows = params["up"]["kernel"][jnp.arange(8) % 4]  # what JAX leaves open along Explicit axes
    return ((jax.nn.relu(x @ rows) @ params["down"]["kernel"] - x) ** 2).mean()


def tree():
    keys = jax.random.split(jax.random.key(0))
    return {
        "up": {"kernel": jax.random.normal(keys[0], (8, 32))},
        "down": {"kernel": jax.random.normal(keys[1], (32, 8))},
    }


SILENT = iso.Plan(dict(PLAN.rules))  # nothing of activations
MODELS = {
    "nnx": (of_nnx, lambda: Model(nnx.Rngs(0)), PLAN, {}),
    "boxes": (*of_linen(), PLAN, {"mutable": True}),
}


def batches(mesh):
    random = np.random.default_rng(0)
    source = [random.standard_normal((16, 8)).astype(np.float32) for _ in range(2)]
    return [iso.shard(x, mesh, P("data")) for x in source]


def ambient(mesh, is_set):
    return jax.set_mesh(mesh) if is_set else contextlib.nullcontext()


def run(name, mesh, is_set=False):
    """States and losses of two steps, programs compiled after the first, and its text."""
    loss, make, plan, options = MODELS[name]
    with ambient(mesh, is_set):
        step = train_step(loss, TX, mesh, plan, **options)
        state, source = step.init(make), batches(mesh)
        told, losses = [described(state)], []
        text = step.lower(state, source[0]).compile().as_text() if name == "nnx" else ""
        state, value = step(state, source[0])
        with counting() as compiled:
            for batch in source[1:]:
                told.append(described(state))
                losses.append(value)
                state, value = step(state, batch)
            later = compiled()
    return [*told, described(state)], [*losses, value], later, text


def described(state):
    """By name: layout, type and bytes of each array."""
    found = {}
    for name, array in named_leaves(state):
        key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(array) if key else array
        found[name] = array.sharding, jax.typeof(array), np.asarray(data).tobytes()
    return found


def same_program(text):
    """The text of a program without names, which tell of the source.

    With JAX 0.11 without shardings too, of which its XLA mixes two spellings; shapes are those of a
    device's part.
    """
    if OF_JAX_11:
        text = re.sub(r", sharding=\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}", "", text)
    text = re.sub(r"(, )?(metadata|stack_frame_id)=(\{[^}]*\}|\d+)", "", text)
    return [line for line in text.splitlines() if re.search(r" = |^ENTRY|^HloModule", line)]


@pytest.fixture(scope="module")
def on_auto():
    known = {}

    def of(name):
        if name not in known:
            known[name] = run(name, mesh_of(AUTO, AUTO))
        return known[name]

    return of


@pytest.mark.parametrize(
    ("name", "kind", "is_set"),
    [("nnx", "explicit", True), ("boxes", "mixed", False)],
)
def test_the_numbers_are_those_of_auto_and_the_types_the_users(name, kind, is_set, on_auto):
    mesh = mesh_of(*KINDS[kind])
    states, losses, later, text = run(name, mesh, is_set)
    wanted, wanted_losses, _, wanted_text = on_auto(name)
    assert later == 0
    assert same_program(text) == same_program(wanted_text)
    for state, want in zip(states, wanted, strict=True):
        assert state.keys() == want.keys()
        for leaf, (sharding, kind, data) in state.items():
            assert sharding == NamedSharding(mesh, want[leaf][0].spec), leaf
            assert typed_axes(kind) == explicit_axes(sharding), leaf
            assert data == want[leaf][2], leaf
    assert [x.item() for x in losses] == [x.item() for x in wanted_losses]
    assert {x.sharding for x in losses} == {NamedSharding(mesh, P())}


def typed_axes(kind):
    return {name for entry in kind.sharding.spec for name in axes(entry)}


def explicit_axes(sharding):
    kinds = dict(zip(sharding.mesh.axis_names, sharding.mesh.axis_types, strict=True))
    used = {name for entry in sharding.spec for name in axes(entry)}
    return {name for name in used if kinds[name] == EXPLICIT}


def axes(entry):
    return (entry,) if isinstance(entry, str) else entry or ()


class TestBuffers:
    def test_a_state_from_the_same_grid_of_another_type(self):
        mesh = mesh_of(EXPLICIT, EXPLICIT)
        step = train_step(of_tree, TX, mesh, SILENT, donate=False)
        state = step.init(tree)
        other = jax.tree.map(lambda x: iso.reshard(x, auto(mesh), x.sharding.spec), state)
        want, one = step(state, batches(mesh)[0])
        got, two = step(other, batches(auto(mesh))[0])
        assert one.item() == two.item()
        assert [x.sharding for x in jax.tree.leaves(got)] == [
            x.sharding for x in jax.tree.leaves(want)
        ]

    def test_what_comes_with_the_loss(self):
        def loss(params, x):
            hidden = x @ params["up"]["kernel"]
            return (hidden**2).mean(), {"hidden": hidden, "name": 3, "zeros": jnp.zeros(3)}

        mesh = mesh_of(EXPLICIT, AUTO)
        step = train_step(loss, TX, mesh, SILENT, has_aux=True)
        _, _, aux = step(step.init(tree), batches(mesh)[0])
        assert aux["hidden"].sharding == NamedSharding(mesh, P("data", "model"))
        assert aux["zeros"].sharding.mesh == mesh


class TestConstraintsOfTheUser:
    def test_shard_by_the_users_mesh_and_by_the_mesh_that_is_set(self):
        mesh = mesh_of(EXPLICIT, EXPLICIT)
        got = []
        for on, is_set in ((mesh, False), (mesh, True)):

            def loss(params, x, on=() if is_set else (on,)):
                hidden = iso.shard(x @ params["up"]["kernel"], *on, P("data", "model"))
                return ((hidden @ params["down"]["kernel"] - x) ** 2).mean()

            with ambient(on, is_set):
                step = train_step(loss, TX, *(() if is_set else (on,)), SILENT)
                state, value = step(step.init(tree), batches(on)[0])
            assert state.params["up"]["kernel"].sharding == NamedSharding(on, P(None, "model"))
            got.append(value.item())
        assert len(set(got)) == 1


def typed_loss(seen):
    """A loss that can only be traced along Explicit axes."""

    def loss(params, x):
        hidden = jnp.einsum("bi,io->bo", x, params["up"]["kernel"], out_sharding=P("data", "model"))
        seen.append(jax.typeof(hidden).sharding.spec)
        out = jnp.einsum("bi,io->bo", hidden, params["down"]["kernel"], out_sharding=P("data"))
        whole = jax.sharding.reshard(out - x, P())
        return (whole**2).mean(), hidden

    return loss


class TestExplicit:
    """A loss that is written for Explicit axes."""

    def test_its_values_are_typed(self):
        mesh, seen = mesh_of(EXPLICIT, EXPLICIT), []
        loss = typed_loss(seen)

        def plain(params, x):
            hidden = x @ params["up"]["kernel"]
            return ((hidden @ params["down"]["kernel"] - x) ** 2).mean()

        with jax.set_mesh(mesh):
            step = train_step(loss, TX, mesh, SILENT, has_aux=True, explicit=True)
            state = step.init(tree)
            state, first, hidden = step(state, batches(mesh)[0])
            with counting() as compiled:
                state, second, _ = step(state, batches(mesh)[1])
                assert compiled() == 0
        assert set(seen) == {P("data", "model")}
        assert hidden.sharding.mesh == mesh
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))
        on = auto(mesh)
        step = train_step(plain, TX, on, SILENT)
        want, one = step(step.init(tree), batches(on)[0])
        want, two = step(want, batches(on)[1])
        np.testing.assert_allclose([first, second], [one, two], rtol=1e-5)
        for leaf, array in named_leaves(state.params):
            np.testing.assert_allclose(array, dict(named_leaves(want.params))[leaf], rtol=1e-4)

    def test_without_the_word_it_is_traced_under_auto(self):
        mesh = mesh_of(EXPLICIT, EXPLICIT)
        mask = batches(mesh)[0]
        state = train_step(of_tree, TX, mesh, SILENT).init(tree)
        for wrong in (typed_loss([]), lambda params, x: ((x * mask).mean(), None)):
            step = train_step(wrong, TX, mesh, SILENT, has_aux=True)
            with pytest.raises(ValueError, match=r"traced under Auto ones.*explicit=True.*\*batch"):
                step(state, mask)
        step = train_step(of_tree, TX, mesh, SILENT, explicit=True)
        with pytest.raises(Exception, match="out_sharding"):
            step(state, mask)

    def test_a_mesh_without_explicit_axes(self):
        with pytest.raises(iso.ShardingError, match=r"the mesh 'data' \(2\), 'model' \(4\) has no"):
            train_step(of_tree, TX, mesh_of(AUTO, AUTO), SILENT, explicit=True)
