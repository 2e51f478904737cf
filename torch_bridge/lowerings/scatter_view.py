"""Writes through views, as functions: the array with a slice, a diagonal or a stride replaced.

The gradients of views (`slice_backward`, ..) are the same writes into zeros. A part is padded to
the full size and chosen by position; GSPMD splits that along any axis, which it cannot do
for a scatter.

>>> from isoshard.torch_bridge.lowerings import registry
>>> slice_scatter = registry.find(torch.ops.aten.slice_scatter.default).function
>>> slice_scatter(jnp.zeros(6), jnp.array([1.0, 2.0]), 0, 1, 5, 2)
Array([0., 1., 0., 2., 0., 0.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch  # noqa: F401  (for the doctest)

from .argument_forms import as_scalar, axis
from .index_updates import put, spread, write_slice
from .registry import lower


def _window(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """aten's slice bounds as 0 <= start <= end <= size."""
    bounds = slice(start, end).indices(size)
    return bounds[0], max(bounds[:2])


@lower("aten::slice_scatter")
def slice_scatter(
    x: jax.Array,
    src: jax.Array,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> jax.Array:
    """`x` with the slice `start:end:step` along an axis replaced by `src`."""
    dim = axis(dim, x.ndim)
    start, end = _window(start, end, x.shape[dim])
    if end == start:
        return x
    return write_slice(x, src, dim, start, end, step)


@lower("aten::select_scatter")
def select_scatter(x: jax.Array, src: jax.Array, dim: int, index: int) -> jax.Array:
    """`x` with the slice at `index` along an axis replaced by `src`."""
    dim = axis(dim, x.ndim)
    index = index % x.shape[dim]
    return write_slice(x, jnp.expand_dims(src, dim), dim, index, index + 1)


@lower("aten::diagonal_scatter")
def diagonal_scatter(
    x: jax.Array, src: jax.Array, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> jax.Array:
    """`x` with the diagonal of the plane of two axes replaced by `src`."""
    dim1, dim2 = axis(dim1, x.ndim), axis(dim2, x.ndim)
    rows, columns = x.shape[dim1], x.shape[dim2]
    # Element k of the diagonal is in row k (offset >= 0) or in column k (offset < 0).
    size, across = (rows, -1) if offset >= 0 else (columns, -2)
    along = jnp.expand_dims(spread(src.astype(x.dtype), size, src.ndim - 1, 0, 1), across)
    plane = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    chosen = jnp.where(jnp.eye(rows, columns, offset, dtype=bool), along, plane)
    return jnp.moveaxis(chosen, (-2, -1), (dim1, dim2))


@lower("aten::as_strided_scatter")
def as_strided_scatter(
    x: jax.Array,
    src: jax.Array,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> jax.Array:
    """`x` with the elements of a strided window over its flat form replaced by `src`."""
    single = src.size == 1
    offsets = np.array([storage_offset or 0]) if single else _strided(size, stride, storage_offset)
    return put(x.reshape(-1), offsets, src.astype(x.dtype)).reshape(x.shape)


@lower("aten::as_strided_copy")
def as_strided_copy(
    x: jax.Array, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> jax.Array:
    """A strided window over the flat form of `x`."""
    return x.reshape(-1)[_strided(size, stride, storage_offset)]


def _strided(size: Sequence[int], stride: Sequence[int], storage_offset: int | None) -> jax.Array:
    """The flat index of each element of a strided window."""
    offsets = jnp.full(tuple(size), storage_offset or 0, jnp.int32)
    for dim, step in enumerate(stride):
        offsets = offsets + step * jax.lax.broadcasted_iota(jnp.int32, tuple(size), dim)
    return offsets


@lower("aten::slice_backward")
def slice_backward(
    grad_output: jax.Array, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> jax.Array:
    """The gradient of a slice: zeros around it."""
    dim = axis(dim, len(input_sizes))
    start, _ = _window(start, end, input_sizes[dim])
    return spread(grad_output, input_sizes[dim], dim, start, step)


@lower("aten::select_backward")
def select_backward(
    grad_output: jax.Array, input_sizes: Sequence[int], dim: int, index: int
) -> jax.Array:
    """The gradient of one index along an axis: zeros around it."""
    dim = axis(dim, len(input_sizes))
    index = index % input_sizes[dim]
    return spread(jnp.expand_dims(grad_output, dim), input_sizes[dim], dim, index, 1)


@lower("aten::diagonal_backward")
def diagonal_backward(
    grad_output: jax.Array, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> jax.Array:
    """The gradient of a diagonal: zeros off it."""
    zeros = jnp.zeros(tuple(input_sizes), grad_output.dtype)
    return diagonal_scatter(zeros, grad_output, offset, dim1, dim2)


@lower("aten::unfold_backward")
def unfold_backward(
    grad_in: jax.Array, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> jax.Array:
    """The gradient of windows of `size` every `step`: each element sums over its windows."""
    dim = axis(dim, len(input_sizes))
    if not input_sizes:
        return grad_in.reshape(())
    windows = grad_in.shape[dim]
    indices = jnp.arange(windows)[:, None] * step + jnp.arange(size)
    rows = jnp.moveaxis(grad_in, (dim, -1), (0, 1))
    total = jnp.zeros((input_sizes[dim], *rows.shape[2:]), grad_in.dtype).at[indices].add(rows)
    return jnp.moveaxis(total, 0, dim)


@lower("aten::fill_diagonal_", writes=("self",), lift=("fill_value",), meta=lambda x, *_: x)
def fill_diagonal(
    x: jax.Array, fill_value: jax.Array | complex, wrap: bool = False
) -> tuple[jax.Array]:
    """`x` with a constant main diagonal, which `wrap` restarts in tall matrices."""
    columns = x.shape[-1]
    indices = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    row = indices % (columns + 1) if wrap and x.ndim == 2 else indices
    hit = jnp.ones(x.shape, bool)
    for along in range(1, x.ndim):
        hit &= row == jax.lax.broadcasted_iota(jnp.int32, x.shape, along)
    return (jnp.where(hit, as_scalar(fill_value, x.dtype), x),)
