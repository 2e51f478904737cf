"""Fused layers that torch calls in evaluation: attention and the transformer encoder layer.

`nn.TransformerEncoderLayer` and `nn.MultiheadAttention` call one operator each where no gradient is
wanted. `scaled_dot_product_attention` is in `sdpa`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.nn.dot_product_attention import masked

from .argument_forms import wide
from .matmul import linear
from .norm import _layer_norm
from .registry import lower

_SQUARE, _PADDING = 0, 1  # what a two-dimensional mask of `_masked_softmax` is about


def _widened(mask: jax.Array, mask_type: int | None, ndim: int) -> jax.Array:
    """A mask in a shape that broadcasts with (batch, head, row, column)."""
    mask = mask.astype(bool)  # torch's layers hand over 0 and minus infinity
    if mask.ndim == ndim:
        return mask
    if mask_type == _PADDING:
        return mask[:, None, None, :]
    return mask[None, None] if mask_type == _SQUARE else mask


@lower("aten::_masked_softmax", meta=lambda x, *_, **__: torch.empty_like(x))
def _masked_softmax(
    x: jax.Array, mask: jax.Array, dim: int | None = None, mask_type: int | None = None
) -> jax.Array:
    """Softmax over what the mask leaves (True leaves out)."""
    mask = jnp.broadcast_to(_widened(mask, mask_type, x.ndim), x.shape)
    return jax.nn.softmax(masked(wide(x), ~mask), -1 if dim is None else dim)


@lower("aten::_masked_softmax_backward", meta=lambda grad, *_, **__: torch.empty_like(grad))
def _masked_softmax_backward(
    grad: jax.Array, y: jax.Array, mask: jax.Array, dim: int | None = None
) -> jax.Array:
    dim = -1 if dim is None else dim
    g, y = wide(grad), wide(y)
    kept = jnp.where(mask, 0, g * y)
    return jnp.where(mask, 0, kept - y * jnp.sum(kept, axis=dim, keepdims=True))


def _heads(x: jax.Array, count: int) -> jax.Array:
    """(batch, time, width) as (batch, head, time, width of a head)."""
    batch, time, width = x.shape
    return jnp.swapaxes(x.reshape(batch, time, count, width // count), 1, 2)


def _rescaled_shapes(
    qkv: torch.Tensor, bias: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, ...]:
    batch, time, width = qkv.shape
    size = (batch, num_heads, time, width // 3 // num_heads)
    return tuple(qkv.new_empty(size) for _ in range(3))


@lower("aten::_transform_bias_rescale_qkv", meta=_rescaled_shapes)
def _split_heads(
    qkv: jax.Array, qkv_bias: jax.Array, num_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries (divided by the root of their width), keys and values by head."""
    q, k, v = (_heads(x, num_heads) for x in jnp.split(qkv + qkv_bias, 3, axis=-1))
    return q / math.sqrt(q.shape[-1]), k, v


def _attention_shapes(
    query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor | None]:
    named = dict(zip(_ATTENTION_OPTIONS, args[8:], strict=False)) | kwargs
    out = query.new_empty(query.shape)
    if not named.get("need_weights", True):
        return out, None
    heads = () if named.get("average_attn_weights", True) else (args[2],)
    return out, query.new_empty((query.shape[0], *heads, query.shape[1], key.shape[1]))


_ATTENTION_OPTIONS = ("need_weights", "average_attn_weights", "mask_type")


@lower("aten::_native_multi_head_attention", meta=lambda *a, **k: _attention_shapes(*a, **k))
def _attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    embed_dim: int,
    num_head: int,
    qkv_weight: jax.Array,
    qkv_bias: jax.Array,
    proj_weight: jax.Array,
    proj_bias: jax.Array,
    mask: jax.Array | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Multi-head attention and its weights, averaged over heads or not; None if not needed."""
    weights, biases = jnp.split(qkv_weight, 3), jnp.split(qkv_bias, 3)
    q, k, v = (
        _heads(linear(x, weight, bias), num_head)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    scores = wide(q / math.sqrt(q.shape[-1]) @ jnp.swapaxes(k, -1, -2))
    kept = None if mask is None else ~_widened(mask, mask_type, 4)
    shares = jax.nn.softmax(masked(scores, kept), axis=-1).astype(v.dtype)
    mixed = jnp.swapaxes(shares @ v, 1, 2).reshape(*query.shape[:2], embed_dim)
    out = linear(mixed, proj_weight, proj_bias)
    if not need_weights:
        return out, None
    return out, jnp.mean(shares, axis=1) if average_attn_weights else shares


@lower(
    "aten::_transformer_encoder_layer_fwd",
    meta=lambda src, *_, **__: torch.empty_like(src, memory_format=torch.contiguous_format),
)
def _encoder_layer(
    src: jax.Array,
    embed_dim: int,
    num_heads: int,
    qkv_weight: jax.Array,
    qkv_bias: jax.Array,
    proj_weight: jax.Array,
    proj_bias: jax.Array,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: jax.Array,
    norm_bias_1: jax.Array,
    norm_weight_2: jax.Array,
    norm_bias_2: jax.Array,
    ffn_weight_1: jax.Array,
    ffn_bias_1: jax.Array,
    ffn_weight_2: jax.Array,
    ffn_bias_2: jax.Array,
    mask: jax.Array | None = None,
    mask_type: int | None = None,
) -> jax.Array:
    """Attention and a two-layer perceptron, each with a residual and a layer norm."""

    def norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
        return _layer_norm(x, (embed_dim,), weight, bias, eps)[0].astype(x.dtype)

    def attend(x: jax.Array) -> jax.Array:
        weights = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return _attention(
            x, x, x, embed_dim, num_heads, *weights, mask, need_weights=False, mask_type=mask_type
        )[0]

    def feed(x: jax.Array) -> jax.Array:
        hidden = linear(x, ffn_weight_1, ffn_bias_1)
        hidden = jax.nn.gelu(wide(hidden), approximate=False) if use_gelu else jax.nn.relu(hidden)
        return linear(hidden.astype(x.dtype), ffn_weight_2, ffn_bias_2)

    first, second = (norm_weight_1, norm_bias_1), (norm_weight_2, norm_bias_2)
    if norm_first:
        x = src + attend(norm(src, *first))
        return x + feed(norm(x, *second))
    x = norm(src + attend(src), *first)
    return norm(x + feed(x), *second)
