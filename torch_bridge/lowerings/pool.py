"""Pooling over windows of one size: maximum and average, any number of spatial axes.

Windows are `lax.reduce_window`, so the values and gradients are the program one writes in JAX by
hand, and the partitioner exchanges halos for it. The positions of the maxima are a
second window reduction, which XLA drops when they are unused; the gradient of a maximum does not.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.extensions import (
    block_avg_pool,
    block_max_pool,
    by_halos,
    cotangent_by_halos,
    max_operator,
    mean_operator,
)
from isoshard.core.nn.pooling import window_argmax, window_max
from isoshard.core.nn.window_grid import WindowGrid

from .argument_forms import per_axis, wide
from .block_operators import by_rows, over_space
from .conv_split import batch_split
from .memory_order import as_images
from .registry import lower
from .unsharded_axes import on_a_mesh
from .vjp import pull_back


def windows(
    shape: Sequence[int],
    rank: int,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> WindowGrid:
    """The windows torch slides over the last `rank` axes of an array of this shape."""
    kernel, pad, dil = (per_axis(v, rank) for v in (kernel_size, padding, dilation))
    step = per_axis(stride, rank) if stride or stride == 0 else kernel
    pads = tuple((p, p) for p in pad)
    return WindowGrid(tuple(shape[-rank:]), kernel, step, dil, pads, bool(ceil_mode))


def _of_rows(grid: WindowGrid) -> tuple[tuple[int, ...], ...]:
    """Window, stride, padding and dilation per spatial axis, for the operators of the domain."""
    return grid.kernel, grid.stride, tuple(pad for pad, _ in grid.padding), grid.dilation


def _of_space(grid: WindowGrid) -> dict[str, Any]:
    """The keyword arguments of the operators of `iso.domain`."""
    settings = dict(zip(("window", "stride", "padding"), _of_rows(grid), strict=False))
    return {**settings, "ceil_mode": grid.ceil}


def _by_rows(x: jax.Array, grid: WindowGrid) -> bool:
    return 0 not in grid.counts and by_rows(x, len(grid.sizes))


# Maximum


def _window_max(x: jax.Array, grid: WindowGrid) -> jax.Array:
    if _by_rows(x, grid):
        return by_halos(max_operator(x.dtype, _of_rows(grid), grid.ceil), x)
    return over_space(
        lambda x: window_max(x, grid),
        lambda x: block_max_pool(x, **_of_space(grid), dilation=grid.dilation),
        len(grid.sizes),
    )(x)


def max_pool(
    rank: int,
    x: jax.Array,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The maxima of windows, and their indices in the flattened spatial axes."""
    grid = windows(x.shape, rank, kernel_size, stride, padding, dilation, ceil_mode)
    flat = jnp.arange(math.prod(grid.sizes), dtype="int32").reshape(grid.sizes)
    indices = window_argmax(lax.stop_gradient(x), jnp.broadcast_to(flat, x.shape), grid)
    return _window_max(x, grid), indices


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
    """The gradient of `max_pool`: JAX's own, or by `indices` where windows are dilated.

    XLA's partitioner loses the share of windows that reach over two devices: where rows are not
    sent by hand images are unsharded, and so is the gradient, which may be resharded afterwards.
    A TPU has JAX's of 32 bits, and of arrays with two axes before the spatial ones.
    """
    grid = windows(x.shape, rank, kernel_size, stride, padding, dilation, ceil_mode)
    if _by_rows(x, grid):
        return cotangent_by_halos(max_operator(x.dtype, _of_rows(grid), grid.ceil), grad, x)
    grad, x = batch_split(grad), batch_split(x)
    if any(d != 1 for d in grid.dilation):
        return batch_split(scattered(grad, indices, x.shape, rank))

    def usual(grad: jax.Array, x: jax.Array, _: jax.Array) -> jax.Array:
        return pull_back(lambda a: _window_max(a, grid), grad, x)[0]

    def by_indices(grad: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
        return scattered(grad, indices, x.shape, rank)

    if x.dtype != np.float64 and x.ndim - rank >= 2:
        return batch_split(usual(grad, x, indices))
    return batch_split(lax.platform_dependent(grad, x, indices, tpu=by_indices, default=usual))


def scattered(
    values: jax.Array, indices: jax.Array, shape: Sequence[int], rank: int, *, add: bool = True
) -> jax.Array:
    """Scatter each value to its index in the flattened last `rank` axes of an array of zeros.

    Args:
        values: `(*lead, *windows)`.
        indices: flat positions, of the same shape.
        shape: `(*lead, *spatial)`, the shape of the result.
        rank: number of spatial axes.
        add: whether values of equal index are summed; else one of them is written.

    Returns:
        The array; leading axes are not merged, so that they may be sharded.
    """
    lead = len(shape) - rank

    def scatter_plane(values: jax.Array, indices: jax.Array) -> jax.Array:
        zeros = jnp.zeros((math.prod(shape[lead:]),), values.dtype)
        there = zeros.at[indices.reshape(-1)]
        return (there.add if add else there.set)(values.reshape(-1))

    for _ in range(lead):
        scatter_plane = jax.vmap(scatter_plane)
    return scatter_plane(values, indices).reshape(shape)


for _rank in (2, 3):
    lower(f"aten::max_pool{_rank}d_with_indices")(functools.partial(max_pool, _rank))
    lower(f"aten::max_pool{_rank}d_with_indices_backward")(
        functools.partial(max_pool_backward, _rank)
    )


def _unpool(x: jax.Array, indices: jax.Array, output_size: Sequence[int], *_) -> jax.Array:
    rank = len(output_size)
    return scattered(x, indices, (*x.shape[:-rank], *output_size), rank, add=False)


lower("aten::max_unpool2d", meta=as_images("aten::max_unpool2d"))(_unpool)
lower("aten::max_unpool3d")(_unpool)


# Average


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
        lambda x: _unsharded_avg_pool(x, grid, **options),
        lambda x: block_avg_pool(x, **_of_space(grid), **options),
        rank,
    )(x)


def _unsharded_avg_pool(
    x: jax.Array, grid: WindowGrid, count_include_pad: bool, divisor_override: int | None
) -> jax.Array:
    y, options = wide(x), grid.over(x.ndim)
    if on_a_mesh():
        # XLA would take the edges that it put around the parts of `x` for a maximum.
        y, options["padding"] = jnp.pad(y, options["padding"]), ((0, 0),) * x.ndim
    total = lax.reduce_window(y, np.array(0, y.dtype), lax.add, **options)
    divisor = divisor_override or grid.lengths(include_pad=count_include_pad)
    if isinstance(divisor, np.ndarray) and divisor.size and np.ptp(divisor) == 0:
        divisor = float(divisor.flat[0])
    return (total / jnp.asarray(divisor, y.dtype)).astype(x.dtype)


def _mean_operator(grid: WindowGrid, count_include_pad: bool, divisor_override: int | None):
    counted = "padded" if count_include_pad else "real"
    return mean_operator(_of_rows(grid), grid.ceil, counted, divisor_override)


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
        return cotangent_by_halos(operator, wide(grad), wide(x)).astype(x.dtype)
    options = (kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)
    grad, x = batch_split(grad), batch_split(x)
    return pull_back(lambda a: _avg_pool(rank, a, *options), grad, x)[0]


for _rank in (2, 3):
    lower(f"aten::avg_pool{_rank}d")(functools.partial(_avg_pool, _rank))
    lower(f"aten::avg_pool{_rank}d_backward")(functools.partial(_avg_pool_backward, _rank))
