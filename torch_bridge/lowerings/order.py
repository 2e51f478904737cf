"""Sorting, and what is read off a sorted axis: k-th values, medians, modes, running extremes.

>>> from isoshard.torch_bridge.lowerings import registry
>>> registry.find(torch.ops.aten.sort.default).function(jnp.array([2.0, jnp.nan, 1.0, 2.0]))
(Array([ 1.,  2.,  2., nan], dtype=float32), Array([2, 0, 3, 1], dtype=int32))

NaN counts as the largest value. Sorts are stable, so equal elements keep their order; torch
promises no order for them in `topk`, `median` and `kthvalue`. `topk` sorts: GSPMD splits a sort
over the other axes, but gathers the full array for `lax.top_k`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .argument_forms import as_scalar, at_least_1d, axis, first_index
from .index_updates import read_slice
from .registry import lower
from .unsharded_axes import unsharded


@lower("aten::sort")
def sort(x: jax.Array, dim: int = -1, descending: bool = False) -> tuple[jax.Array, jax.Array]:
    """The elements in order along an axis, and where each was."""
    line = at_least_1d(x)
    along = axis(dim, line.ndim)
    indices = jax.lax.broadcasted_iota(jnp.int32, line.shape, along)
    turned = [jnp.flip(a, along) if descending else a for a in (line, indices)]
    values, indices = jax.lax.sort(turned, dimension=along, is_stable=True, num_keys=1)
    if descending:
        values, indices = jnp.flip(values, along), jnp.flip(indices, along)
    return values.reshape(x.shape), indices.reshape(x.shape)


@lower("aten::sort.stable")
def sort_stable(
    x: jax.Array, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Sort that keeps the order of equal elements."""
    return sort(x, dim, descending)


@lower("aten::argsort")
def argsort(x: jax.Array, dim: int = -1, descending: bool = False) -> jax.Array:
    """Where the elements in order are."""
    return sort(x, dim, descending)[1]


@lower("aten::argsort.stable")
def argsort_stable(
    x: jax.Array, *, stable: bool, dim: int = -1, descending: bool = False
) -> jax.Array:
    """Indices of the sorted elements; equal elements keep their order."""
    return sort(x, dim, descending)[1]


@lower("aten::msort")
def msort(x: jax.Array) -> jax.Array:
    """The elements in order along the first axis."""
    return sort(x, 0)[0]


@lower("aten::topk")
def topk(
    x: jax.Array, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[jax.Array, ...]:
    """The k largest (smallest) elements along an axis in order, and their indices."""
    values, indices = sort(x, dim, largest)
    if x.ndim == 0:
        return jnp.resize(values, ()), jnp.resize(indices, ())
    along = axis(dim, x.ndim)
    return tuple(read_slice(a, along, 0, k) for a in (values, indices))


@lower("aten::kthvalue")
def kthvalue(
    x: jax.Array, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The k-th smallest element along an axis (k from 1), and its index."""
    values, indices = (_pick(a, k - 1, dim, keepdim) for a in sort(x, dim))
    return values, indices


@lower("aten::median.dim", meta=torch.ops.aten.max.dim)
def median_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, ...]:
    """The lower median along an axis and its index; the first NaN if there is one."""
    line = at_least_1d(x)
    middle = (line.shape[dim] - 1) // 2
    values, indices = sort(line, dim)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        bad = jnp.isnan(line)
        first = first_index(jax.lax.argmax, bad, dim, keepdims=True)
        any_bad = jnp.any(bad, axis=dim, keepdims=True)
        values = jnp.where(any_bad, jnp.full_like(values, jnp.nan), values)
        indices = jnp.where(any_bad, first.astype(indices.dtype), indices)
    keep = keepdim and x.ndim > 0
    picked = (_pick(a, middle, dim, keep) for a in (values, indices))
    return tuple(picked)


@lower("aten::median")
def median(x: jax.Array) -> jax.Array:
    """The lower median of all elements; NaN of none, as torch's C++ casts it to `x.dtype`."""
    flat = x.reshape(-1)
    return median_dim(flat, 0)[0] if flat.size else jnp.full((), _of_none(x.dtype))


def _of_none(dtype: np.dtype) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.inexact):
        return as_scalar(jnp.nan, dtype)
    if not jnp.issubdtype(dtype, jnp.integer):
        return as_scalar(1, dtype)
    return as_scalar(jnp.iinfo(dtype).min if dtype in (jnp.int32, jnp.int64) else 0, dtype)


@lower("aten::nanmedian.dim", meta=torch.ops.aten.max.dim)
def nanmedian_dim(x: jax.Array, dim: int, keepdim: bool = False) -> tuple[jax.Array, ...]:
    """The lower median of the elements that are not NaN, and its index."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return median_dim(x, dim, keepdim)
    line = at_least_1d(x)
    count = jnp.sum(~jnp.isnan(line), axis=dim, keepdims=True)
    middle = jnp.maximum(count - 1, 0) // 2
    picked = (jnp.take_along_axis(a, middle, axis=dim) for a in sort(line, dim))
    shape = median_dim(x, dim, keepdim)[0].shape
    return tuple(a.reshape(shape) for a in picked)


@lower("aten::nanmedian")
def nanmedian(x: jax.Array) -> jax.Array:
    """The lower median of the elements that are not NaN."""
    flat = x.reshape(-1)
    return nanmedian_dim(flat, 0)[0] if flat.size else median(x)


@lower("aten::mode")
def mode(x: jax.Array, dim: int = -1, keepdim: bool = False) -> tuple[jax.Array, ...]:
    """The most frequent element along an axis (the smallest of several), and its last index."""
    line = at_least_1d(x)
    along = axis(dim, line.ndim)
    values, indices = sort(unsharded(line, [along]), along)
    steps = jax.lax.broadcasted_iota(jnp.int32, line.shape, along)
    fresh = values != jnp.roll(values, 1, along)
    starts = jax.lax.cummax(jnp.where(fresh, steps, 0), along)
    longest = first_index(jax.lax.argmax, steps - starts, along, keepdims=True)
    picked = (jnp.take_along_axis(a, longest, axis=along) for a in (values, indices))
    keep = keepdim and x.ndim > 0
    return tuple(a if keep else jnp.squeeze(a, along) for a in picked)


@lower("aten::cummax")
def cummax(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Running maximum, and its last index; NaN is propagated."""
    return _running(jax.lax.cummax, x, dim)


@lower("aten::cummin")
def cummin(x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Running minimum, and its last index; NaN is propagated."""
    return _running(jax.lax.cummin, x, dim)


def _running(
    extreme: Callable[..., jax.Array], x: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    line = at_least_1d(x.astype(jnp.uint8) if x.dtype == bool else x)
    along = axis(dim, line.ndim)
    line = unsharded(line, [along])
    values = extreme(line, along)
    is_extreme = line == values
    if jnp.issubdtype(x.dtype, jnp.inexact):
        is_extreme = is_extreme | jnp.isnan(line)
    steps = jax.lax.broadcasted_iota(jnp.int32, line.shape, along)
    indices = jax.lax.cummax(jnp.where(is_extreme, steps, 0), along)
    return values.reshape(x.shape), indices.reshape(x.shape)


def _pick(x: jax.Array, index: int, dim: int, keepdim: bool) -> jax.Array:
    """The slice at `index` along an axis; a 0-d array is its own slice."""
    if x.ndim == 0:
        return x
    return jax.lax.index_in_dim(x, index, axis(dim, x.ndim), keepdims=keepdim)
