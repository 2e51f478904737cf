"""Maxima and sums of windows, and the windows of adaptive pooling.

>>> grid = WindowGrid((5,), (3,), (2,), (1,), ((0, 0),))
>>> window_max(jnp.array([3, 1, 4, 1, 5]), grid).tolist()
[4, 5]
>>> window_argmax(jnp.array([3.0, 1, 4, 1, 5]), jnp.arange(5, dtype="int32"), grid).tolist()
[2, 4]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .window_grid import WindowGrid


def lowest(dtype: Any) -> np.ndarray:
    """The identity of a maximum: the least value of a dtype.

    >>> lowest(np.dtype("int8")).item(), lowest(np.dtype("float32")).item()
    (-128, -inf)
    """
    floats = jnp.issubdtype(dtype, jnp.inexact)
    return np.array(-np.inf if floats else jnp.iinfo(dtype).min, dtype)


def window_max(x: jax.Array, grid: WindowGrid) -> jax.Array:
    """The largest element of each window; no gradient where windows are dilated."""
    return lax.reduce_window(x, lowest(x.dtype), lax.max, **grid.over(x.ndim))


def window_sum(x: jax.Array, grid: WindowGrid) -> jax.Array:
    """The sum of each window."""
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, **grid.over(x.ndim))


def window_argmax(x: jax.Array, position: jax.Array, grid: WindowGrid) -> jax.Array:
    """The position of the first largest element of each window, or of the last NaN.

    Args:
        x: any array.
        position: int32, of the same shape; the lesser of two is the first.
        grid: the windows.
    """
    start = (lowest(x.dtype), np.int32(np.iinfo(np.int32).max))
    return lax.reduce_window((x, position), start, _later_wins, **grid.over(x.ndim))[1]


def _later_wins(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x, i), (y, j) = a, b
    x_nan, y_nan = x != x, y != y
    first = (x > y) | ((x == y) & (i < j))
    keep = jnp.where(x_nan | y_nan, x_nan & (~y_nan | (i > j)), first)
    return jnp.where(keep, x, y), jnp.where(keep, i, j)


def argmax(values: jax.Array) -> jax.Array:
    """The index of the first largest element, or of the last NaN, along the last axis, kept."""
    count = np.arange(1, values.shape[-1] + 1, dtype=np.int32)
    last_nan = jnp.max(jnp.where(jnp.isnan(values), count, 0), -1)
    largest = lax.argmax(values, values.ndim - 1, np.int32)
    return jnp.where(last_nan > 0, last_nan - 1, largest)[..., None]


def adaptive_windows(windows: np.ndarray, size: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The windows of adaptive pooling: floor(i * size / n) up to ceil((i + 1) * size / n).

    They may differ in length by one, and overlap.

    Returns:
        Indices `(windows, longest)`, and the mask of those in the window; the others repeat its
        last.

    >>> indices, inside = adaptive_windows(np.arange(3), 5, 3)
    >>> indices.tolist(), inside.sum(1).tolist()
    ([[0, 1, 1], [1, 2, 3], [3, 4, 4]], [2, 3, 2])
    """
    first, last = windows * size // count, -(-(windows + 1) * size // count)
    indices = first[:, None] + np.arange(int((last - first).max(initial=1)))
    return np.minimum(indices, last[:, None] - 1), indices < last[:, None]
