"""Attention and rotary embeddings, as opsets 23 to 25 define them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.kit import masked, scores, softmax, visible, weighted

from ...errors import ModelError
from .operator_arguments import dtype_of, physical
from .registry import operator


@operator("Attention", since=23)
def attention(
    q,
    k,
    v,
    attn_mask=None,
    past_key=None,
    past_value=None,
    nonpad_kv_seqlen=None,
    *,
    is_causal=0,
    kv_num_heads=None,
    left_window_size=-1,
    q_num_heads=None,
    qk_matmul_output_mode=0,
    right_window_size=-1,
    scale=None,
    softcap=0.0,
    softmax_precision=None,
):
    """softmax(scale * Q K^T + bias) V, per head.

    Args:
        q: `(batch, heads, queries, size)`, or `(batch, queries, heads * size)`.
        k: likewise, with keys in place of queries; perhaps fewer heads, each for several of `q`.
        v: likewise, with a size of its own.
        attn_mask: can be broadcast to `(batch, heads, queries, keys)`: true where a key is seen, or
            numbers that are added; keys it has no room for are not seen.
        past_key: `(batch, heads, past, size)`, put before the keys.
        past_value: likewise.
        nonpad_kv_seqlen: `(batch,)`, how many keys are valid.
        is_causal: a query sees the keys up to its own place; the last query's is the last valid
            key's where keys are cached.
        kv_num_heads: heads of keys and values, if they have three axes.
        left_window_size: how many keys before its own place a query sees; -1 for all.
        q_num_heads: heads of queries, likewise.
        qk_matmul_output_mode: what the last result is: 0 the products, 1 after `softcap`, 2 with
            the bias, 3 after the softmax.
        right_window_size: how many keys after its own place a query sees; -1 for all.
        scale: 1 / sqrt(size) by default.
        softcap: c > 0 bends the products to c * tanh(product / c).
        softmax_precision: a dtype in which the softmax is computed.

    Returns:
        The attended values, shaped like `q`; all keys; all values; what the mode says.
    """
    if (past_key is None) != (past_value is None):
        raise ModelError("past_key and past_value must both be inputs, or neither")
    flat = q.ndim == 3
    q, k, v = _heads(q, q_num_heads), _heads(k, kv_num_heads), _heads(v, kv_num_heads)
    past = 0
    if past_key is not None and past_value is not None:
        past = past_key.shape[2]
        k, v = jnp.concatenate([past_key, k], 2), jnp.concatenate([past_value, v], 2)
    keys, values = k, v
    if q.shape[1] % k.shape[1]:
        raise ModelError(f"{q.shape[1]} heads of queries do not share {k.shape[1]} of keys evenly")
    root = np.sqrt(1 / np.sqrt(q.shape[-1]) if scale is None else scale).astype(np.float32)
    root = jnp.asarray(root, q.dtype)
    stages = [scores(q * root, k * root).astype(q.dtype)]
    stages.append(softcap * jnp.tanh(stages[0] / softcap) if softcap else stages[0])
    window = (left_window_size, 0 if is_causal else right_window_size)
    bias, is_visible = _bias(stages[0].shape, attn_mask, nonpad_kv_seqlen, past, window)
    stages.append(masked(stages[1] if bias is None else stages[1] + bias, is_visible))
    precise = q.dtype if softmax_precision is None else physical(dtype_of(softmax_precision))
    free, shares = bias is None and is_visible is None, stages[2].astype(precise)
    shares = jax.nn.softmax(shares, -1) if free else softmax(shares)[0]
    stages.append(shares.astype(q.dtype))
    y = weighted(stages[3].astype(v.dtype), v).astype(q.dtype)
    if flat:
        y = y.swapaxes(1, 2).reshape(y.shape[0], y.shape[2], -1)
    if not 0 <= qk_matmul_output_mode <= 3:
        raise ModelError(f"qk_matmul_output_mode is {qk_matmul_output_mode}; possible are 0..3")
    return y, keys, values, stages[qk_matmul_output_mode]


def _heads(x, count):
    if x.ndim == 4:
        return x
    if not count:
        raise ModelError("inputs of three axes need q_num_heads and kv_num_heads")
    return x.reshape(*x.shape[:2], count, -1).swapaxes(1, 2)


def _bias(shape, mask, valid, past, window):
    """What is added to the scores, and which are seen at all; None for nothing and all."""
    queries, keys = shape[-2:]
    bias, is_visible = None, None
    if mask is not None:
        missing = [(0, 0)] * (mask.ndim - 1) + [(0, keys - mask.shape[-1])]
        if mask.dtype == bool:
            is_visible = jnp.pad(mask, missing)
        else:
            bias = jnp.pad(mask, missing, constant_values=-jnp.inf)
    valid = None if valid is None else valid.reshape(-1, 1, 1, 1)
    row = jax.lax.broadcasted_iota(jnp.int32, (queries, 1), 0)
    position = row + (past if past or valid is None else valid - queries)
    before, after = (size if size >= 0 else None for size in window)
    around = visible(position, keys, before=before, after=after, count=valid)
    if is_visible is None or around is None:
        return bias, around if is_visible is None else is_visible
    return bias, is_visible & around


@operator("RotaryEmbedding", since=23)
def rotary_embedding(
    x,
    cos_cache,
    sin_cache,
    position_ids=None,
    *,
    interleaved=0,
    num_heads=None,
    rotary_embedding_dim=0,
):
    """Pairs of elements of each head turned by an angle that depends on the position.

    Args:
        x: `(batch, heads, positions, size)`, or `(batch, positions, heads * size)`.
        cos_cache: of the angles, `(batch, positions, turned / 2)`, or a row per position id.
        sin_cache: likewise.
        position_ids: `(batch, positions)`, rows of the caches.
        interleaved: a pair is two neighbours; else one element of each half.
        num_heads: needed if `x` has three axes.
        rotary_embedding_dim: how many elements of a head are turned; 0 for all.
    """
    if x.ndim == 3 and not num_heads:
        raise ModelError("an input of three axes needs num_heads")
    y = x.swapaxes(1, 2) if x.ndim == 4 else x.reshape(*x.shape[:2], num_heads, -1)
    turned = rotary_embedding_dim or y.shape[-1]
    if position_ids is not None:
        cos_cache, sin_cache = cos_cache[position_ids], sin_cache[position_ids]
    cos, sin = cos_cache[:, :, None], sin_cache[:, :, None]
    rotated_slice, rest = y[..., :turned], y[..., turned:]
    if interleaved:
        a, b = rotated_slice[..., 0::2], rotated_slice[..., 1::2]
    else:
        a, b = rotated_slice[..., : turned // 2], rotated_slice[..., turned // 2 :]
    pair = (cos * a - sin * b, sin * a + cos * b)
    rotated_slice = (
        jnp.stack(pair, -1).reshape(rotated_slice.shape)
        if interleaved
        else jnp.concatenate(pair, -1)
    )
    y = jnp.concatenate([rotated_slice, rest], -1)
    return y.swapaxes(1, 2) if x.ndim == 4 else y.reshape(x.shape)
