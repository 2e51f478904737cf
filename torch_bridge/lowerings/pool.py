"""Pooling over windows of one size: maximum and average, any number of spatial axes.

Windows are `lax.reduce_window`, so the values and gradients are the program one writes in JAX by
hand, and the partitioner knows how to exchange halos for it. The positions of the maxima are a
second window reduction, which XLA drops when nobody reads them; the gradient of a maximum does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core import domain
from isoshard.core.domain.windows.pool import max_operator, mean_operator
from isoshard.core.domain.windows.space_split import by_halos, slope_by_halos

from .argument_forms import wide
from .block_operators import by_rows, over_space
from .conv_split import batch_split
from .memory_order import as_images
from .registry import lower
from .unsharded_axes import on_a_mesh
from .vjp import pull_back


class Windows(NamedTuple):
    """Windows over the last axes of an array, as `lax.reduce_window` wants them.

    Attributes:
        size: window size along every axis of the array (1 along leading ones).
        stride: likewise.
        dilation: likewise.
        padding: (before, after) along every axis, including what `ceil_mode` adds.
        count: windows per spatial axis.
        own_padding: torch's padding per spatial axis, on both sides.
        ceil: whether a last window may hang over the end.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    count: tuple[int, ...]
    own_padding: tuple[int, ...]
    ceil: bool

    @property
    def of_space(self) -> dict[str, Any]:
        """The keyword arguments of the operators of `iso.domain`."""
        rank = len(self.count)
        return {
            "window": self.size[-rank:],
            "stride": self.stride[-rank:],
            "padding": self.own_padding,
            "ceil_mode": self.ceil,
        }

    @property
    def of_rows(self) -> tuple[tuple[int, ...], ...]:
        """Window, stride, padding and dilation per spatial axis."""
        rank = len(self.count)
        return self.size[-rank:], self.stride[-rank:], self.own_padding, self.dilation[-rank:]

    @property
    def plain(self) -> dict[str, tuple]:
        """The keyword arguments of `lax.reduce_window`."""
        return {
            "window_dimensions": self.size,
            "window_strides": self.stride,
            "padding": self.padding,
            "window_dilation": self.dilation,
        }


