"""Resizing: each output element is a weighted sum of a few elements of an axis.

Indices and weights depend on the sizes only, and are computed with NumPy. Axes are resized one
after the other:

>>> where = sources(np.arange(4), 2, 4, align_corners=False)
>>> where.tolist()
[-0.25, 0.25, 0.75, 1.25]
>>> taps = filter_taps(np.maximum(where, 0), 2, triangle, 1)
>>> resample(jnp.array([0.0, 8.0]), 0, taps).tolist()
[0.0, 2.0, 6.0, 8.0]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CUBIC = -0.75
"""The parameter a of cubic convolution (Keys, 1981), as torch, ONNX and OpenCV choose it."""


class Taps(NamedTuple):
    """The indices and weights by which one axis is resized.

    Attributes:
        indices: of the elements read, an array `(taps, outputs)` of NumPy or traced.
        weights: of the same shape; None for a single tap of weight 1.
    """

    indices: Any
    weights: Any


def ratio_of(
    size: int,
    count: int,
    *,
    align_corners: bool = False,
    scale: float | None = None,
    dtype: Any = np.float64,
) -> Any:
    """Elements of an axis per output.

    Args:
        size: of the axis.
        count: outputs.
        align_corners: whether the first and the last are those of the axis.
        scale: outputs per element, if not as the sizes have it; not for aligned corners.
        dtype: of the result.
    """
    if align_corners:
        return dtype((size - 1) / (count - 1)) if count > 1 else dtype(0)
    return dtype(1 / scale) if scale else dtype(size / count)


def sources(
    outputs: np.ndarray,
    size: int,
    count: int,
    *,
    align_corners: bool,
    scale: float | None = None,
    dtype: Any = np.float64,
) -> np.ndarray:
    """The positions of the outputs' centres in the axis; arguments as of `ratio_of`."""
    ratio = ratio_of(size, count, align_corners=align_corners, scale=scale, dtype=dtype)
    outputs, half = outputs.astype(dtype), dtype(0.5)
    return ratio * outputs if align_corners else ratio * (outputs + half) - half


def triangle(distance: np.ndarray) -> np.ndarray:
    """The filter of linear interpolation."""
    return np.maximum(1 - np.abs(distance), 0)


def cubic(distance: np.ndarray, a: float = CUBIC) -> np.ndarray:
    """The filter of cubic convolution, with parameter `a`."""
    t = np.abs(distance)
    return np.where(t <= 1, _near(t, a), np.where(t < 2, _far(t, a), 0))


def lanczos(distance: np.ndarray) -> np.ndarray:
    """The filter of Lanczos, with three lobes."""
    return np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0)


def cubic_weights(fraction: jax.Array, a: float = CUBIC) -> tuple[jax.Array, ...]:
    """Weights of four neighbours of a point at `fraction` between the second and the third."""
    return _far(fraction + 1, a), _near(fraction, a), _near(1 - fraction, a), _far(2 - fraction, a)


def _near(t: Any, a: float) -> Any:
    return ((a + 2) * t - (a + 3)) * t * t + 1


def _far(t: Any, a: float) -> Any:
    return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a


def tap_offsets(reach: int, squeezed: float = 1.0) -> range:
    """The offsets of the elements that a filter reads, from the last element below a point.

    Args:
        reach: half of the width of the filter.
        squeezed: the factor, up to 1, of distances, which widens the filter.
    """
    start = int(np.floor(-reach / squeezed)) + 1
    return range(start, 2 - start)


def filter_taps(
    where: np.ndarray,
    size: int,
    kernel: Callable[[np.ndarray], np.ndarray],
    reach: int,
    *,
    squeezed: float = 1.0,
    exclude_outside: bool = False,
) -> Taps:
    """The elements around points, weighted by a filter of their distance.

    Args:
        where: the points; elements outside the axis are those at its ends.
        size: of the axis.
        kernel: the filter.
        reach: half of its width.
        squeezed: as for `tap_offsets`, against aliasing; weights are then normalized to 1.
        exclude_outside: elements outside have weight 0, and weights are normalized to 1.
    """
    offsets = np.array(tap_offsets(reach, squeezed), np.int32)[:, None]
    indices = np.floor(where).astype(np.int32) + offsets
    weights = kernel((indices - where) * squeezed)
    if exclude_outside:
        weights = np.where((indices < 0) | (indices >= size), 0, weights)
    if exclude_outside or squeezed < 1:
        weights = weights / weights.sum(0)
    return Taps(np.clip(indices, 0, size - 1), weights)


def smooth_taps(
    mode: str,
    outputs: np.ndarray,
    size: int,
    count: int,
    *,
    align_corners: bool,
    scale: float | None = None,
    dtype: Any = np.float64,
) -> Taps:
    """The taps of torch's "linear" and "cubic" interpolation; arguments as of `sources`."""
    where = sources(outputs, size, count, align_corners=align_corners, scale=scale, dtype=dtype)
    if mode == "linear":
        indices, weights = filter_taps(np.clip(where, 0, size), size, triangle, 1)
    else:
        indices, weights = filter_taps(where, size, cubic, 2)
    return Taps(indices, weights.astype(dtype))


def matrix_of(taps: Taps, size: int) -> np.ndarray:
    """The weights of all `size` elements in each output, `(outputs, size)`.

    >>> matrix_of(Taps(np.array([[0, 1], [0, 0]]), np.array([[0.75, 1], [0.25, 0]])), 2).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    matrix = np.zeros((taps.indices.shape[1], size))
    np.add.at(matrix, (np.arange(len(matrix)), taps.indices), taps.weights)
    return matrix


def resample(x: jax.Array, axis: int, taps: Taps, mode: Any = None) -> jax.Array:
    """Resize one axis of an array, of floats if the taps have weights; `mode` is of `jnp.take`."""
    indices, weights = taps
    size, count = x.shape[axis], indices.shape[1]
    if weights is None:
        times = count // size if size else 0
        if times * size == count and np.array_equal(indices[0], np.arange(count) // times):
            return jnp.repeat(x, times, axis=axis)
        return jnp.take(x, indices[0], axis=axis, mode=mode)
    shape = [1] * x.ndim
    shape[axis] = count
    terms = [
        jnp.take(x, at, axis=axis, mode=mode) * weight.reshape(shape).astype(x.dtype)
        for at, weight in zip(indices, weights, strict=True)
    ]
    return functools.reduce(jnp.add, terms)
