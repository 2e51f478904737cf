"""`shard` and `reshard` where `jax.shard_map` runs over all axes, or some."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import ShardingError

HOST = np.arange(64, dtype=np.float32).reshape(8, 8)
KINDS = [AxisType.Auto, AxisType.Explicit]


@pytest.fixture(params=KINDS[1:], ids=lambda kind: kind.name)
def typed(request):
    return iso.make_mesh((2, 4), ("x", "y"), axis_types=request.param)


def run(function, mesh, axes=("x", "y"), jit=False):
    made = jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={*axes})
    return (jax.jit(made) if jit else made)(iso.shard(HOST, mesh, P("x")))


VERBS = {
    "shard": lambda x, mesh, spec: iso.shard(x, mesh, spec),
    "reshard": lambda x, mesh, spec: iso.reshard(x, mesh, spec),
    "to_jax": lambda x, mesh, spec: iso.to_jax(x, NamedSharding(mesh, spec)),
    "a tree": lambda x, mesh, spec: iso.shard({"array": x}, mesh, spec)["array"],
    "ambient": lambda x, mesh, spec: iso.shard(x, spec),
    "its own": lambda x, mesh, spec: iso.reshard(x, spec),
}


@pytest.mark.parametrize(
    ("typed", "verb", "jit"),
    [(KINDS[n // 2 % 2], verb, bool(n % 2)) for n, verb in enumerate(VERBS)],
    indirect=["typed"],
)
class TestVerbs:
    def test_over_all_axes_nothing_is_left(self, typed, verb, jit):
        def again(x):
            return VERBS[verb](x, typed, P("y"))

        def whole(x):
            return VERBS[verb](x, typed, P())

        with pytest.raises(
            ShardingError,
            match=r"array: inside jax\.shard_map over 'x', 'y' a value is one device's block, and "
            "cannot be split over 'y' again: use in_specs and out_specs",
        ):
            run(again, typed, jit=jit)
        with pytest.raises(ShardingError, match=r"no axis is left.*run over fewer axes"):
            run(whole, typed, jit=jit)

    def test_over_some_the_others_may_be_asked_for(self, typed, verb, jit):
        found = []

        def columns(x):
            assert x.shape == (4, 8)
            x = VERBS[verb](x * 2, typed, P(None, "y"))
            found.append(jax.typeof(x))
            return x

        got = run(columns, typed, "x", jit)
        assert got.sharding.is_equivalent_to(NamedSharding(typed, P("x", "y")), 2)
        assert got.sharding.mesh == typed
        np.testing.assert_array_equal(got, HOST * 2)
        if typed.are_all_axes_explicit:
            assert found[0].sharding.spec == P(None, "y")

    def test_over_some_those_may_not(self, typed, verb, jit):
        with pytest.raises(ShardingError, match=r"over 'x' .*over 'x' again.*'y' may be used"):
            run(lambda x: VERBS[verb](x, typed, P("x")), typed, "x", jit)


def test_what_comes_from_outside(typed):
    for outside in (HOST, jnp.asarray(HOST), iso.shard(HOST, typed, P())):
        with pytest.raises(
            ShardingError, match=r"from outside cannot be sharded.*make it an argument"
        ):
            run(lambda x, o=outside: x + iso.shard(o, typed, P(None, "y"))[:4], typed, "x")
        with pytest.raises(
            ShardingError, match=r"from outside cannot be sharded.*make it an argument"
        ):
            run(lambda x, o=outside: iso.shard([x, o], typed, P(None, "y"))[0], typed, "x")


def test_another_mesh(typed):
    other = iso.make_mesh((8,), ("y",))
    with pytest.raises(ShardingError, match=r"the mesh is 'x' \(2\), 'y' \(4\), and .* is not on"):
        run(lambda x: iso.shard(x, other, P(None, "y")), typed, "x")


def test_the_same_grid_of_another_type(typed):
    other = iso.make_mesh(
        (2, 4), ("x", "y"), axis_types=next(k for k in KINDS if k not in typed.axis_types)
    )
    got = run(lambda x: iso.shard(x, other, P(None, "y")), typed, "x", jit=True)
    assert got.sharding.is_equivalent_to(NamedSharding(typed, P("x", "y")), 2)


def test_a_block_has_no_layout(typed):
    for verb in (iso.sharding_of, iso.full):
        with pytest.raises(
            ShardingError, match="one device's block, which has no sharding over 'x'"
        ):
            run(verb, typed)


@pytest.mark.parametrize("jit", [False, True])
def test_axes_of_every_type(jit):
    kinds = (AxisType.Auto, AxisType.Explicit, AxisType.Auto)
    mesh = iso.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=kinds)
    types = []

    def inside(x):
        x = iso.shard(x, mesh, P("z", "y"))
        types.append(jax.typeof(x).sharding.spec)
        return x

    np.testing.assert_array_equal(run(inside, mesh, "x", jit), HOST)
    assert not jit or types[0] == P(None, "y")  # run eagerly, JAX 0.10.2 forgets it
    made = jax.shard_map(inside, mesh=mesh, in_specs=P("x"), out_specs=P("x"), axis_names={"x"})
    text = jax.jit(made).lower(iso.shard(HOST, mesh, P("x"))).as_text()
    assert '[{"z"}, {"y"}]' in text  # on the way out JAX 0.10.2 drops "y" of such a mesh


def test_gradients(typed):
    def loss(x):
        inner = jax.shard_map(
            lambda x: iso.shard(x * x, typed, P(None, "y")),
            mesh=typed,
            in_specs=P("x"),
            out_specs=P("x"),
            axis_names={"x"},
        )
        return inner(x).sum()

    with jax.set_mesh(typed):
        got = jax.jit(jax.grad(loss))(iso.shard(HOST, typed, P("x")))
    np.testing.assert_array_equal(got, 2 * HOST)
