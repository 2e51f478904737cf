"""Embedding tables: gathers forward, scatter-adds backward.

An index outside the table, a negative one too, gives NaN, never another row, and adds to none.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from .argument_forms import in_bounds_indices, index_dtype, wide
from .cse import shared
from .registry import lower

_SUM, _MEAN, _MAX = 0, 1, 2


@lower("aten::embedding")
def _embedding(
    weight: jax.Array,
    indices: jax.Array,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> jax.Array:
    axes = jax.lax.GatherDimensionNumbers(
        offset_dims=(indices.ndim,), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return jax.lax.gather(
        weight,
        _starts(indices, weight.shape[0]),
        axes,
        slice_sizes=(1, weight.shape[1]),
        mode=GatherScatterMode.FILL_OR_DROP,
    )


def _starts(indices: jax.Array, rows: int) -> jax.Array:
    """Where the rows begin, as a gather takes it: with an axis of one coordinate."""
    return shared(_rows if index_dtype(rows) == jnp.int32 else _many_rows, indices)


def _rows(indices: jax.Array) -> jax.Array:
    return jnp.expand_dims(in_bounds_indices(indices, 1), -1)


def _many_rows(indices: jax.Array) -> jax.Array:
    return jnp.expand_dims(indices, -1)


def _counts(indices: jax.Array, rows: int, dtype: np.dtype) -> jax.Array:
    """How often each row is used."""
    return jnp.zeros((rows,), dtype).at[indices].add(1)


@lower("aten::embedding_dense_backward")
def _embedding_backward(
    grad: jax.Array,
    indices: jax.Array,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> jax.Array:
    if scale_grad_by_freq:
        count = jnp.take(_counts(indices, num_weights, grad.dtype), indices, axis=0)
        grad = grad / count[..., None]
    if padding_idx >= 0:
        grad = jnp.where((indices == padding_idx)[..., None], jnp.zeros_like(grad), grad)
    axes = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(indices.ndim,),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    return jax.lax.scatter_add(
        jnp.zeros((num_weights, grad.shape[-1]), grad.dtype),
        _starts(indices, num_weights),
        grad,
        axes,
        mode=GatherScatterMode.FILL_OR_DROP,
    )


@lower("aten::embedding_renorm")
def _embedding_renorm(
    weight: jax.Array, indices: jax.Array, max_norm: float, norm_type: float
) -> jax.Array:
    """Shrink the rows at `indices` to `max_norm`; other rows are unchanged."""
    norm = jnp.linalg.norm(wide(weight), ord=norm_type, axis=1)
    used = jnp.zeros((weight.shape[0],), bool).at[indices.reshape(-1)].set(True)
    factor = jnp.where(used & (norm > max_norm), max_norm / (norm + 1e-7), jnp.ones_like(norm))
    return weight * factor[:, None]


# Bags. Bag b has the indices from offsets[b] up to the next offset.


def _bags(
    indices: jax.Array, offsets: jax.Array, include_last_offset: bool
) -> tuple[jax.Array, int]:
    """The bag of each index, and the number of bags."""
    if include_last_offset:
        offsets = offsets[:-1]
    positions = jnp.arange(indices.shape[0], dtype=offsets.dtype)
    return jnp.searchsorted(offsets, positions, side="right") - 1, offsets.shape[0]


@lower("aten::_embedding_bag", "aten::_embedding_bag_forward_only")
def _embedding_bag(
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    per_sample_weights: jax.Array | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Reduce the rows of each bag; returns also each index's bag, bag sizes and arg maxima.

    The sizes are as many as the offsets, so the last is 0 where the last offset opens no bag.
    """
    bag, count = _bags(indices, offsets, include_last_offset)
    kept = jnp.ones(indices.shape, bool) if padding_idx < 0 else indices != padding_idx
    size = jax.ops.segment_sum(kept.astype(offsets.dtype), bag, offsets.shape[0])
    rows = wide(jnp.take(weight, indices, axis=0))
    if mode == _MAX:
        out, where = _bag_max(rows, indices, kept, bag, count)
        return out, bag, size, where
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    out = jax.ops.segment_sum(jnp.where(kept[:, None], rows, jnp.zeros_like(rows)), bag, count)
    if mode == _MEAN:
        out = out / jnp.maximum(size[:count], 1).astype(out.dtype)[:, None]
    return out, bag, size, jnp.zeros((0,), offsets.dtype)


def _bag_max(
    rows: jax.Array, indices: jax.Array, kept: jax.Array, bag: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """The maximum over each bag and the table row it came from; 0 and -1 for an empty bag."""
    if not indices.shape[0]:
        return jnp.zeros((count, rows.shape[1]), rows.dtype), jnp.full(
            (count, rows.shape[1]), -1, indices.dtype
        )
    rows = jnp.where(kept[:, None], rows, jnp.full_like(rows, -jnp.inf))
    top = jax.ops.segment_max(rows, bag, count)
    position = jnp.arange(indices.shape[0], dtype=indices.dtype)[:, None]
    winner = kept[:, None] & (rows == jnp.take(top, bag, axis=0))
    last = jnp.asarray(indices.shape[0], indices.dtype)
    first = jax.ops.segment_min(jnp.where(winner, position, last), bag, count)
    filled = first < last
    where = jnp.take(indices, jnp.where(filled, first, jnp.zeros_like(first)), axis=0)
    return jnp.where(filled, top, jnp.zeros_like(top)), jnp.where(filled, where, -1)


@lower("aten::_embedding_bag_dense_backward")
def _embedding_bag_dense_backward(
    grad: jax.Array,
    indices: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    if mode == _MAX:
        return _bag_max_backward(grad, maximum_indices, num_weights)
    rows = jnp.take(grad, offset2bag, axis=0)
    if mode == _MEAN:
        rows = rows / jnp.take(bag_size, offset2bag, axis=0).astype(rows.dtype)[:, None]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    return _embedding_backward(rows, indices, num_weights, padding_idx, scale_grad_by_freq)


def _bag_max_backward(grad: jax.Array, maximum_indices: jax.Array, num_weights: int) -> jax.Array:
    """Each column of each bag sends its gradient to the row that was largest there."""
    zeros = jnp.zeros((num_weights, grad.shape[1]), grad.dtype)
    outside = jnp.where(maximum_indices < 0, num_weights, maximum_indices)
    columns = jnp.arange(grad.shape[1])
    return zeros.at[outside, columns].add(grad, mode="drop")


@lower("aten::_embedding_bag_backward")
def _embedding_bag_backward(
    grad: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: jax.Array | None,
    padding_idx: int = -1,
) -> jax.Array:
    return _embedding_bag_dense_backward(
        grad,
        indices,
        offset2bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lower("aten::_embedding_bag_per_sample_weights_backward")
def _per_sample_weights_backward(
    grad: jax.Array,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    mode: int,
    padding_idx: int = -1,
) -> jax.Array:
    products = jnp.take(grad, offset2bag, axis=0) * jnp.take(weight, indices, axis=0)
    out = jnp.sum(wide(products), axis=1)
    return out if padding_idx < 0 else jnp.where(indices == padding_idx, 0, out)
