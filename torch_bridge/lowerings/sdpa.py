"""`scaled_dot_product_attention` as one operation, and its gradient as another.

The operators are two that torch has for it: the CPU's flash kernel, and the one called *efficient*,
which takes a mask with a gradient and any number of axes. Here both are the same computation
(`isoshard.core.nn.dot_product_attention`); `torch_bridge/kernels/attention_choice.py` chooses
between them.

In a program that may split the sequence over devices, both are operators that see how their
operands lie when it is compiled (`isoshard.domain.attention.partitioned_attention`): split
sequences go round a ring, and nothing is gathered. Whether a sequence is split is decided by marks,
and by what comes before: XLA gathers tokens where one more is put before them, unless the result is
marked.

Dropout is that of the *efficient* operator, which gives the two words that the weights were dropped
by: what is dropped depends on them and on a weight's position, not on any sharding, and the
gradient drops the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.extensions import attend_in_blocks, gradients_in_blocks, partitioned_attention
from isoshard.core.lifting.in_blocks import in_blocks
from isoshard.core.nn.dot_product_attention import products
from isoshard.core.nn.dropout import words_of

from .program_partition import target_platform
from .registry import lower
from .sequence_split import is_partitioned, may_split
from .tiled_masks import tiled_mask_of


def _static(q: jax.Array, is_causal: bool, scale: float | None, rate: float) -> Any:
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return partitioned_attention(
        bool(is_causal), float(factor), rate=float(rate), platform=target_platform()
    )


def _is_partitioned(static: Any, q: jax.Array, k: jax.Array, mask: Any) -> bool:
    """Whether each device gets a program of its own, by the shardings that the compiler chose.

    XLA would partition the loop over tiles as well, but not a kernel in it.
    """
    return may_split(q.shape, k.shape[-2]) or (is_partitioned() and static.is_tiled(q, k, mask))


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Any,
    is_causal: bool,
    scale: float | None,
    rate: float = 0.0,
    words: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The result and the logarithm of its sums, round a ring if the sequence is split."""
    static = _static(q, is_causal, scale, rate)
    if static.is_tiled(q, k, None):
        mask = tiled_mask_of(mask, q, k)

    def unsharded(q: jax.Array, k: jax.Array, *others: Any):
        attend = static if _is_partitioned(static, q, k, others[1]) else static.unsharded
        return attend(q, k, *others)

    return in_blocks(unsharded, functools.partial(attend_in_blocks, static))(q, k, v, mask, words)


def _backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: Any,
    out: jax.Array,
    logsumexp: jax.Array,
    is_causal: bool,
    scale: float | None,
    wants_mask: bool,
    rate: float = 0.0,
    words: jax.Array | None = None,
) -> tuple[jax.Array | None, ...]:
    """The gradients of query, key, value and mask; the last is None where it is not required."""
    static = _static(q, is_causal, scale, rate)
    if static.is_tiled(q, k, None) and not wants_mask:
        mask = tiled_mask_of(mask, q, k)

    def unsharded(
        grad: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | None,
        logsumexp: jax.Array,
        delta: jax.Array,
        words: jax.Array | None,
    ):
        if _is_partitioned(static, q, k, mask):
            return static.gradients(grad, q, k, v, mask, logsumexp, delta, wants_mask, words)
        used = delta if static.is_tiled(q, k, mask) else None
        return static.unsharded_gradients(grad, q, k, v, mask, logsumexp, used, wants_mask, words)

    blocks = functools.partial(gradients_in_blocks, static, wants_mask=wants_mask)
    return in_blocks(unsharded, blocks)(grad, q, k, v, mask, logsumexp, products(out, grad), words)


@lower("aten::_scaled_dot_product_flash_attention_for_cpu")
def _flash(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    if dropout_p:
        raise NotImplementedError(
            f"this attention operator drops no weights, but got dropout_p={dropout_p}; call "
            "torch.nn.functional.scaled_dot_product_attention, which does"
        )
    return _forward(q, k, v, attn_mask, is_causal, scale)


def _flash_gradient_shapes(
    grad: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    return tuple(None if grad is None else x.new_empty(x.shape) for x in (query, key, value))


@lower("aten::_scaled_dot_product_flash_attention_for_cpu_backward", meta=_flash_gradient_shapes)
def _flash_backward(
    grad: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: jax.Array | None = None,
    scale: float | None = None,
) -> tuple[jax.Array | None, ...]:
    """Without a gradient of the result, torch gives none of the operands either."""
    if grad is None:
        return None, None, None
    return _backward(grad, q, k, v, attn_mask, out, logsumexp, is_causal, scale, False)[:3]


def _efficient_shapes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor | None, ...]:
    """In row-major order, as the results of torch's products are."""
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    wider = torch.float64 if query.dtype == torch.float64 else torch.float32
    rate = kwargs["dropout_p"] if "dropout_p" in kwargs else [*args, 0.0, 0.0][2]
    words = query.new_empty((2,), dtype=torch.int32) if rate else None
    return out, query.new_empty(query.shape[:-1], dtype=wider), words, None


@lower(
    "aten::_scaled_dot_product_efficient_attention",
    meta=_efficient_shapes,
    random="dropout_p",
)
def _efficient(
    key: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attn_bias: jax.Array | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[jax.Array | None, ...]:
    """The same with a mask that may have a gradient, and with dropout.

    Where torch has a seed and an offset, this has the two words of dropout's key; None without it.
    """
    if key is None:
        return *_forward(q, k, v, attn_bias, is_causal, scale), None, None
    words = words_of(key)
    outputs = _forward(q, k, v, attn_bias, is_causal, scale, dropout_p, words)
    return *outputs, jax.lax.bitcast_convert_type(words, jnp.int32), None


def _efficient_gradient_shapes(
    grad: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    input_mask = kwargs["grad_input_mask"] if "grad_input_mask" in kwargs else args[5]
    inputs = (query, key, value, attn_bias)
    input_mask = [want and grad is not None for want in input_mask]
    return tuple(
        x.new_empty(x.shape) if want else None for x, want in zip(inputs, input_mask, strict=True)
    )


@lower("aten::_scaled_dot_product_efficient_attention_backward", meta=_efficient_gradient_shapes)
def _efficient_backward(
    grad: jax.Array | None,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attn_bias: jax.Array | None,
    out: jax.Array,
    logsumexp: jax.Array,
    philox_seed: jax.Array | Any,
    philox_offset: jax.Array | None,
    dropout_p: float,
    grad_input_mask: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[jax.Array | None, ...]:
    words = None
    if grad is None:
        return (None,) * 4
    if dropout_p:
        words = jax.lax.bitcast_convert_type(philox_seed, jnp.uint32)
    args = (grad, q, k, v, attn_bias, out, logsumexp, is_causal, scale)
    grads = _backward(*args, grad_input_mask[3], dropout_p, words)
    return tuple(x if want else None for x, want in zip(grads, grad_input_mask, strict=True))
