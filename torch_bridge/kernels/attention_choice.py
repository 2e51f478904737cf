"""Which operator serves `scaled_dot_product_attention`: one, or torch's twenty.

torch makes it of products and a softmax where a device has no kernel of its own. The `jax` device
has: one entry of the tape forward and one backward (`lowerings/sdpa.py`). It is the CPU's flash
operator where CPU torch would call that, with the same strides and the same node in the graph, and
otherwise, where a mask requires a gradient, the value has another width or weights are dropped, the
*efficient* one.

>>> q = torch.ones(1, 2, 3, 4, device="jax", requires_grad=True)
>>> torch.nn.functional.scaled_dot_product_attention(q, q, q).grad_fn.name()
'ScaledDotProductFlashAttentionForCpuBackward0'

torch's products and softmax remain for what neither takes: `torch.func` transforms and
forward-mode differentiation, sizes of zero, operands that broadcast, mistakes (whose messages are
torch's), and `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`. So do gradients of gradients: with
`create_graph=True` the gradient is taken through them, and drops what the operator dropped.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.backends.cuda import (
    cudnn_sdp_enabled,
    flash_sdp_enabled,
    math_sdp_enabled,
    mem_efficient_sdp_enabled,
)

from isoshard.core.nn.dropout import gains
from isoshard.core.runtime.caches import PROGRAMS, Bounded, cached
from isoshard.torch_bridge._torch_internals.dispatcher import below_autograd
from isoshard.torch_bridge._torch_internals.tensor_fields import forward_levels
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.interop.calling_jax import torch_function


def _operator(name: str) -> Any:
    """An aten operator, None where this torch has none of the name."""
    return getattr(getattr(torch.ops.aten, name, None), "default", None)


_SOFTMAX = torch.ops.aten._safe_softmax.default
_ATTEND = torch.ops.aten.scaled_dot_product_attention.default
_FLASH = _operator("_scaled_dot_product_flash_attention_for_cpu")
_FLASH_BACKWARD = _operator("_scaled_dot_product_flash_attention_for_cpu_backward")
_EFFICIENT = _operator("_scaled_dot_product_efficient_attention")
_EFFICIENT_BACKWARD = _operator("_scaled_dot_product_efficient_attention_backward")

_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_CHOICES: Bounded[Any, tuple[bool, bool]] = Bounded(4096, "attention: chosen kernels")


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` on the `jax` device.

    Args:
        query: (.., heads, L, E); any float dtype.
        key: (.., heads, S, E), of the same dtype; fewer heads with `enable_gqa`.
        value: (.., heads, S, Ev), of the same dtype.
        attn_mask: broadcasts to (.., heads, L, S); bool (True attends), or a float that is added.
        dropout_p: probability of dropping a weight.
        is_causal: query `i` attends to keys `0..i`.
        scale: of the products; by default 1 / sqrt(E).
        enable_gqa: key and value may have fewer heads, each for a group of the query's.

    Returns:
        (.., heads, L, Ev), of the query's dtype.

    Raises:
        RuntimeError: the arguments do not fit together; torch's own message. Or
            `torch.nn.attention.sdpa_kernel` allows only backends that do not take them.
    """
    inputs = (query, key, value)
    if 0 <= dropout_p < 1 and _are_ours(*inputs, attn_mask) and forward_levels() < 0:
        flash, efficient = _choice(*inputs, attn_mask, is_causal, enable_gqa)
        if flash and not dropout_p and flash_sdp_enabled():
            return _FLASH(*inputs, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
        if efficient and mem_efficient_sdp_enabled():
            return _EFFICIENT(*inputs, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
        if (flash or efficient) and not math_sdp_enabled():
            _check_cudnn(flash, *inputs, attn_mask, dropout_p)
            return _FLASH(*inputs, 0.0, is_causal, scale=scale)[0]
    return _ATTEND.decompose(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _check_cudnn(flash: bool, query: Any, key: Any, value: Any, mask: Any, rate: float) -> None:
    """Raise for a call that no backend takes of those that `sdpa_kernel` allows."""
    reasons = []
    if flash_sdp_enabled():
        what = f"dropout_p={rate}" if flash else "this mask, or other widths of key and value"
        reasons.append(f"FLASH_ATTENTION does not take {what}")
    if mem_efficient_sdp_enabled():
        reasons.append("EFFICIENT_ATTENTION does not take attn_mask with is_causal")
    if cudnn_sdp_enabled():
        if (platform := jax.default_backend()) != "gpu":
            reasons.append(f"CUDNN_ATTENTION is for GPUs, and the devices are of {platform!r}")
        elif rate or mask is not None or query.dtype not in (torch.float16, torch.bfloat16):
            reasons.append(
                "CUDNN_ATTENTION takes float16 or bfloat16 without attn_mask and dropout, not "
                f"{query.dtype} with dropout_p={rate}"
            )
        elif flash:
            return
    raise RuntimeError(
        "scaled_dot_product_attention: no backend that torch.nn.attention.sdpa_kernel allows takes "
        f"this call on the jax device: {'; '.join(reasons) or 'it allows none'}. Allow "
        "EFFICIENT_ATTENTION or MATH as well."
    )


def _are_ours(query: Any, key: Any, value: Any, mask: Any) -> bool:
    """Whether all are tensors of this device, and none is a wrapper of such."""
    ours = lazy_tensor._CLASS
    return (
        type(query) is ours
        and type(key) is ours
        and type(value) is ours
        and (mask is None or type(mask) is ours)
    )


def _choice(query: Any, key: Any, value: Any, mask: Any, *flags: bool) -> tuple[bool, bool]:
    """Which of the two operators may be called; looked up once per combination."""
    about_mask = (None, False) if mask is None else (mask._aval, mask.requires_grad)
    seen = (query._aval, key._aval, value._aval, *about_mask, *flags)
    cached = _CHOICES.get(seen)
    if cached is None:
        cached = _CHOICES[seen] = _choose(query, key, value, mask, *flags)
    return cached


def _choose(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[bool, bool]:
    if not _fit(query, key, value, enable_gqa) or not _mask_fits(mask, query, key):
        return False, False
    if is_causal and mask is not None and not _masks_add_up():
        return False, False
    # The conditions of ATen/native/transformers/sdp_utils_cpp.cpp.
    flash = (
        _FLASH is not None
        and query.dim() == 4
        and query.shape[-1] == value.shape[-1]
        and all(x.stride(-1) == 1 for x in (query, key, value))
        and (mask is None or (mask.dim() in (2, 4) and not mask.requires_grad))
    )
    return flash, _EFFICIENT is not None and (mask is None or not is_causal)


@functools.cache
def _masks_add_up() -> bool:
    """Whether this torch takes a mask and `is_causal`, as 2.13 does and 2.15 does not."""
    unit_mask = torch.zeros(1, 1, 1, 1)
    try:
        torch.nn.functional.scaled_dot_product_attention(
            unit_mask, unit_mask, unit_mask, attn_mask=unit_mask, is_causal=True
        )
    except RuntimeError:
        return False
    return True


def _fit(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    """Whether dtypes and sizes are such that nothing broadcasts, is empty or is a mistake."""
    tensors = (query, key, value)
    rank, batch = query.dim(), -3 if enable_gqa else -2
    return (
        query.dtype in _DTYPES
        and {x.dtype for x in tensors} == {query.dtype}
        and rank >= -batch
        and {x.dim() for x in tensors} == {rank}
        and len({x.shape[:batch] for x in tensors}) == 1
        and query.shape[-1] == key.shape[-1]
        and key.shape[:-1] == value.shape[:-1]
        and all(x.numel() for x in tensors)
        and (not enable_gqa or query.shape[-3] % key.shape[-3] == 0)
    )


def _mask_fits(mask: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> bool:
    if mask is None:
        return True
    size = (*query.shape[:-1], key.shape[-2])
    tail = size[len(size) - mask.dim() :]
    return (
        mask.dtype in (torch.bool, torch.float32, query.dtype)
        and 2 <= mask.dim() <= len(size)
        and all(own in (1, extent) for own, extent in zip(mask.shape, tail, strict=True))
    )


def _flash_gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> Any:
    if torch.is_grad_enabled():
        tensors = (query, key, value, attn_mask)
        return _with_graph(grad_out, tensors, is_causal, scale)[:3]
    with below_autograd():
        return _FLASH_BACKWARD(
            grad_out,
            query,
            key,
            value,
            out,
            logsumexp,
            dropout_p,
            is_causal,
            attn_mask=attn_mask,
            scale=scale,
        )


def _efficient_gradients(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    philox_seed: torch.Tensor | None,
    philox_offset: torch.Tensor | None,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    if torch.is_grad_enabled():
        dropout = None if philox_seed is None else (dropout_p, philox_seed)
        return _with_graph(grad_out, (query, key, value, attn_bias), is_causal, scale, dropout)
    with below_autograd():
        return _EFFICIENT_BACKWARD(
            grad_out,
            query,
            key,
            value,
            attn_bias,
            out,
            logsumexp,
            philox_seed,
            philox_offset,
            dropout_p,
            grad_input_mask,
            is_causal,
            scale=scale,
        )


def _with_graph(
    grad: torch.Tensor,
    tensors: tuple[Any, ...],
    is_causal: bool,
    scale: float | None,
    dropout: tuple[float, torch.Tensor] | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of query, key, value and mask that have a graph, by torch's decomposition."""
    # Aliases: a tensor that is query and key at once has two gradients here.
    inputs: list[Any] = [None if x is None else x.view_as(x) for x in tensors]
    query, key, value, mask = inputs
    bias = mask
    if is_causal and mask is not None:
        size = (query.shape[-2], key.shape[-2])
        kept = torch.ones(size, dtype=torch.bool, device=query.device).tril()
        bias = mask & kept if mask.dtype == torch.bool else mask.masked_fill(~kept, -torch.inf)
        is_causal = False
    grouped = query.dim() > 2 and query.shape[-3] != key.shape[-3]
    if dropout is None:
        out = _ATTEND.decompose(
            query, key, value, bias, 0.0, is_causal, scale=scale, enable_gqa=grouped
        )
    else:
        factors = _gains(dropout[0], (*query.shape[:-1], key.shape[-2]))(dropout[1])
        out = _with_gains(query, key, value, bias, is_causal, scale, factors)
    differentiable = [x for x in inputs if x is not None and x.requires_grad]
    grads = iter(torch.autograd.grad(out, differentiable, grad, create_graph=True))
    return tuple([next(grads) if x is not None and x.requires_grad else None for x in inputs])


@cached(PROGRAMS)
def _gains(rate: float, shape: tuple[int, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What the *efficient* operator multiplied weights by, of the words that it gave."""
    return torch_function(
        lambda words: gains(jax.lax.bitcast_convert_type(words, jnp.uint32), rate, shape)
    )


def _with_gains(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    factors: torch.Tensor,
) -> torch.Tensor:
    """Attention as products and softmax, its weights multiplied by factors; in at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (query, key, value))
    if (group := math.prod(q.shape[-3:-2]) // math.prod(k.shape[-3:-2])) > 1:
        k, v = (x.repeat_interleave(group, -3) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        bias = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores = scores + bias
    return (_SOFTMAX(scores, -1) * factors.to(wide) @ v).to(query.dtype)


GRADIENTS: dict[str, Callable[..., Any]] = {
    "_scaled_dot_product_flash_attention_for_cpu_backward": _flash_gradients,
    "_scaled_dot_product_efficient_attention_backward": _efficient_gradients,
}
"""Gradients by operator, which can be differentiated: kernels for torch's autograd."""