def _each(values: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """One number per spatial axis; torch lets one stand for all."""
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * rank if len(values) == 1 else values


def windows(
    shape: Sequence[int],
    rank: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Windows:
    """The windows torch slides over the last `rank` axes of an array of this shape.

    In ceil mode a last window may hang over the end, but must begin inside the image or the
    padding before it.
    """
    kernel, pad, dil = (_each(v, rank) for v in (kernel_size, padding, dilation))
    step = _each(stride, rank) if stride or stride == 0 else kernel
    count, ends = [], []
    for size, k, s, p, d in zip(shape[-rank:], kernel, step, pad, dil, strict=True):
        reach = d * (k - 1) + 1
        room = size + 2 * p - reach
        n = (-(-room // s) if ceil_mode else room // s) + 1
        if ceil_mode and (n - 1) * s >= size + p:
            n -= 1
        count.append(n)
        ends.append((p, max((n - 1) * s + reach - size - p, 0)))
    lead = (1,) * (len(shape) - rank)
    return Windows(
        lead + kernel,
        lead + step,
        lead + dil,
        ((0, 0),) * len(lead) + tuple(ends),
        tuple(count),
        pad,
        bool(ceil_mode),
    )


def _by_rows(x: jax.Array, grid: Windows) -> bool:
    return 0 not in grid.count and by_rows(x, len(grid.count))


# Maximum


def _lowest(dtype: np.dtype):
    return dtype.type(-np.inf) if jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype).min


def _window_max(x: jax.Array, grid: Windows) -> jax.Array:
    rank = len(grid.count)
    if _by_rows(x, grid):
        return by_halos(max_operator(x.dtype, grid.of_rows, grid.ceil), x)
    return over_space(
        lambda x: lax.reduce_window(x, np.array(_lowest(x.dtype), x.dtype), lax.max, **grid.plain),
        lambda x: domain.max_pool(x, **grid.of_space, dilation=grid.dilation[-rank:]),
        rank,
    )(x)


def _later_wins(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Which of two (value, position) pairs torch keeps: the first largest, or the last NaN."""
    (x, i), (y, j) = a, b
    x_nan, y_nan = x != x, y != y
    first = (x > y) | ((x == y) & (i < j))
    keep = jnp.where(x_nan | y_nan, x_nan & (~y_nan | (i > j)), first)
    return jnp.where(keep, x, y), jnp.where(keep, i, j)


def _window_argmax(x: jax.Array, grid: Windows, rank: int) -> jax.Array:
    """Positions of the maxima in the flattened spatial axes."""
    sizes = x.shape[-rank:]
    flat = jnp.arange(math.prod(sizes), dtype="int32").reshape(sizes)
    inits = (np.array(_lowest(x.dtype), x.dtype), np.int32(np.iinfo(np.int32).max))
    position = jnp.broadcast_to(flat, x.shape)
    return lax.reduce_window((x, position), inits, _later_wins, **grid.plain)[1]


def max_pool(
    rank: int,
    x: jax.Array,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The maxima of windows, and their places in the flattened spatial axes."""
    grid = windows(x.shape, rank, kernel_size, stride, padding, dilation, ceil_mode)
    return _window_max(x, grid), _window_argmax(lax.stop_gradient(x), grid, rank)


def max_pool_backward(
    rank: int,
    grad: jax.Array,
    x: jax.Array,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    ceil_mode: bool,
    indices: jax.Array,
) -> jax.Array:
    """The gradient of `max_pool`: JAX's own, which knows no dilation; there `indices` serve.

    XLA's partitioner loses the share of windows that reach over two devices: where rows are not
    sent by hand images are whole, and so is the gradient, which may have to lie split afterwards.
    """
    grid = windows(x.shape, rank, kernel_size, stride, padding, dilation, ceil_mode)
    if _by_rows(x, grid):
        return slope_by_halos(max_operator(x.dtype, grid.of_rows, grid.ceil), grad, x)
    grad, x = batch_split(grad), batch_split(x)
    if any(d != 1 for d in grid.dilation):
        return batch_split(scatter_add(grad, indices, x.shape, rank))
    return batch_split(pull_back(lambda a: _window_max(a, grid), grad, x)[0])


def scatter_add(grad: jax.Array, indices: jax.Array, shape: Sequence[int], rank: int) -> jax.Array:
    """Add each value to the place its index names in the flattened last `rank` axes.

    Args:
        grad: values, `(*lead, *windows)`.
        indices: flat positions, of the same shape.
        shape: `(*lead, *spatial)`, the shape of the result.
        rank: number of spatial axes.

    Returns:
        The sums; the leading axes stay apart, so that they may be sharded.
    """
    lead = len(shape) - rank

    def one(values: jax.Array, places: jax.Array) -> jax.Array:
        zeros = jnp.zeros((math.prod(shape[lead:]),), values.dtype)
        return zeros.at[places.reshape(-1)].add(values.reshape(-1))

    for _ in range(lead):
        one = jax.vmap(one)
    return one(grad, indices).reshape(shape)


for _rank in (2, 3):
    lower(f"aten::max_pool{_rank}d_with_indices")(functools.partial(max_pool, _rank))
    lower(f"aten::max_pool{_rank}d_with_indices_backward")(
        functools.partial(max_pool_backward, _rank)
    )


def _unpool(x: jax.Array, indices: jax.Array, output_size: Sequence[int], *_) -> jax.Array:
    """Put each value at its index and 0 elsewhere."""
    rank = len(output_size)
    shape = (*x.shape[:-rank], *output_size)

    def one(values: jax.Array, places: jax.Array) -> jax.Array:
        zeros = jnp.zeros((math.prod(output_size),), values.dtype)
        return zeros.at[places.reshape(-1)].set(values.reshape(-1))

    for _ in range(x.ndim - rank):
        one = jax.vmap(one)
    return one(x, indices).reshape(shape)


lower("aten::max_unpool2d", meta=as_images("aten::max_unpool2d"))(_unpool)
lower("aten::max_unpool3d")(_unpool)


# Average


def _lengths(size: int, n: int, k: int, s: int, p: int, include_pad: bool) -> np.ndarray:
    """How many elements each window along one axis averages over."""
    begin = np.arange(n) * s - p
    end = np.minimum(begin + k, size + p)
    return end - begin if include_pad else np.minimum(end, size) - np.maximum(begin, 0)


def _divisor(
    shape: Sequence[int], rank: int, grid: Windows, include_pad: bool
) -> float | np.ndarray:
    """What each window sum is divided by: a number where all agree, else an array."""
    parts = zip(
        shape[-rank:],
        grid.count,
        grid.size[-rank:],
        grid.stride[-rank:],
        grid.own_padding,
        strict=True,
    )
    lengths = [_lengths(*part, include_pad) for part in parts]
    counts = functools.reduce(np.multiply.outer, lengths)
    return float(counts.flat[0]) if counts.size and np.ptp(counts) == 0 else counts


def _avg_pool(
    rank: int,
    x: jax.Array,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> jax.Array:
    grid = windows(x.shape, rank, kernel_size, stride, padding, 1, ceil_mode)
    options = {"count_include_pad": count_include_pad, "divisor_override": divisor_override}
    if _by_rows(x, grid):
        return by_halos(_mean_operator(grid, **options), wide(x)).astype(x.dtype)
    return over_space(
        lambda x: _whole_avg_pool(rank, x, grid, **options),
        lambda x: domain.avg_pool(x, **grid.of_space, **options),
        rank,
    )(x)


def _whole_avg_pool(
    rank: int, x: jax.Array, grid: Windows, count_include_pad: bool, divisor_override: int | None
) -> jax.Array:
    y = wide(x)
    if on_a_mesh():
        # XLA would take the edges that it put around the parts of `x` for a maximum.
        edged = jnp.pad(y, grid.padding)
        plain: dict[str, Any] = grid.plain | {"padding": ((0, 0),) * y.ndim}
        total = lax.reduce_window(edged, np.array(0, y.dtype), lax.add, **plain)
    else:
        total = lax.reduce_window(y, np.array(0, y.dtype), lax.add, **grid.plain)
    divisor = divisor_override or _divisor(x.shape, rank, grid, count_include_pad)
    return (total / jnp.asarray(divisor, y.dtype)).astype(x.dtype)


def _mean_operator(grid: Windows, count_include_pad: bool, divisor_override: int | None):
    counted = "padded" if count_include_pad else "real"
    return mean_operator(grid.of_rows, grid.ceil, counted, divisor_override)


def _avg_pool_backward(
    rank: int,
    grad: jax.Array,
    x: jax.Array,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> jax.Array:
    grid = windows(x.shape, rank, kernel_size, stride, padding, 1, ceil_mode)
    if _by_rows(x, grid):
        operator = _mean_operator(grid, count_include_pad, divisor_override)
        return slope_by_halos(operator, wide(grad), wide(x)).astype(x.dtype)
    options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    grad, x = batch_split(grad), batch_split(x)
    return pull_back(lambda a: _avg_pool(rank, a, *options), grad, x)[0]


for _rank in (2, 3):
    lower(f"aten::avg_pool{_rank}d")(functools.partial(_avg_pool, _rank))
    lower(f"aten::avg_pool{_rank}d_backward")(functools.partial(_avg_pool_backward, _rank))
