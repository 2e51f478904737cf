"""`scaled_dot_product_attention` as one operation, and its gradient as another.

The operators are two that torch has for it: the CPU's flash kernel, and the one called *efficient*,
which takes a mask with a gradient and any number of axes. Here both are the same computation;
`torch_bridge/attention.py` chooses between them.

Batch and heads stay axes of their own, so splitting either over a mesh needs no collective. With
fewer heads in key and value than in query (grouped queries), those of the query are taken as
`(heads of key, group)`, and nothing is repeated:

>>> q, k = jnp.ones((1, 4, 2, 8)), jnp.ones((1, 2, 3, 8))
>>> _scores(q, k, None, False, None).shape
(1, 2, 2, 2, 3)

The gradient computes the weights from query and key by the expressions of the forward operation.
Where both stand in one program, XLA computes them once and keeps the weights; otherwise nothing as
large as the weights is kept.

In a program that may split the sequence over devices, both are operators that see how their
operands lie when it is compiled (`isoshard.core.domain.attention.partitioned_attention`): split
sequences go round a ring, and nothing is gathered. Whether a sequence is split is decided by marks,
and by what comes before: XLA gathers tokens where one more is put before them, unless the result is
marked.

Dropout is that of the *efficient* operator, which gives the two words that the weights were dropped
by: what is dropped depends on them and on a weight's place, not on how anything lies, and the
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

from isoshard.core.domain.attention.dropout import gains, words_of
from isoshard.core.domain.attention.partitioned_attention import Attention
from isoshard.core.domain.attention.tiled import products, summed_to
from isoshard.core.domain.attention.uneven_attention import attend_in_blocks, gradients_in_blocks
from isoshard.core.domain.lifting.in_blocks import in_blocks

from .argument_forms import wide, wide_dtype
from .registry import lower
from .sequence_split import may_split


def _is_grouped(q: jax.Array, k: jax.Array) -> bool:
    return q.ndim > 2 and q.shape[-3] != k.shape[-3]


def _grouped(x: jax.Array, heads: int) -> jax.Array:
    """(.., heads * group, rows, columns) as (.., heads, group, rows, columns)."""
    return x.reshape(*x.shape[:-3], heads, x.shape[-3] // heads, *x.shape[-2:])


def _ungrouped(x: jax.Array) -> jax.Array:
    """(.., heads, group, rows, columns) as (.., heads * group, rows, columns)."""
    return x.reshape(*x.shape[:-4], x.shape[-4] * x.shape[-3], *x.shape[-2:])


def _grouped_mask(mask: jax.Array, heads: int) -> jax.Array:
    """A mask for the query's heads (or for all of them), in the axes of grouped scores."""
    if mask.ndim < 3:
        return mask
    return mask[..., None, :, :] if mask.shape[-3] == 1 else _grouped(mask, heads)


