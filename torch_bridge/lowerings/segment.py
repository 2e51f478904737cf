"""Reductions over consecutive segments of an axis, by lengths or offsets.

Leading axes of `lengths` are batch axes: each row of data has its own segments. An empty segment
gives the initial value: 0 for a sum, NaN for a mean, the neutral element otherwise.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from .registry import lower

_NEUTRAL = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -jnp.inf, "min": jnp.inf}
_REDUCE = {
    "sum": jax.ops.segment_sum,
    "mean": jax.ops.segment_sum,
    "prod": jax.ops.segment_prod,
    "max": jax.ops.segment_max,
    "min": jax.ops.segment_min,
}


def _rows(
    data: jax.Array, lengths: jax.Array | None, offsets: Any, axis: int
) -> tuple[jax.Array, jax.Array, jax.Array, tuple[int, ...]]:
    """Data as (rows, elements, rest), and the ends and lengths of segments as (rows, segments)."""
    lead = data.shape[:axis]
    flat = data.reshape(-1, data.shape[axis], *data.shape[axis + 1 :])
    if lengths is not None:
        sizes = lengths.reshape(flat.shape[0], -1)
        starts = jnp.cumsum(sizes, axis=1) - sizes
    else:
        bounds = offsets.reshape(flat.shape[0], -1)
        starts, sizes = bounds[:, :-1], jnp.diff(bounds, axis=1)
    return flat, starts, sizes, lead


def _owners(starts: jax.Array, sizes: jax.Array, count: int) -> jax.Array:
    """The segment that each of `count` elements belongs to; the number of segments for none."""
    position = jnp.arange(count, dtype=starts.dtype)
    owner = jnp.searchsorted(starts + sizes, position, side="right")
    first = jnp.min(starts, initial=count)
    return jnp.where((position >= first) & (owner < starts.shape[0]), owner, starts.shape[0])


def _shape(
    data: torch.Tensor,
    reduce: str,
    *,
    lengths: torch.Tensor | None = None,
    indices: torch.Tensor | None = None,
    offsets: torch.Tensor | None = None,
    axis: int = 0,
    **_: bool | float | None,
) -> torch.Tensor:
    if indices is not None:
        raise RuntimeError("segment_reduce(): indices based reduction is not supported yet.")
    if lengths is not None:
        shape = tuple(lengths.shape)
    elif offsets is not None:
        shape = (*offsets.shape[:-1], offsets.shape[-1] - 1)
    else:
        raise RuntimeError("segment_reduce(): Either lengths or offsets must be defined.")
    return data.new_empty((*shape, *data.shape[axis + 1 :]))


@lower("aten::segment_reduce", meta=_shape)
def _segment_reduce(
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    indices: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    unsafe: bool = False,
    initial: float | None = None,
) -> jax.Array:
    flat, starts, sizes, lead = _rows(data, lengths, offsets, axis % data.ndim)
    count = starts.shape[1]
    start = jnp.asarray(_NEUTRAL[reduce] if initial is None else initial, data.dtype)

    def reduce_row(row: jax.Array, starts: jax.Array, sizes: jax.Array) -> jax.Array:
        owner = _owners(starts, sizes, row.shape[0])
        out = _REDUCE[reduce](row, owner, count + 1)[:count]
        size = sizes.reshape(-1, *(1,) * (row.ndim - 1))
        if reduce == "max":
            return jnp.maximum(out, start)
        if reduce == "min":
            return jnp.minimum(out, start)
        out = out * start if reduce == "prod" else out + start
        if reduce != "mean":
            return out
        empty = jnp.asarray(jnp.nan if initial is None else initial, data.dtype)
        return jnp.where(size == 0, empty, out / jnp.maximum(size, 1))

    return jax.vmap(reduce_row)(flat, starts, sizes).reshape(*lead, count, *flat.shape[2:])


@lower(
    "aten::_segment_reduce_backward",
    meta=lambda grad, output, data, *_, **__: torch.empty_like(
        data, memory_format=torch.contiguous_format
    ),
)
def _segment_reduce_backward(
    grad: jax.Array,
    output: jax.Array,
    data: jax.Array,
    reduce: str,
    *,
    lengths: jax.Array | None = None,
    offsets: jax.Array | None = None,
    axis: int = 0,
    initial: float | None = None,
) -> jax.Array:
    """Ties share the gradient of an extreme; a product's leaves the element itself out."""
    flat, starts, sizes, _ = _rows(data, lengths, offsets, axis % data.ndim)
    count = starts.shape[1]
    grads, outputs = (x.reshape(flat.shape[0], count, *flat.shape[2:]) for x in (grad, output))

    def row_gradient(
        row: jax.Array, starts: jax.Array, sizes: jax.Array, grad: jax.Array, output: jax.Array
    ) -> jax.Array:
        owner = _owners(starts, sizes, row.shape[0])
        inside = (owner < count).reshape(-1, *(1,) * (row.ndim - 1))
        safe = jnp.minimum(owner, count - 1)
        if reduce == "mean":
            grad = grad / jnp.maximum(sizes, 1).reshape(-1, *(1,) * (row.ndim - 1))
        cotangent = jnp.where(inside, grad[safe], 0)
        if reduce in ("max", "min"):
            hit = inside & ((row == output[safe]) | jnp.isnan(row))
            ties = jax.ops.segment_sum(hit.astype(row.dtype), owner, count + 1)[safe]
            return jnp.where(hit, cotangent / jnp.maximum(ties, 1), 0)
        return cotangent * _others(row, owner) if reduce == "prod" else cotangent

    def _others(row: jax.Array, owner: jax.Array) -> jax.Array:
        start = 1.0 if initial is None else initial
        zero = row == 0
        zeros = jax.ops.segment_sum(zero.astype(row.dtype), owner, count + 1)[owner]
        rest = jax.ops.segment_prod(jnp.where(zero, 1, row), owner, count + 1)[owner] * start
        without = jnp.where(zero, rest, rest / jnp.where(zero, 1, row))
        return jnp.where(zeros > zero, 0, without)

    return jax.vmap(row_gradient)(flat, starts, sizes, grads, outputs).reshape(data.shape)
