"""Attention and matrix products that torch_xla has TPU kernels for, as plain JAX functions.

XLA fuses and partitions them like everything around them, on every kind of device, and JAX
differentiates them. They keep the conventions of torch_xla's kernels: masked scores get a large
negative number, nothing is scaled that the caller does not scale, and a causal mask starts in the
upper left corner.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from isoshard.core.layout.axis_types import constrain
from isoshard.core.nn.dot_product_attention import masked, scores, visible, weighted, wide

MASKED = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The score of a key that is masked."""


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: jax.Array | None,
    kv_segments: jax.Array | None,
    bias: jax.Array | None,
    *,
    causal: bool,
    scale: float,
    sharding: jax.sharding.Sharding | None,
) -> jax.Array:
    """See `flash.flash_attention`; `bias` is its `ab`, and `sharding` that of its operands."""
    if sharding is not None:
        q, k, v = (constrain(x, sharding) for x in (q, k, v))
    mask = None
    if q_segments is not None and kv_segments is not None:
        mask = (q_segments[..., :, None] == kv_segments[..., None, :])[..., None, :, :]
    if bias is not None:
        bias = bias * scale

    def attend_batch(
        q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, mask: jax.Array | None
    ) -> jax.Array:
        if q.dtype == jnp.float64:  # whose softmax JAX's attention takes in float32
            rows = jnp.arange(q.shape[-2])[:, None]
            order = visible(rows, k.shape[-2], after=0 if causal else None)
            return _attend(q, k, v, scale, None, (bias, 0.0), (mask, MASKED), (order, MASKED))
        q, k, v = (jnp.swapaxes(x, -3, -2) for x in (q, k, v))
        out = jax.nn.dot_product_attention(q, k, v, bias, mask, scale=scale, is_causal=causal)
        return jnp.swapaxes(out, -3, -2)

    axes = (0, 0, 0, None if bias is None else 0, None if mask is None else 0)
    for _ in range(q.ndim - 4):
        attend_batch = jax.vmap(attend_batch, axes)
    out = attend_batch(q, k, v, bias, mask)
    return out if sharding is None else constrain(out, sharding)


def paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_indices: jax.Array,
    *,
    soft_cap: float | None,
) -> jax.Array:
    """See `paged.paged_attention`."""
    ones = jnp.ones_like(lengths)
    return multi_queries_paged_attention(
        q[:, None], k_pages, v_pages, lengths, page_indices, ones, soft_cap=soft_cap
    )[:, 0]


def multi_queries_paged_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    lengths: jax.Array,
    page_indices: jax.Array,
    effective_q_lens: jax.Array,
    *,
    soft_cap: float | None,
) -> jax.Array:
    """See `paged.multi_queries_paged_attention`."""

    def attend_sequence(
        q: jax.Array, length: jax.Array, pages: jax.Array, queries: jax.Array
    ) -> jax.Array:
        keys, values = (
            x[:, pages].reshape(x.shape[0], -1, x.shape[-1]) for x in (k_pages, v_pages)
        )
        last = length - queries + jnp.arange(q.shape[0])
        seen = visible(last[:, None], keys.shape[1], after=0, count=length)
        out = _attend(q.swapaxes(0, 1), keys, values, 1.0, soft_cap, (seen, -jnp.inf))
        return out.swapaxes(0, 1)

    return jax.vmap(attend_sequence)(q, lengths, page_indices, effective_q_lens)