def _factor(q: jax.Array, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """An einsum that adds up halves in float32."""
    return jnp.einsum(axes, x, y, preferred_element_type=wide_dtype(x.dtype))


def _weighted(axes: str, weights: jax.Array, x: jax.Array) -> jax.Array:
    """A product with float32 weights, which accelerators multiply in the dtype of `x`.

    A CPU would compute it in float32 anyway, and rounding the weights first costs it time.
    """
    if weights.dtype == x.dtype:
        return _product(axes, weights, x)
    return jax.lax.platform_dependent(
        weights,
        x,
        cpu=lambda weights, x: _product(axes, weights, wide(x)),
        default=lambda weights, x: _product(axes, weights.astype(x.dtype), x),
    )


def _scores(
    q: jax.Array, k: jax.Array, mask: jax.Array | None, is_causal: bool, scale: float | None
) -> jax.Array:
    """Scaled products of queries and keys, minus infinity where masked; grouped if the heads are.

    The causal mask starts at the top left, as torch's does.
    """
    if _is_grouped(q, k):
        mask = None if mask is None else _grouped_mask(mask, k.shape[-3])
        scores = _product("...gle,...se->...gls", _grouped(q, k.shape[-3]), k)
    else:
        scores = _product("...le,...se->...ls", q, k)
    scores = scores * _factor(q, scale)
    if is_causal:
        row, column = (jax.lax.broadcasted_iota("int32", scores.shape[-2:], n) for n in (0, 1))
        scores = jnp.where(column <= row, scores, -jnp.inf)
    if mask is None:
        return scores
    if mask.dtype == bool:
        return jnp.where(mask, scores, -jnp.inf)
    return scores + mask.astype(scores.dtype)


def _softmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights, and the logarithm of the sum that they were divided by.

    Where a query may attend to nothing they are zeros and minus infinity.
    """
    top = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    top = jnp.where(top == -jnp.inf, 0, top)
    weights = jnp.exp(scores - top)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1, total), (top + jnp.log(total))[..., 0]


def _dropped(weights: jax.Array, gains: jax.Array | None) -> jax.Array:
    """Weights after dropout; the gains have one axis for all heads, weights may have two."""
    return weights if gains is None else weights * gains.reshape(weights.shape)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    gains: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """What each query attends to, and the logarithm of its sum of weights."""
    weights, logsumexp = _softmax(_scores(q, k, mask, is_causal, scale))
    weights = _dropped(weights, gains)
    if not _is_grouped(q, k):
        return _weighted("...ls,...se->...le", weights, v), logsumexp
    out = _weighted("...gls,...se->...gle", weights, v)
    return _ungrouped(out), logsumexp.reshape(q.shape[:-1])


def _gradients(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    gains: jax.Array | None = None,
    delta: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Gradients of query, key and value, and of the scores that a mask was added to.

    `delta`, the products of result and its gradient, is computed from the weights if not given.
    """
    weights = _softmax(_scores(q, k, mask, is_causal, scale))[0]
    grouped = _is_grouped(q, k)
    if grouped:
        q, grad = _grouped(q, k.shape[-3]), _grouped(grad, k.shape[-3])
    g, h = ("g", "h") if grouped else ("", "")
    slopes = _product(f"...{g}le,...se->...{g}ls", grad, v)
    slopes = weights * _dropped(slopes, gains)
    if delta is None:
        slopes = slopes - weights * jnp.sum(slopes, axis=-1, keepdims=True)
    else:
        delta = delta.reshape(weights.shape[:-1])
        slopes = slopes - weights * delta[..., None]
    factor = _factor(q, scale)
    of_q = _weighted(f"...{g}ls,...se->...{g}le", slopes, k) * factor
    of_k = _weighted(f"...{h}{g}ls,...{h}{g}le->...{h}se", slopes, q) * factor
    weights = _dropped(weights, gains)
    of_v = _weighted(f"...{h}{g}ls,...{h}{g}le->...{h}se", weights, grad)
    if grouped:
        return _ungrouped(of_q), of_k, of_v, _ungrouped(slopes)
    return of_q, of_k, of_v, slopes


def _told(q: jax.Array, is_causal: bool, scale: float | None, rate: float) -> Attention:
    factor = float(_factor(q, scale))
    return Attention(bool(is_causal), factor, _attend, _gradients, rate=float(rate))


def _forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    is_causal: bool,
    scale: float | None,
    rate: float = 0.0,
    words: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The result and the logarithm of its sums, round a ring if the sequence is split."""
    told = _told(q, is_causal, scale, rate)

    def whole(
        q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, words: jax.Array | None
    ):
        if may_split(q.shape, k.shape[-2]):
            return told(q, k, v, mask, words)
        each = gains(words, rate, (*q.shape[:-1], k.shape[-2]))
        out, logsumexp = _attend(q, k, v, mask, is_causal, scale, each)
        return out.astype(q.dtype), logsumexp

    return in_blocks(whole, functools.partial(attend_in_blocks, told))(q, k, v, mask, words)


def _backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None,
    out: jax.Array,
    logsumexp: jax.Array,
    is_causal: bool,
    scale: float | None,
    wants_mask: bool,
    rate: float = 0.0,
    words: jax.Array | None = None,
) -> tuple[jax.Array | None, ...]:
    """The gradients of query, key, value and mask; the last is None where it is not wanted."""
    told = _told(q, is_causal, scale, rate)

    def whole(
        grad: jax.Array,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        mask: jax.Array | Any,
        logsumexp: jax.Array,
        delta: jax.Array,
        words: jax.Array | None,
    ):
        if may_split(q.shape, k.shape[-2]):
            return told.gradients(grad, q, k, v, mask, logsumexp, delta, wants_mask, words)
        each = gains(words, rate, (*q.shape[:-1], k.shape[-2]))
        *found, slopes = _gradients(grad, q, k, v, mask, is_causal, scale, each)
        return *found, summed_to(slopes, mask.shape) if wants_mask else None

    blocks = functools.partial(gradients_in_blocks, told, wants_mask=wants_mask)
    return in_blocks(whole, blocks)(grad, q, k, v, mask, logsumexp, products(out, grad), words)


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
    found = _forward(q, k, v, attn_bias, is_causal, scale, dropout_p, words)
    return *found, jax.lax.bitcast_convert_type(words, jnp.int32), None


def _efficient_gradient_shapes(
    grad: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[torch.Tensor | None, ...]:
    wanted = kwargs["grad_input_mask"] if "grad_input_mask" in kwargs else args[5]
    given = (query, key, value, attn_bias)
    wanted = [want and grad is not None for want in wanted]
    return tuple(
        x.new_empty(x.shape) if want else None for x, want in zip(given, wanted, strict=True)
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
    given = (grad, q, k, v, attn_bias, out, logsumexp, is_causal, scale)
    found = _backward(*given, grad_input_mask[3], dropout_p, words)
    return tuple(x if want else None for x, want in zip(found, grad_input_mask, strict=True))
