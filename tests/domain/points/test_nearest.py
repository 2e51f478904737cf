"""One block of points and one of queries."""

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.domain.points import nearest as nearest_module
from isoshard.domain.points.nearest import Candidates, distance_dtype, merge

compiled = jax.jit(nearest_module.nearest, static_argnums=(1, 2, 4, 5, 6))
POINTS = np.random.default_rng(0).standard_normal((61, 3)).astype(np.float32)
QUERIES = np.random.default_rng(1).standard_normal((11, 3)).astype(np.float32)
SQUARE = ((POINTS.astype(np.float64) - QUERIES.astype(np.float64)[:, None]) ** 2).sum(-1)


def nearest(*args):
    return jax.tree.map(np.asarray, compiled(*args))


def test_the_tiles_change_nothing():
    found, count = nearest(POINTS, 100, 61, QUERIES, 5, (3, 16), 1.5)
    order = np.argsort(SQUARE, axis=1)[:, :5]
    np.testing.assert_array_equal(found.index, order + 100)
    np.testing.assert_allclose(found.square, np.take_along_axis(SQUARE, order, 1), rtol=1e-5)
    np.testing.assert_array_equal(found.point, POINTS[order])
    np.testing.assert_array_equal(count, (SQUARE <= 1.5).sum(1))


def test_padding_is_not_read():
    padded = np.concatenate([POINTS[:20], np.full((12, 3), np.nan, np.float32)])
    found, count = nearest(padded, 0, 20, QUERIES, 25, (4, 9), np.inf)
    order = np.argsort(SQUARE[:, :20], axis=1)
    np.testing.assert_array_equal(found.index[:, :20], order)
    assert (found.index[:, 20:] == -1).all() and np.isinf(found.square[:, 20:]).all()
    assert (found.point[:, 20:] == 0).all() and (count == 20).all()


def test_what_is_no_number_is_nobodys_neighbour():
    points, queries = POINTS.copy(), QUERIES.copy()
    points[7], points[9], queries[3] = np.nan, np.inf, np.nan
    found, count = nearest(points, 0, 61, queries, 60, (5, 32), np.inf)
    assert not ({7, 9} & set(np.asarray(found.index).ravel().tolist()))
    assert (found.index[3] == -1).all() and count.tolist() == [59] * 3 + [0] + [59] * 7


def test_many_coordinates_and_other_dtypes():
    rng = np.random.default_rng(2)
    points, queries = rng.standard_normal((40, 20)), rng.standard_normal((6, 20))
    square = ((points - queries[:, None]) ** 2).sum(-1)
    found, _ = nearest(jnp.array(points), 0, 40, jnp.array(queries), 4, (4, 16))
    np.testing.assert_array_equal(found.index, np.argsort(square, axis=1)[:, :4])
    half = nearest(jnp.array(points, jnp.bfloat16), 0, 40, jnp.array(queries), 4, (4, 16))[0]
    assert half.square.dtype == jnp.float32 and half.point.dtype == jnp.bfloat16
    assert distance_dtype(jnp.float16, jnp.float64) == jnp.float64
    found, count = nearest(POINTS, 0, 61, QUERIES[:0], 3, (4, 4))
    assert found.index.shape == (0, 3) and found.point.shape == (0, 3, 3) and count.shape == (0,)


def test_findings_merge_in_order():
    def found(*pairs):
        square, index = (jnp.array([column]) for column in zip(*pairs, strict=True))
        return Candidates(square, index, index[..., None] * 1.0)

    a = found((0.0, 5), (1.0, 3), (2.0, 9), (np.inf, -1))
    b = found((1.0, 2), (1.0, 4), (np.inf, -1), (np.inf, -1))
    for one, other in ((a, b), (b, a)):
        both = jax.jit(merge)(one, other)
        assert both.index.tolist() == [[5, 2, 3, 4]]
        assert both.square.tolist() == [[0, 1, 1, 1]]
        assert both.point[..., 0].tolist() == [[5, 2, 3, 4]]
