"""Sums still to be taken: JAX's unreduced and reduced axes, moved, kept, drawn, refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.errors import ShardingError, SpecError, UnrepresentableError
from isoshard.core.layout.axis_types import auto, constrain, under_auto
from isoshard.core.layout.partial_sums import reduced, stored, unreduced
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.tiles import Tiles

HOST = np.arange(64, dtype=np.float32).reshape(8, 8)
OPEN = [P(unreduced={"y"}), P("x", unreduced={"y"}), P(unreduced={"x", "y"}), P(unreduced={"x"})]
TAKEN = [P(), P("x"), P(None, "y"), P(("x", "y")), P("y", "x"), P("x", reduced={"y"})]


@pytest.fixture
def explicit():
    """The mesh (2, 4) with Explicit axes."""
    return jax.make_mesh((2, 4), ("x", "y"))


def _terms(x, mesh):
    """The sum of all terms, counting each block's copies once."""
    pieces = {d: np.asarray(p.data) for p in x.addressable_shards for d in [p.device]}
    laid = stored(x.sharding).devices_indices_map(x.shape)
    total = np.zeros(x.shape, x.dtype)
    copies = np.prod([n for a, n in mesh.shape.items() if a not in _used(x.sharding.spec)])
    for device, piece in pieces.items():
        total[laid[device]] += piece
    return total / copies


def _used(spec):
    entries = [e if isinstance(e, tuple) else (e,) for e in entries_of(spec) if e]
    return {name for entry in entries for name in entry} | spec.unreduced


@pytest.fixture
def product(explicit):
    """A contraction over a split axis whose sum JAX leaves open."""
    a = iso.shard(HOST, explicit, P(None, "y"))
    b = iso.shard(HOST, explicit, P("y"))
    out = NamedSharding(explicit, P(unreduced={"y"}))
    return jax.jit(lambda a, b: jnp.einsum("ab,bc->ac", a, b, out_sharding=out))(a, b)


def test_they_are_read(product, explicit):
    assert unreduced(iso.sharding_of(product)) == ("y",)
    assert unreduced(P("x")) == () and unreduced(None) == () and reduced(P(reduced={"x"})) == ("x",)
    seen = []
    jax.jit(lambda x: seen.append(iso.sharding_of(x)))(product)
    assert unreduced(seen[0]) == ("y",)
    assert stored(product.sharding) == NamedSharding(explicit, P(None, None))


def test_full_and_reshard_take_the_sum(product, explicit):
    whole = iso.full(product)
    assert whole.sharding == NamedSharding(explicit, P())
    np.testing.assert_allclose(whole, HOST @ HOST)
    np.testing.assert_allclose(jax.jit(iso.full)(product), HOST @ HOST)
    for spec in TAKEN:
        got = iso.reshard(product, spec)
        assert got.sharding.is_equivalent_to(NamedSharding(explicit, spec), 2)
        assert reduced(got.sharding) == tuple(spec.reduced)
        np.testing.assert_allclose(got, HOST @ HOST)


SPECS = [*OPEN, *TAKEN]


@pytest.mark.parametrize("number", range(len(SPECS)))
def test_changes_of_layout(explicit, number):
    """From each layout to another."""
    start, target = SPECS[number], SPECS[(number + 4) % len(SPECS)]
    if number == 0:
        target = P(unreduced={"x"})  # which ends the process in JAX itself
    x = iso.reshard(iso.shard(HOST, explicit, P()), start)
    asked = NamedSharding(explicit, target)
    for got in (iso.reshard(x, target), jax.jit(lambda x: constrain(x, asked))(x)):
        assert unreduced(got.sharding) == tuple(sorted(target.unreduced))
        np.testing.assert_allclose(_terms(got, explicit), HOST)


def test_what_is_there_is_shared(product):
    again = iso.reshard(product, product.sharding)
    assert again.sharding.spec.unreduced == {"y"} and _pointers(again) == _pointers(product)
    again = iso.shard(product, product.sharding.mesh, P(unreduced={"y"}), copy=False)
    assert _pointers(again) == _pointers(product)
    own = iso.shard(product, product.sharding.mesh, P(unreduced={"y"}), copy=True)
    assert not set(_pointers(own)) & set(_pointers(product))
    with pytest.raises(iso.errors.CopyError, match="must move"):
        iso.shard(product, product.sharding.mesh, P(), copy=False)


def _pointers(x):
    return [piece.data.unsafe_buffer_pointer() for piece in x.addressable_shards]


def test_onto_an_auto_mesh_and_another_grid(product, explicit):
    for mesh in (auto(explicit), iso.make_mesh((8,), ("z",))):
        for spec in (P(), P(mesh.axis_names[0])):
            got = iso.reshard(product, mesh, spec)
            assert got.sharding == NamedSharding(mesh, spec)
            np.testing.assert_allclose(got, HOST @ HOST)


