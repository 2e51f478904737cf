"""Writing by index arrays: put, scatter and their reductions.

>>> from isoshard.torch_bridge.lowerings import registry
>>> scatter_add = registry.find(torch.ops.aten.scatter_add.default).function
>>> scatter_add(jnp.zeros(3), 0, jnp.array([2, 0, 2]), jnp.array([1.0, 2.0, 3.0]))
Array([2., 0., 4.], dtype=float32)

An index out of range is an error in torch; here its write is dropped. Which of several writes to
one index wins is unspecified in both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # noqa: F401  (for the doctest)

from .argument_forms import as_scalar, at_least_1d, axis, index_dtype, wide
from .argument_forms import in_bounds_indices as narrowed
from .extremes import written
from .index import index_arrays, order
from .index_updates import leading, write
from .memory_order import lower_cloned, lower_contiguous
from .registry import lower
from .unsharded_axes import unsharded

_ADD, _MULTIPLY = "add", "multiply"
_METHODS = {
    "sum": _ADD,
    "mean": _ADD,
    "add": _ADD,
    "prod": _MULTIPLY,
    "multiply": _MULTIPLY,
    "amax": "max",
    "amin": "min",
}


@lower_cloned(
    "aten::index_put",
    "aten::_unsafe_index_put",
    "aten::_index_put_impl",
    "aten::index_put.hacked_twin",
    "aten::_unsafe_index_put.hacked_twin",
)
def index_put(
    x: jax.Array,
    indices: Sequence[jax.Array | None],
    values: jax.Array,
    accumulate: bool = False,
    unsafe: bool = False,
) -> jax.Array:
    """`x` with `x[indices]` replaced by (or, accumulating, increased by) `values`."""
    values = values.astype(x.dtype)
    indexed = [(d, index) for d, index in enumerate(indices) if index is not None]
    if len(indexed) == 1 and indexed[0][1].dtype in (bool, jnp.uint8):
        return _mask_put(x, *indexed[0], values, accumulate)
    return _write(x, index_arrays(x, indices), values, "sum" if accumulate else None)


def _mask_put(
    x: jax.Array, lead: int, mask: jax.Array, values: jax.Array, accumulate: bool
) -> jax.Array:
    """A write at one mask after `lead` full slices: a select, or an ordered read of `values`."""
    mask = mask.astype(bool)
    behind = x.ndim - lead - mask.ndim
    values = values.reshape((1,) * (lead + 1 + behind - values.ndim) + values.shape)
    before, count, after = values.shape[:lead], values.shape[lead], values.shape[lead + 1 :]
    if count == 0:
        return x
    if count == 1:
        spread = values.reshape(*before, *(1,) * mask.ndim, *after)
    else:
        at = jnp.where(
            mask.sum(dtype=index_dtype(mask.size)) == count, order(mask), count
        )  # a mismatched count: NaN
        spread = jnp.take(values, at, axis=lead, mode="fill")
    mask = mask.reshape(*mask.shape, *(1,) * behind)
    return jnp.where(mask, x + spread if accumulate else spread, x)


@lower("aten::_unsafe_masked_index_put_accumulate")
def masked_index_put(
    x: jax.Array, mask: jax.Array, indices: Sequence[jax.Array | None], values: jax.Array
) -> jax.Array:
    """`x` with `x[indices]` increased by `values` where the mask is set."""
    values = jnp.where(mask.astype(bool), values, as_scalar(0, values.dtype)).astype(x.dtype)
    return _write(x, index_arrays(x, indices), values, "sum", mode="clip")


@lower("aten::scatter.src")
def scatter(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    """`x` with the elements at `index` along an axis replaced by `src`."""
    along = axis(dim, x.ndim) if x.ndim else 0
    if not _is_batch(x, along, index):
        return _scatter(x, dim, index, src, None)
    return _in_batches(jax.lax.scatter, x, along, index, src)


@lower("aten::scatter.value", lift=("value",))
def scatter_value(
    x: jax.Array, dim: int, index: jax.Array, value: jax.Array | complex
) -> jax.Array:
    """`x` with the elements at `index` along an axis replaced by a scalar."""
    return scatter(x, dim, index, jnp.broadcast_to(as_scalar(value, x.dtype), index.shape))


@lower("aten::scatter_add")
def scatter_add(x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    """`x` with `src` added at `index` along an axis."""
    along = axis(dim, x.ndim) if x.ndim else 0
    if x.dtype == bool or not _is_batch(x, along, index):
        return _scatter(x, dim, index, src, "sum")
    return _in_batches(jax.lax.scatter_add, wide(x), along, index, src).astype(x.dtype)


def _is_batch(x: jax.Array, along: int, index: jax.Array) -> bool:
    """Whether each line of `x` along an axis has its own line of `index`."""
    other_dims = [d for d in range(x.ndim) if d != along]
    return index.size > 1 and all(index.shape[d] == x.shape[d] for d in other_dims)


def _in_batches(
    function: Callable[..., jax.Array],
    x: jax.Array,
    along: int,
    index: jax.Array,
    src: jax.Array,
) -> jax.Array:
    """A JAX scatter along one axis, for each index of the other axes."""
    index = narrowed(index, x.shape[along])
    other_dims = tuple(d for d in range(x.ndim) if d != along)
    # Said as a batch of scatters, which a mesh splits like any batch. Where what is added is split
    # along the axis of the scatter, XLA's partitioner gives wrong sums for some other layouts.
    index, src = unsharded(index, [along]), unsharded(src, [along])
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(along,),
        scatter_dims_to_operand_dims=(along,),
        operand_batching_dims=other_dims,
        scatter_indices_batching_dims=other_dims,
    )
    src = leading(src, index.shape).astype(x.dtype)
    return function(x, index[..., None], src, dimensions, mode="drop")


@lower("aten::scatter.reduce")
def scatter_with(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, reduce: str
) -> jax.Array:
    """`x` with `src` added or multiplied in at `index`."""
    return _scatter(x, dim, index, src, reduce)


@lower("aten::scatter.value_reduce", lift=("value",))
def scatter_value_with(
    x: jax.Array, dim: int, index: jax.Array, value: jax.Array | complex, *, reduce: str
) -> jax.Array:
    """`x` with a scalar added or multiplied in at `index`."""
    src = jnp.broadcast_to(as_scalar(value, x.dtype), index.shape)
    return _scatter(x, dim, index, src, reduce)


@lower("aten::scatter_reduce.two")
def scatter_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    src: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    """`x` with `src` reduced into the elements at `index`, with or without their old values."""
    return _scatter(x, dim, index, src, reduce, include_self)


def _scatter(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    src: jax.Array,
    reduce: str | None,
    include_self: bool = True,
) -> jax.Array:
    """As torch does, halves are reduced in float32 and rounded once."""
    base, at, src = at_least_1d(x), at_least_1d(index), at_least_1d(src)
    base = base if reduce is None else wide(base)
    if at.size == 0:
        return x
    along = axis(dim, base.ndim)
    at = narrowed(at, base.shape[along])
    where = tuple(
        at if d == along else jax.lax.broadcasted_iota(at.dtype, at.shape, d)
        for d in range(at.ndim)
    )
    src = leading(src, at.shape).astype(base.dtype)
    return _write(base, where, src, reduce, include_self).reshape(x.shape).astype(x.dtype)


def _write(
    x: jax.Array,
    where: tuple[Any, ...],
    src: jax.Array,
    reduce: str | None,
    include_self: bool = True,
    mode: str | None = None,
) -> jax.Array:
    """Set (reduce None) or reduce `src` into `x[where]`."""
    if reduce is None:
        return write(x, where, src, "set")
    if x.dtype == bool:
        base, updates = x.astype(jnp.int32), src.astype(jnp.int32)
        return _write(base, where, updates, reduce, include_self, mode).astype(bool)
    if not include_self:
        touched = jnp.zeros(x.shape, bool).at[where].set(True)
        x = jnp.where(touched, _identity(reduce, x.dtype), x)
    method = _METHODS[reduce]
    total = write(x, where, src, method, mode)
    if method in ("max", "min"):
        total = written(total, x, where, src)
    if reduce != "mean":
        return total
    counts = jnp.full(x.shape, int(include_self), jnp.int32).at[where].add(1)
    counts = jnp.maximum(counts, 1)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return total / counts.astype(x.dtype)
    return jnp.floor_divide(total, counts.astype(x.dtype))


def _identity(reduce: str, dtype: np.dtype) -> jax.Array:
    """What leaves other numbers unchanged under a reduction."""
    if _METHODS[reduce] in (_ADD, _MULTIPLY):
        return as_scalar(int(_METHODS[reduce] == _MULTIPLY), dtype)
    sign = -1 if reduce == "amax" else 1
    if jnp.issubdtype(dtype, jnp.inexact):
        return as_scalar(sign * jnp.inf, dtype)
    return as_scalar(jnp.iinfo(dtype).max if sign > 0 else jnp.iinfo(dtype).min, dtype)


def _along(x: jax.Array, dim: int, index: jax.Array) -> tuple[Any, ...]:
    """The slices along an axis that `index` names, as a JAX index of (at least 1-d) `x`."""
    lead = axis(dim, x.ndim)
    return (*[slice(None)] * lead, narrowed(at_least_1d(index), x.shape[lead]))


@lower("aten::index_add", lift=("alpha",))
def index_add(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    *,
    alpha: jax.Array | complex | None = None,
) -> jax.Array:
    """`x` with `alpha source` added to the slices along an axis that `index` names."""
    scaled = source if alpha is None else source * as_scalar(alpha, source.dtype)
    return _index_write(x, dim, index, scaled, "sum")


@lower_contiguous("aten::index_copy")
def index_copy(x: jax.Array, dim: int, index: jax.Array, source: jax.Array) -> jax.Array:
    """`x` with the slices along an axis that `index` names replaced by `source`."""
    return _index_write(x, dim, index, source, None)


@lower("aten::index_reduce")
def index_reduce(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str,
    *,
    include_self: bool = True,
) -> jax.Array:
    """`x` with `source` reduced into the slices along an axis that `index` names."""
    return _index_write(x, dim, index, source, reduce, include_self)


@lower_cloned("aten::index_fill.int_Scalar", "aten::index_fill.int_Tensor", lift=("value",))
def index_fill(x: jax.Array, dim: int, index: jax.Array, value: jax.Array | complex) -> jax.Array:
    """`x` with the slices at `index` along an axis replaced by a scalar."""
    return _index_write(x, dim, index, as_scalar(value, x.dtype), None)


def _index_write(
    x: jax.Array,
    dim: int,
    index: jax.Array,
    source: jax.Array,
    reduce: str | None,
    include_self: bool = True,
) -> jax.Array:
    base = at_least_1d(x)
    where = _along(base, dim, index)
    source = source if x.ndim else jnp.reshape(source, -1)
    return _write(base, where, source.astype(x.dtype), reduce, include_self).reshape(x.shape)


@lower("aten::put")
def put(x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool = False) -> jax.Array:
    """`x` with elements of its flat form replaced by (or increased by) `source`."""
    source = source.reshape(index.shape).astype(x.dtype)
    index = narrowed(index, x.size)
    return _write(x.reshape(-1), (index,), source, "sum" if accumulate else None).reshape(x.shape)
