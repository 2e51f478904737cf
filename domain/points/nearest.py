"""The nearest points of one block for one block of queries, in tiles.

The points of a tile are taken in groups of some 30 neighbours in order. A first pass keeps the
least distance to each group, which is arithmetic on long rows and nothing else; the `k` groups
with the least then hold the `k` nearest points, and only those are sorted. (A point outside them is
no nearer than its group's least, and `k` groups have a point at least as near and, at equal
distance, a lower index.) So the matrix of distances is never materialized, not even that of a tile.

>>> import numpy as np
>>> points, queries = np.float32([[0], [1], [2], [5]]), np.float32([[1.8]])
>>> found, _ = jax.jit(lambda points, queries: nearest(points, 0, 4, queries, 2, (8, 8)))(
...     points, queries)
>>> found.index.tolist()
[[2, 1]]

Distances are sums of squared differences, not the cheaper |p|² - 2pq + |q|², which loses all
digits between points that are close to each other and far from the origin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_UNROLLED = 8  # coordinates that are written out; more go through a loop

Tile = tuple[int, int]
"""Queries and points compared at a time."""


class Candidates(NamedTuple):
    """The points found for each query, nearest first.

    Attributes:
        square: float[queries, k], squared distances; inf where there is no such point.
        index: int32[queries, k], of the points; -1 where there is none.
        point: float[queries, k, coordinates], their coordinates; 0 where there is none.
    """

    square: jax.Array
    index: jax.Array
    point: jax.Array


def no_candidates(queries: jax.Array, dtype: Any, k: int) -> Candidates:
    """The candidates before the first point."""
    rows, width = queries.shape
    return Candidates(
        jnp.full((rows, k), jnp.inf, distance_dtype(queries.dtype, dtype)),
        jnp.full((rows, k), -1, jnp.int32),
        jnp.zeros((rows, k, width), dtype),
    )


def distance_dtype(*dtypes: Any) -> Any:
    """In what distances between points of these dtypes are computed: float32 at least.

    Example:
        >>> distance_dtype(jnp.bfloat16, jnp.bfloat16).name
        'float32'
    """
    return jnp.promote_types(jnp.promote_types(*dtypes), jnp.float32)


def nearest(
    points: jax.Array,
    start: Any,
    valid: Any,
    queries: jax.Array,
    k: int,
    tile: Tile,
    limit: Any = None,
) -> tuple[Candidates, jax.Array]:
    """Find the nearest points of one block; those without a finite distance are excluded."""
    rows, tiles = queries.shape[0], -(-points.shape[0] // tile[1])
    if rows == 0:
        return no_candidates(queries, points.dtype, k), jnp.zeros(0, jnp.int32)
    size = -(-points.shape[0] // tiles)
    group = max(1, math.isqrt(size // k))
    size = -(-size // group) * group
    padded = _pad(points, tiles * size).reshape(tiles, size, -1)

    def look(some: jax.Array, tile_index: Any) -> tuple[Candidates, jax.Array]:
        left = valid - tile_index * size
        return _of_tile(padded[tile_index], start + tile_index * size, left, some, k, group, limit)

    def search(some: jax.Array) -> tuple[Candidates, jax.Array]:
        def step(
            tile_index: Any, state: tuple[Candidates, jax.Array]
        ) -> tuple[Candidates, jax.Array]:
            candidates, count = look(some, tile_index)
            return merge(state[0], candidates), state[1] + count

        if tiles == 1:
            return look(some, 0)
        begin = no_candidates(some, points.dtype, k), jnp.zeros(some.shape[0], jnp.int32)
        return lax.fori_loop(0, tiles, step, begin)

    batches = -(-rows // tile[0])
    if batches == 1:
        return search(queries)
    width = -(-rows // batches)
    many = lax.map(search, _pad(queries, batches * width).reshape(batches, width, -1))
    return jax.tree.map(lambda x: x.reshape(batches * width, *x.shape[2:])[:rows], many)


def merge(first: Candidates, second: Candidates) -> Candidates:
    """The nearest of two findings for the same queries, lower indices first at equal distances.

    Both are sorted already, so the rank of each is its own plus how many of the other come
    before it: comparisons of long rows, where XLA's sort and TopK would work element by element.
    """
    k = first.square.shape[1]
    earlier = _before(second, first)
    order = jnp.arange(k, dtype=jnp.int32)
    ranks = [order + before.sum(axis, jnp.int32) for before, axis in ((earlier, 2), (~earlier, 1))]
    matches = jnp.concatenate(ranks, axis=1)[:, None, :] == order[:, None]  # [queries, to, from]
    source = jnp.where(matches, jnp.arange(2 * k, dtype=jnp.int32), 0).sum(2, jnp.int32)
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), first, second)
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, source.reshape(source.shape + (1,) * (x.ndim - 2)), 1),
        both,
    )


def _before(a: Candidates, b: Candidates) -> jax.Array:
    """Whether the j-th of `a` comes before the i-th of `b`: bool[queries, i, j]."""
    near, far = a.square[:, None, :], b.square[:, :, None]
    lower = a.index[:, None, :] < b.index[:, :, None]
    return (near < far) | ((near == far) & lower)


def _of_tile(
    points: jax.Array, start: Any, valid: Any, queries: jax.Array, k: int, group: int, limit: Any
) -> tuple[Candidates, jax.Array]:
    size, width = points.shape
    dtype = distance_dtype(points.dtype, queries.dtype)
    real = jnp.arange(size) < valid
    # Padding is infinitely far away, so no comparison selects it.
    groups = jnp.where(real[:, None], points, jnp.inf).astype(dtype).reshape(-1, group, width)
    to = queries.astype(dtype)

    def member(index: Any, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        least, count = state
        members = lax.dynamic_index_in_dim(groups, index, 1, keepdims=False)
        square = _sum(width, lambda i: _column(members, i)[:, None] - _column(to, i))
        if limit is not None:
            count = count + ((square <= limit) & (square < jnp.inf))
        return jnp.where(square < least, square, least), count

    shape = (size // group, queries.shape[0])
    counts = jnp.zeros(shape if limit is not None else (1, shape[1]), jnp.int32)
    begin = jnp.full(shape, jnp.inf, dtype), counts
    least, counts = lax.fori_loop(0, group, member, begin)
    chosen = jnp.sort(lax.top_k(-least.T, min(k, shape[0]))[1], axis=1)

    def difference(i: Any) -> jax.Array:
        return _column(groups, i)[chosen] - _column(to, i)[:, None, None]

    square = _sum(width, difference).reshape(shape[1], -1)
    square = jnp.where(square < jnp.inf, square, jnp.inf)
    short = max(0, k - square.shape[1])
    square = jnp.pad(square, ((0, 0), (0, short)), constant_values=jnp.inf)
    negative, position = lax.top_k(-square, k)
    row = jnp.take_along_axis(chosen, jnp.minimum(position // group, chosen.shape[1] - 1), axis=1)
    row = row * group + position % group
    exists = negative > -jnp.inf
    candidates = Candidates(
        -negative,
        jnp.where(exists, start + row, -1).astype(jnp.int32),
        jnp.where(exists[..., None], points[jnp.where(exists, row, 0)], 0),
    )
    return candidates, counts.sum(0, dtype=jnp.int32)


def _sum(width: int, difference: Callable[[Any], jax.Array]) -> jax.Array:
    """The sum of the squares of `difference(i)` over all coordinates `i`."""

    def add(i: Any, total: jax.Array) -> jax.Array:
        return total + jnp.square(difference(i))

    first = jnp.square(difference(0))
    if width > _UNROLLED:
        return lax.fori_loop(1, width, add, first)
    for i in range(1, width):
        first = add(i, first)
    return first


def _column(x: jax.Array, i: Any) -> jax.Array:
    return lax.dynamic_index_in_dim(x, i, x.ndim - 1, keepdims=False)


def _pad(x: jax.Array, rows: int) -> jax.Array:
    return jnp.pad(x, ((0, rows - x.shape[0]), (0, 0)))