@pytest.mark.parametrize("source", ["one device", "auto"])
def test_terms_of_what_is_whole(explicit, source):
    x = jnp.asarray(HOST) if source == "one device" else iso.shard(HOST, auto(explicit), P())
    wanted = P("x", unreduced={"y"})
    got = iso.reshard(x, explicit, wanted)
    said = {"unreduced": {"y"}}  # JAX writes trailing None or not
    assert got.sharding.spec in (P("x", **said), P("x", None, **said))
    np.testing.assert_array_equal(_terms(got, explicit), HOST)
    inside = jax.jit(lambda x: iso.reshard(x * 2, explicit, wanted))(x)
    assert unreduced(inside.sharding) == ("y",)
    np.testing.assert_array_equal(_terms(inside, explicit), HOST * 2)


def test_a_gradient_of_reduced_is_unreduced(explicit):
    w = iso.reshard(iso.shard(HOST, explicit, P()), P(reduced={"y"}))
    x = iso.shard(HOST, explicit, P("y"))
    with jax.set_mesh(explicit):
        gradient = jax.jit(jax.grad(lambda w: jnp.einsum("ab,bc->ac", x, w).sum()))(w)
        through = jax.jit(jax.grad(lambda w: iso.reshard(w, P()).sum()))(w)
    assert unreduced(gradient.sharding) == ("y",)
    np.testing.assert_allclose(iso.full(gradient), HOST.T @ np.ones_like(HOST))
    np.testing.assert_allclose(iso.full(through), np.ones_like(HOST))


def test_reduced_is_data_like_any_other(explicit):
    x = iso.shard(HOST, explicit, P("x", reduced={"y"}))
    assert x.sharding.spec == P("x", reduced={"y"})
    assert len(iso.local_shards(x)) == 8
    assert Tiles.from_sharding(x.sharding, 2) == Tiles.from_spec(P("x"), explicit, 2)
    assert under_auto(x).sharding == NamedSharding(auto(explicit), P("x"))
    assert _pointers(under_auto(x)) == _pointers(x)
    again = jax.jit(lambda x: under_auto(x) + 1)(x)
    np.testing.assert_array_equal(again, HOST + 1)


class TestRefused:
    def test_data_from_the_host(self, explicit):
        for place in (
            lambda: iso.shard(HOST, explicit, P("x", unreduced={"y"})),
            lambda: iso.to_jax(HOST, NamedSharding(explicit, P(unreduced={"y"}))),
        ):
            with pytest.raises(
                ShardingError, match=r"is unreduced over mesh axis 'y', and data from"
            ):
                place()
        with pytest.raises(ShardingError, match=r"b: P\(unreduced=.*data from the host"):
            iso.shard({"a": HOST, "b": HOST}, explicit, {"a": P(), "b": P(unreduced={"y"})})

    def test_axes_that_are_not_explicit(self, explicit):
        mixed = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Explicit, AxisType.Auto))
        for mesh in (auto(explicit), mixed):
            for spec in (P(unreduced={"y"}), P(reduced={"y"})):
                with pytest.raises(SpecError, match=r"w: .*'y' \(Auto\).*over Explicit axes only"):
                    iso.shard(HOST, mesh, spec, name="w")
        with pytest.raises(SpecError, match=r"'z' \(not on the mesh\)"):
            iso.shard(HOST, explicit, P(unreduced={"z"}))
        x = iso.shard(HOST, mixed, P())
        with pytest.raises(ShardingError, match="where all axes are Explicit"):
            iso.reshard(x, P(unreduced={"x"}))

    def test_pieces_tiles_and_auto_axes(self, product, explicit):
        with pytest.raises(UnrepresentableError, match=r"has a term.*iso\.full"):
            iso.local_shards(product)
        with pytest.raises(UnrepresentableError, match="tiles have no terms"):
            Tiles.from_sharding(product.sharding, 2)
        with pytest.raises(SpecError, match="are supported only by"):
            Tiles.from_spec(P(unreduced={"y"}), explicit, 2)
        for call in (under_auto, jax.jit(under_auto)):
            with pytest.raises(UnrepresentableError, match=r"over Auto axes.*Reduce them first"):
                call(product)


class TestPictures:
    def test_the_devices_of_each_sum(self, product):
        lines = iso.visualize(product, use_rich=False).splitlines()
        assert lines[0] == (
            "float32[8, 8]  P(None, None, unreduced={'y'})  mesh (x=2 Explicit, y=4 Explicit)"
        )
        assert lines[2] == "Σ: the sum over y is still to be taken, of a term each"
        assert "│ Σ0-3 Σ4-7 │" in lines[5]

    def test_a_spec_and_reduced_axes(self, explicit):
        text = iso.visualize(P("x", unreduced={"y"}), shape=(4,), mesh=explicit, use_rich=False)
        assert "│ Σ0-3 " in text and "│ Σ4-7 " in text
        text = iso.visualize(P("x", reduced={"y"}), shape=(4,), mesh=explicit, use_rich=False)
        assert "reduced={'y'}" in text and "Σ" not in text
