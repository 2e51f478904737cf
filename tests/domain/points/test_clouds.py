"""Points and queries that do not fit."""

import jax.numpy as jnp
import numpy as np
import pytest

import isoshard as iso
from isoshard import P
from isoshard.domain.points import knn

from .clouds import cloud, lay_out

POINTS, QUERIES = cloud(40, 0), cloud(24, 1)


def test_clouds_that_do_not_fit():
    mesh = iso.make_mesh((2, 4), ("x", "y"))
    points = lay_out(POINTS, mesh, "x")
    flat = iso.shard(np.zeros(8, np.int32), mesh, P("x"))
    with pytest.raises(
        iso.ShardingError,
        match=r"queries of shape .8,. are not rows of coordinates; queries are int32",
    ):
        knn(points, flat, 1)
    with pytest.raises(iso.ShardingError, match="numbers of coordinates: 3 for points, 2 for q"):
        knn(points, lay_out(QUERIES[:, :2], mesh, "x"), 1)
    columns = iso.shard(np.zeros((8, 4), np.float32), mesh, P("x", "y"))
    with pytest.raises(iso.ShardingError, match=r"split along their coordinates .*reshard\(points"):
        knn(columns, columns, 1)
    other = lay_out(QUERIES, iso.make_mesh((8,), ("x",)), "x")
    with pytest.raises(iso.ShardingError, match=r"queries lie by .*, not on the mesh 'x' .2., 'y'"):
        knn(points, other, 1)
    with pytest.raises(iso.ShardingError, match="queries lie by SingleDeviceSharding"):
        knn(points, jnp.zeros((3, 3)), 1)
    with pytest.raises(TypeError, match=r"queries are rows.*; given was ndarray. Lay them out"):
        knn(points, QUERIES, 1)
    with pytest.raises(iso.ShardingError, match="axes='x' are not the mesh axes of points and qu"):
        knn(points, points, 1, axes="x")
