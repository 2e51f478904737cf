"""Meshes of every axis type: the same grid, the same buffers, the user's types."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import (
    auto,
    constrain,
    is_typed,
    retyped,
    same_grid,
    under_auto,
)

KINDS = {
    "auto": (AxisType.Auto, AxisType.Auto),
    "explicit": (AxisType.Explicit, AxisType.Explicit),
    "mixed": (AxisType.Explicit, AxisType.Auto),
}


@pytest.fixture(params=KINDS)
def typed(request):
    """The mesh (2, 4) of every kind."""
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=KINDS[request.param])


def _pointers(x):
    return [piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards]


HOST = np.arange(64, dtype=np.float32).reshape(8, 8)


def test_meshes_of_one_grid_differ_in_their_types_only(typed):
    ours = iso.make_mesh((2, 4), ("x", "y"), axis_types=AxisType.Auto)
    assert same_grid(typed, ours)
    assert auto(typed) == ours
    assert same_grid(typed.abstract_mesh, ours)
    assert not same_grid(typed, iso.make_mesh((2, 4), ("x", "z")))
    assert not same_grid(typed, iso.make_mesh((4, 2), ("x", "y")))
    assert not same_grid(typed, iso.make_mesh((2, 4), ("x", "y"), devices=jax.devices()[::-1]))


def test_no_byte_moves_between_types(typed):
    x = iso.shard(HOST, typed, P("x", "y"))
    same = under_auto(x)
    back = retyped(same, typed)
    assert _pointers(x) == _pointers(same) == _pointers(back)
    assert not is_typed(same.sharding.mesh)
    assert back.sharding == x.sharding
    assert jax.typeof(back) == jax.typeof(x)


@pytest.mark.parametrize(
    ("typed", "source", "spec"),
    [
        ("auto", "host", P("y")),
        ("explicit", "host", P(None, ("x", "y"))),
        ("mixed", "one", P()),
        ("explicit", "auto", P("y")),
        ("mixed", "explicit", P(None, ("x", "y"))),
        ("auto", "mixed", P()),
    ],
    indirect=["typed"],
)
def test_constrain_in_jit(typed, source, spec):
    if source in KINDS:
        start = jax.make_mesh((2, 4), ("x", "y"), axis_types=KINDS[source])
        x = jax.device_put(HOST, NamedSharding(start, P("x", "y")))
    else:
        x = HOST if source == "host" else jnp.asarray(HOST)
    wanted = NamedSharding(typed, spec)
    contexts = [typed, auto(typed)] if source in ("host", "one") else [x.sharding.mesh]
    programs = [jax.jit(lambda x: constrain(x, wanted))(x)]
    for context in contexts:
        with jax.set_mesh(context):
            programs.append(jax.jit(lambda x: constrain(x, wanted))(x))
    for got in programs:
        assert got.sharding.is_equivalent_to(wanted, 2)
        assert got.sharding.mesh.axis_types == typed.axis_types
        np.testing.assert_array_equal(got, HOST)


def test_shard_keeps_the_users_mesh(typed):
    for x in (HOST, jnp.asarray(HOST)):
        got = iso.shard(x, typed, P("x", "y"))
        assert got.sharding == NamedSharding(typed, P("x", "y"))
        assert iso.sharding_of(got).mesh is got.sharding.mesh
    moved = iso.reshard(got, P("y"))
    assert moved.sharding.mesh == typed
    assert iso.full(moved).sharding == NamedSharding(typed, P())
    np.testing.assert_array_equal(iso.full(moved), HOST)


def test_reshard_in_jit(typed):
    x = iso.shard(HOST, typed, P("x", "y"))
    got = jax.jit(lambda x: iso.reshard(x * 2, typed, P("y")))(x)
    assert got.sharding.is_equivalent_to(NamedSharding(typed, P("y")), 2)
    if typed.are_all_axes_explicit:  # the type tells the mesh
        got = jax.jit(lambda x: iso.full(iso.reshard(x * 2, P("y"))))(x)
        assert got.sharding.is_equivalent_to(NamedSharding(typed, P()), 2)
    np.testing.assert_array_equal(got, HOST * 2)


def test_a_traced_value_on_explicit_axes_tells_its_layout():
    mesh = jax.make_mesh((2, 4), ("x", "y"))
    found = []
    jax.jit(lambda x: found.append(iso.sharding_of(x)))(iso.shard(HOST, mesh, P("x", "y")))
    assert found[0].spec == P("x", "y")
    with pytest.raises(ShardingError, match="on Auto axes"):
        jax.jit(iso.sharding_of)(iso.shard(HOST, auto(mesh), P("x", "y")))


class TestAmbient:
    def test_shard_and_reshard(self, typed):
        with jax.set_mesh(typed):
            x = iso.shard({"a": HOST}, P("x"))["a"]
            assert x.sharding == NamedSharding(typed, P("x"))
            assert iso.shard(HOST, spec=P("y")).sharding == NamedSharding(typed, P("y"))
            inside = jax.jit(lambda x: iso.shard(x + 1, P(None, "y")))(x)
            assert inside.sharding.is_equivalent_to(NamedSharding(typed, P(None, "y")), 2)
            on_none = iso.reshard(jnp.asarray(HOST), P("x"))
            assert on_none.sharding == NamedSharding(typed, P("x"))

    def test_meshes_and_specs_that_are_missing(self, typed):
        wanted = NamedSharding(typed, P("x"))
        assert iso.shard(HOST, wanted).sharding == wanted
        with pytest.raises(ShardingError, match=r"jax\.set_mesh has set none.*with jax\.set_mesh"):
            iso.shard(HOST, P("x"))
        with pytest.raises(TypeError, match=r"'x' \(2\), 'y' \(4\).*pass one"):
            iso.shard(HOST, typed)
        with pytest.raises(ShardingError, match="has no devices"):
            iso.shard(HOST, AbstractMesh((2, 4), ("x", "y")), P("x"))


def test_make_mesh_takes_types():
    mesh = iso.make_mesh((2, 4), ("x", "y"), axis_types=KINDS["mixed"])
    assert mesh.axis_types == KINDS["mixed"]
    every = iso.make_mesh((2, 4), ("x", "y"), axis_types=AxisType.Explicit)
    assert every == jax.make_mesh((2, 4), ("x", "y"))
    for wrong in ((AxisType.Auto,), ("auto", "auto")):
        with pytest.raises(ShardingError, match="one per axis"):
            iso.make_mesh((2, 4), ("x", "y"), axis_types=wrong)
