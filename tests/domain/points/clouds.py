"""Clouds for the tests of this folder, and the neighbours that NumPy finds in float64."""

import numpy as np

import isoshard as iso
from isoshard import P


def cloud(rows, seed, width=3):
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def lay_out(values, mesh, axes, sizes=None):
    """Rows over mesh axes; with sizes an UnevenArray whose padding is NaN."""
    if sizes is None:
        return iso.shard(values, mesh, P(axes))
    block = max(sizes) + 1
    padded = np.full((len(sizes), block, *values.shape[1:]), np.nan, values.dtype)
    for number, part in enumerate(np.split(values, np.cumsum(sizes)[:-1])):
        padded[number, : sizes[number]] = part
    array = iso.shard(padded.reshape(-1, *values.shape[1:]), mesh, P(axes))
    return iso.UnevenArray(array, values.shape, (sizes, *[None] * (values.ndim - 1)))


def whole(x):
    """The valid rows of an array or UnevenArray."""
    if not isinstance(x, iso.UnevenArray):
        return np.asarray(x)
    blocks = np.split(np.asarray(x.array), len(x.sizes[0]))
    parts = [block[:size] for block, size in zip(blocks, x.sizes[0], strict=True)]
    return np.concatenate(parts)


def nearest(points, queries, k):
    """Indices and distances in float64."""
    apart = points.astype(np.float64) - queries.astype(np.float64)[:, None]
    distance = np.sqrt((apart**2).sum(-1))
    order = np.argsort(distance, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(distance, order, 1)


def gradients(points, queries, index, weights):
    """Of the sum of the distances times the weights; index -1 is no neighbour."""
    there = index >= 0
    apart = points.astype(np.float64)[index] - queries.astype(np.float64)[:, None]
    length = np.linalg.norm(apart, axis=-1, keepdims=True)
    slope = np.where(there[..., None], weights[..., None] * apart / length, 0)
    of_points = np.zeros(points.shape)
    np.add.at(of_points, index[there], slope[there])
    return of_points, -slope.sum(1)