def ragged_paged_attention(
    q: jax.Array,
    kv_pages: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    mask_value: float,
    k_scale: float | None,
    v_scale: float | None,
) -> jax.Array:
    """Attention of concatenated sequences of different lengths.

    Args:
        q: (tokens, heads, width).
        kv_pages: (pages, page size, 2 * key heads, width); keys and values in turn.
        kv_lens: (sequences,), how many keys each sequence has.
        page_indices: (sequences, pages per sequence).
        cu_q_lens: (sequences + 1,), where the tokens of each sequence begin.
        num_seqs: (1,), how many sequences there are.
        scale: of the products.
        window: how many of the last keys a token sees; None for all.
        soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
        mask_value: the score of a masked key.
        k_scale: what keys are multiplied by.
        v_scale: what values are multiplied by.

    Returns:
        (tokens, heads, width); zero for tokens of no sequence.
    """
    width = kv_pages.shape[-1]
    token, rows = jnp.arange(q.shape[0]), q.swapaxes(0, 1)

    def attend_sequence(index: jax.Array, out: jax.Array) -> jax.Array:
        both = kv_pages[page_indices[index]].reshape(-1, kv_pages.shape[2], width).swapaxes(0, 1)
        keys, values = both[0::2], both[1::2]
        if k_scale is not None:
            keys = (keys.astype(jnp.float32) * k_scale).astype(q.dtype)
        if v_scale is not None:
            values = (values.astype(jnp.float32) * v_scale).astype(q.dtype)
        begin, end, length = cu_q_lens[index], cu_q_lens[index + 1], kv_lens[index]
        last = (length - (end - begin) + token - begin)[:, None]
        before = None if window is None else window - 1
        seen = visible(last, keys.shape[1], before=before, after=0, count=length)
        exists = jnp.arange(keys.shape[1]) < length
        masks = (seen, mask_value), (exists, -jnp.inf)
        output = _attend(rows, keys, values, scale, soft_cap, *masks)
        in_sequence = (token >= begin) & (token < end) & (index < num_seqs[0])
        return jnp.where(in_sequence[:, None], output, out)

    return jax.lax.fori_loop(0, kv_lens.shape[0], attend_sequence, jnp.zeros_like(rows)).swapaxes(
        0, 1
    )


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    scale: float,
    soft_cap: float | None,
    *masks: tuple[jax.Array | None, float],
) -> jax.Array:
    """Attention of (.., heads, queries, width) to (.., fewer heads, keys, width).

    Each mask comes with the score of what it hides.
    """
    logits = scores(q, k).astype(q.dtype) * scale
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    logits = logits.astype(wide(q.dtype))
    for mask, low in masks:
        logits = masked(logits, mask, low)
    return weighted(jax.nn.softmax(logits, -1).astype(v.dtype), v).astype(v.dtype)


def gmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    *,
    transpose_rhs: bool,
) -> jax.Array:
    """See `grouped_products.gmm`; the result has the dtype of `lhs`."""
    if transpose_rhs:
        rhs = rhs.swapaxes(1, 2)
    if group_offset is not None:
        every = jnp.zeros((group_sizes.shape[0], *rhs.shape[1:]), rhs.dtype)
        rhs = jax.lax.dynamic_update_slice_in_dim(every, rhs, group_offset.reshape(()), 0)
    return jax.lax.ragged_dot(lhs, rhs, group_sizes, preferred_element_type=lhs.dtype)


def tgmm(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    group_offset: jax.Array | None,
    *,
    groups: int,
) -> jax.Array:
    """See `grouped_products.tgmm`: the gradient of `gmm`, of the dtype of `lhs`."""
    zeros = jnp.zeros((group_sizes.shape[0], lhs.shape[0], rhs.shape[1]), lhs.dtype)
    _, back = jax.vjp(lambda rhs: jax.lax.ragged_dot(lhs.T, rhs, group_sizes), zeros)
    (every,) = back(rhs.astype(lhs.dtype))
    first = 0 if group_offset is None else group_offset.reshape(())
    return jax.lax.dynamic_slice_in_dim(every, first, groups)


def quantized_matmul(
    x: jax.Array, w: jax.Array, scale: jax.Array, *, quantize_activation: bool
) -> jax.Array:
    """See `grouped_products.quantized_matmul_int8`; the result has the dtype of `x`."""
    if not quantize_activation:
        return (jnp.matmul(x, w.T.astype(x.dtype)) * scale).astype(x.dtype)
    steps = jnp.max(jnp.abs(x), -1, keepdims=True) / 127
    rounded = jnp.round(x / steps).astype(jnp.int8)
    product = jnp.matmul(rounded, w.T, preferred_element_type=jnp.int32)
    return (product * scale * steps).astype(x.dtype)
