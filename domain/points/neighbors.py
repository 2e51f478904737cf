"""Neighbours in a cloud of points: the nearest, or those within a radius.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("x",))
>>> points = shard(np.arange(8, dtype=np.float32)[:, None] ** 2, mesh, ("x",))  # 0, 1, .. 49
>>> queries = shard(np.float32([[3], [10], [20], [48]]), mesh, ("x",))
>>> found = knn(points, queries, 2)
>>> found.indices.tolist(), found.distances.tolist()
([[2, 1], [3, 2], [4, 5], [7, 6]], [[1.0, 2.0], [1.0, 6.0], [4.0, 5.0], [1.0, 12.0]])
>>> found.indices.sharding.spec
P('x',)

Both search by brute force, in tiles: the matrix of distances is never materialized, and what a
device needs besides a few copies of its blocks and results is set by the tile. Split points go
round a ring of devices (`search.py` documents the communication). Indices count over the full
cloud, whatever the shards; they, and ties, are the same on any mesh. Distances and points have
gradients, in the inputs' layouts; indices and counts have none.

A point whose distance is not finite (NaN coordinates) is never a neighbour.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.kit import ShardingError, Tracer, any_framework, padded_of

from .clouds import read_clouds
from .nearest import Tile, distance_dtype
from .row_splits import RowSplit
from .search import Search, search

TILE = (512, 32768)
"""Queries and points compared at a time by default: about 3 MB for k = 16."""


class Neighbors(NamedTuple):
    """What `knn` finds, nearest first; a row per query, split as the queries are.

    Attributes:
        indices: int32[queries, k], of the points.
        distances: float[queries, k].
        points: float[queries, k, coordinates].

    Example:
        >>> found = knn(jnp.array([[0.0], [1.0], [5.0]]), jnp.array([[4.0]]), 2)
        >>> found.indices.tolist(), found.distances.tolist(), found.points.tolist()
        ([[2, 1]], [[1.0, 3.0]], [[[5.0], [1.0]]])
    """

    indices: Any
    distances: Any
    points: Any


class Within(NamedTuple):
    """What `radius_search` finds, nearest first; a row per query, split as the queries are.

    Attributes:
        indices: int32[queries, max_points]; -1 where there are no more points.
        distances: float[queries, max_points]; inf there.
        points: float[queries, max_points, coordinates]; 0 there.
        counts: int32[queries], how many points are within the radius; more than `max_points` where
            the farthest were left out.

    Example:
        >>> found = radius_search(jnp.array([[0.0], [1.0], [5.0]]), jnp.array([[4.0]]), 2.0, 2)
        >>> found.indices.tolist(), found.distances.tolist(), found.counts.tolist()
        ([[2, -1]], [[1.0, inf]], [1])
    """

    indices: Any
    distances: Any
    points: Any
    counts: Any


@any_framework
def knn(
    points: Any, queries: Any, k: int, *, mesh: Any = None, axes: Any = None, tile: Tile = TILE
) -> Neighbors:
    """Find the `k` nearest points of each query, by Euclidean distance.

    Args:
        points: float[points, coordinates], a jax.Array or UnevenArray, split by rows or replicated.
        queries: float[queries, coordinates], likewise, over the same mesh or on the same device.
        k: how many, at most as many as there are points.
        mesh: the mesh; needed in `jax.jit` only, where values have no sharding.
        axes: likewise, the mesh axes that split the rows of points and queries, e.g.
            `("x", "x")` or `(None, "x")`; the values are sharded so.
        tile: queries and points compared at a time. Memory grows with
            `tile[0] * (tile[1] * k) ** 0.5`.

    Returns:
        Indices, distances and coordinates; UnevenArrays if the queries are one. In the rare case
        that fewer than `k` points have a finite distance, the index is -1 and the distance inf.

    Raises:
        ShardingError: `k` is no number of points, or the two do not fit; all errors in one message.
        TypeError: one is no array.

    Example:
        >>> knn(jnp.zeros((3, 2)), jnp.zeros((1, 2)), 4)
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: k=4 is no number of neighbours among 3 points: give an integer from 1 to 3.
    """  # noqa: E501
    clouds = read_clouds({"points": points, "queries": queries}, mesh, axes)
    count = clouds["points"].count
    if not _is_positive(k) or k > count:
        raise ShardingError(
            f"k={k!r} is no number of neighbours among {count} points: give an integer from 1 "
            f"to {count}."
        )
    config = _search(clouds, k, tile, counted=False)
    results = _run(config, padded_of(points), padded_of(queries), np.inf)
    return Neighbors(*map(clouds["queries"].like, results[:3]))


@any_framework
def radius_search(
    points: Any,
    queries: Any,
    radius: Any,
    max_points: int,
    *,
    mesh: Any = None,
    axes: Any = None,
    tile: Tile = TILE,
) -> Within:
    """Find the points within a radius of each query, at most `max_points`: the nearest.

    Args:
        points: as for `knn`; at least one.
        queries: as for `knn`.
        radius: the largest distance, included; a number, or float[].
        max_points: results per query; may exceed the number of points.
        mesh: as for `knn`.
        axes: as for `knn`.
        tile: as for `knn`.

    Returns:
        Indices, distances, coordinates and counts; UnevenArrays if the queries are one.

    Raises:
        ShardingError: an argument does not fit.
        TypeError: points or queries are no array.

    Example:
        >>> found = radius_search(jnp.array([[0.0], [1.0], [3.0]]), jnp.array([[0.5]]), 2.0, 4)
        >>> found.indices.tolist(), found.counts.tolist()
        ([[0, 1, -1, -1]], [2])
    """
    clouds = read_clouds({"points": points, "queries": queries}, mesh, axes)
    errors = []
    if not _is_positive(max_points):
        errors.append(f"max_points={max_points!r} is no integer above 0")
    if clouds["points"].count == 0:
        errors.append("there are no points")
    if np.ndim(radius) or (not isinstance(radius, Tracer) and not radius >= 0):
        errors.append(f"radius={radius!r} is no number from 0")
    if errors:
        raise ShardingError(f"there is nothing to search: {'; '.join(errors)}.")
    config = _search(clouds, max_points, tile, counted=True)
    results = _run(config, padded_of(points), padded_of(queries), radius)
    return Within(*map(clouds["queries"].like, results))


def _search(clouds: dict[str, RowSplit], k: int, tile: Any, *, counted: bool) -> Search:
    if not isinstance(tile, tuple) or len(tile) != 2 or not all(map(_is_positive, tile)):
        raise ShardingError(
            f"tile={tile!r} is not the numbers of queries and points compared at a time: give two "
            f"integers above 0, such as {TILE}."
        )
    points, queries = clouds["points"], clouds["queries"]
    if points.count > np.iinfo(np.int32).max:
        raise ShardingError(f"{points.count} points are more than int32 indices can count.")
    return Search(
        points=points,
        queries=queries,
        k=int(k),
        tile=tile,
        counted=counted,
    )


@functools.partial(jax.jit, static_argnums=0)
def _run(config: Search, points: Any, queries: Any, radius: Any) -> tuple[Any, ...]:
    dtype = distance_dtype(points.dtype, queries.dtype)
    limit = jnp.square(jnp.asarray(radius, dtype))
    results: Any = search(config, points, queries, jax.lax.stop_gradient(limit))
    index, near, count = results
    exists = index >= 0
    difference = near.astype(dtype) - queries[:, None, :].astype(dtype)
    square = jnp.square(jnp.where(exists[..., None], difference, 0)).sum(-1)
    # The root has no gradient at 0: there the distance has the gradient 0, as torch.norm's.
    root = jnp.sqrt(jnp.where(square > 0, square, 1))
    distance = jnp.where(exists, jnp.where(square > 0, root, 0), jnp.inf)
    listed = exists.sum(1, dtype=jnp.int32)
    # The two passes may round the distance of a point on the very border differently.
    count = jnp.where(listed < config.k, listed, jnp.maximum(count, listed))
    return index, distance, near, count


def _is_positive(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        return False
    return int(value) >= 1
