"""Neighbours in split clouds, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isoshard as iso
from isoshard import P
from isoshard.core.layout.axis_types import auto
from isoshard.domain.points import knn, radius_search

from . import clouds

POINTS, QUERIES = clouds.cloud(40, 0), clouds.cloud(24, 1)
WEIGHTS = np.random.default_rng(2).uniform(0.5, 1.5, (24, 5)).astype(np.float32)
EIGHT = (3, 0, 7, 9, 1, 11, 4, 5)
LAYOUTS = {
    "crossed": ((2, 4), "y", (0, 13, 9, 18), "x", (15, 9)),
    "ring and merge": ((2, 4), ("y", "x"), EIGHT, "y", (5, 2, 7, 10)),
}


def case(name):
    shape, points_axes, points_sizes, queries_axes, queries_sizes = LAYOUTS[name]
    mesh = iso.make_mesh(shape, ("x", "y")[: len(shape)])
    points = clouds.lay_out(POINTS, mesh, points_axes, points_sizes)
    queries = clouds.lay_out(QUERIES, mesh, queries_axes, queries_sizes)
    weights = clouds.lay_out(WEIGHTS, mesh, queries_axes, queries_sizes)
    return points, queries, weights


def padded(x):
    return x.array if isinstance(x, iso.UnevenArray) else x


def total(distances, weights):
    """The sum over valid rows; padding may hold anything, NaN as well."""
    if not isinstance(distances, iso.UnevenArray):
        return (distances * weights).sum()
    product = distances.array * jnp.where(weights.mask(), weights.array, 0)
    return jnp.where(distances.mask(), product, 0).sum()


def test_knn_outside_of_jit():
    """There the layout need not be told."""
    points, queries, weights = case("crossed")

    def loss(points, queries):
        found = knn(points, queries, 5, tile=(7, 16))
        return total(found.distances, weights), found

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    with jax.set_mesh(padded(points).sharding.mesh):
        (_, found), slopes = both(points, queries)
    index, distance = clouds.nearest(POINTS, QUERIES, 5)
    np.testing.assert_array_equal(clouds.whole(found.indices), index)
    np.testing.assert_allclose(clouds.whole(found.distances), distance, rtol=1e-5)
    np.testing.assert_array_equal(clouds.whole(found.points), POINTS[index])
    wanted = clouds.gradients(POINTS, QUERIES, index, WEIGHTS)
    for given, slope, want in zip((points, queries), slopes, wanted, strict=True):
        np.testing.assert_allclose(clouds.whole(slope), want, atol=1e-5)
        assert not np.isnan(np.asarray(padded(slope))).any()
        assert padded(slope).sharding.is_equivalent_to(padded(given).sharding, 2)
    assert padded(found.indices).sharding.is_equivalent_to(padded(queries).sharding, 2)


def test_radius_search():
    points, queries, weights = case("ring and merge")
    mesh, axes = padded(points).sharding.mesh, (("y", "x"), "y")

    def loss(points, queries):
        found = radius_search(points, queries, 0.9, 5, mesh=mesh, axes=axes)
        there = padded(found.indices) >= 0
        safe = jnp.where(there, padded(found.distances), 0)
        return (safe * jnp.where(there, padded(weights), 0)).sum(), found

    both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    with jax.set_mesh(padded(points).sharding.mesh):
        (_, found), slopes = jax.jit(both)(points, queries)
    index, distance = clouds.nearest(POINTS, QUERIES, 40)
    index, distance = index[:, :5], distance[:, :5]
    index = np.where(distance <= 0.9, index, -1)
    np.testing.assert_array_equal(clouds.whole(found.indices), index)
    np.testing.assert_allclose(
        clouds.whole(found.distances), np.where(index >= 0, distance, np.inf), rtol=1e-5
    )
    assert (clouds.whole(found.points)[index < 0] == 0).all()
    every = clouds.nearest(POINTS, QUERIES, 40)[1]
    np.testing.assert_array_equal(clouds.whole(found.counts), (every <= 0.9).sum(1))
    assert clouds.whole(found.counts).max() > 5 > clouds.whole(found.counts).min()
    wanted = clouds.gradients(POINTS, QUERIES, index, WEIGHTS)
    for slope, want in zip(slopes, wanted, strict=True):
        np.testing.assert_allclose(clouds.whole(slope), want, atol=1e-5)


def test_inside_jit_the_layout_is_said_and_uneven_arrays_know_it():
    mesh = iso.make_mesh((4,), ("x",))
    points, queries = (clouds.lay_out(x, mesh, "x") for x in (POINTS, QUERIES))
    index, _ = clouds.nearest(POINTS, QUERIES, 3)
    say = jax.jit(lambda p, q, r: radius_search(p, q, r, 3, mesh=mesh, axes=("x", "x")))
    found = say(points, queries, jnp.float32(np.inf))
    np.testing.assert_array_equal(found.indices, index)
    assert (np.asarray(found.counts) == 40).all()
    uneven = clouds.lay_out(POINTS, mesh, "x", (0, 13, 9, 18))
    known = jax.jit(lambda p: knn(p, p, 3))(uneven)
    np.testing.assert_array_equal(clouds.whole(known.indices), clouds.nearest(POINTS, POINTS, 3)[0])
    with pytest.raises(
        iso.ShardingError, match=r"inside jax.jit points and queries have no sharding"
    ):
        hidden = [
            iso.reshard(x, auto(mesh), iso.P("x")) for x in (points, queries)
        ]  # no type tells
        jax.jit(lambda p, q: knn(p, q, 3))(*hidden)


def test_a_point_on_a_query_and_second_derivatives():
    mesh = iso.make_mesh((2,), ("x",))
    points, queries = clouds.lay_out(POINTS, mesh, "x"), clouds.lay_out(POINTS[:4], mesh, "x")
    told = {"mesh": mesh, "axes": ("x", "x")}

    def bend(p):
        force = jax.grad(lambda p: jnp.square(knn(p, p, 2, **told).distances[:, 1]).sum())
        return jnp.square(force(p)).sum()

    @jax.jit
    def both(p, q):
        slope = jax.grad(lambda q: knn(p, q, 1, **told).distances.sum())(q)
        return slope, jax.grad(bend)(p)

    with jax.set_mesh(mesh):
        slope, slopes = both(points, queries)
    np.testing.assert_array_equal(slope, np.zeros((4, 3)))
    index = clouds.nearest(POINTS, POINTS, 2)[0][:, 1]
    ones = np.eye(40)[index] - np.eye(40)  # |ones @ p|^2 is the sum of the squared distances
    form = 2 * ones.T @ ones
    np.testing.assert_allclose(
        slopes, 2 * form @ form @ POINTS.astype(np.float64), rtol=1e-4, atol=1e-4
    )


def test_what_cannot_be_searched():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    points = clouds.lay_out(POINTS, mesh, "x")
    found = knn(jnp.array(POINTS), jnp.array(QUERIES), 5)  # without a mesh
    np.testing.assert_array_equal(found.indices, clouds.nearest(POINTS, QUERIES, 5)[0])
    assert found.indices.devices() == {jax.devices()[0]}
    for k in (0, 41, 2.0, True):
        with pytest.raises(iso.ShardingError, match=f"k={k!r} is no number of neighbours among 40"):
            knn(points, points, k)
    with pytest.raises(
        iso.ShardingError, match=r"max_points=0 is no integer.*radius=-1 is no number"
    ):
        radius_search(points, points, -1, 0)
    with pytest.raises(iso.ShardingError, match="radius=nan is no number from 0"):
        radius_search(points, points, float("nan"), 1)
    none = clouds.lay_out(POINTS[:0], mesh, "x", (0, 0))
    with pytest.raises(iso.ShardingError, match="there are no points"):
        radius_search(none, points, 1.0, 1)
    with pytest.raises(iso.ShardingError, match=r"tile=\(0, 4\) is not the numbers of queries"):
        knn(points, points, 1, tile=(0, 4))
    with pytest.raises(iso.errors.SpecError, match=r"points: .*no mesh axis is called 'z'"):
        knn(points, points, 1, axes=("z", "x"))


def test_clouds_that_do_not_fit():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    points = clouds.lay_out(POINTS, mesh, "x")
    flat = iso.shard(np.zeros(8, np.int32), mesh, P("x"))
    with pytest.raises(
        iso.ShardingError,
        match=r"queries of shape .8,. are not rows of coordinates; queries are int32",
    ):
        knn(points, flat, 1)
    with pytest.raises(iso.ShardingError, match="numbers of coordinates: 3 for points, 2 for q"):
        knn(points, clouds.lay_out(QUERIES[:, :2], mesh, "x"), 1)
    columns = iso.shard(np.zeros((8, 4), np.float32), mesh, P("x", "y"))
    with pytest.raises(iso.ShardingError, match=r"split along their coordinates .*reshard\(points"):
        knn(columns, columns, 1)
    other = clouds.lay_out(QUERIES, iso.make_mesh((8,), ("x",)), "x")
    with pytest.raises(
        iso.ShardingError, match=r"queries are sharded by .*, not on the mesh 'x' .2., 'y'"
    ):
        knn(points, other, 1)
    with pytest.raises(iso.ShardingError, match="queries are sharded by SingleDeviceSharding"):
        knn(points, jnp.zeros((3, 3)), 1)
    with pytest.raises(TypeError, match=r"queries are rows.*; got ndarray. Shard them"):
        knn(points, QUERIES, 1)
    with pytest.raises(iso.ShardingError, match="axes='x' are not the mesh axes of points and qu"):
        knn(points, points, 1, axes="x")
