"""Rounding to what quantization will keep, and products with packed weights.

>>> fake_quantize(jnp.array([0.26, 9.0]), 0.5, 0, -8, 7)
(Array([0.5, 3.5], dtype=float32), Array([ True, False], dtype=bool))
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from .registry import lower


@lower("aten::_weight_int8pack_mm")
def weight_int8_mm(x: jax.Array, weight: jax.Array, scales: jax.Array) -> jax.Array:
    """`x @ weight.T` of 8-bit rows that each have a scale, summed in float32."""
    columns = weight.astype(jnp.float32).T
    product = jnp.matmul(x.astype(jnp.float32), columns, precision=jax.lax.Precision.HIGHEST)
    return product * scales.astype(jnp.float32)


def _fake_quantize_shapes(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of all fake quantizations: of the input's dtype, and the mask."""
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@lower(
    "aten::fake_quantize_per_tensor_affine_cachemask", lift=("scale",), meta=_fake_quantize_shapes
)
def fake_quantize(
    x: jax.Array, scale: Any, zero_point: Any, quant_min: int, quant_max: int
) -> tuple[jax.Array, jax.Array]:
    """Numbers on a grid of integers times `scale`, and which were inside; the gradient's mask."""
    quantized, scale = _on_grid(x, scale, zero_point)
    inside = (quant_min <= quantized) & (quantized <= quant_max)
    quantized = jnp.clip(
        jnp.where(jnp.isnan(quantized), quant_min, quantized), quant_min, quant_max
    )
    return _off_grid(quantized, scale, zero_point), inside


@lower(
    "aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams", meta=_fake_quantize_shapes
)
def fake_quantize_by_tensors(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    fake_quant_enabled: jax.Array,
    quant_min: int,
    quant_max: int,
) -> tuple[jax.Array, jax.Array]:
    """The same where `fake_quant_enabled` is not 0; elsewhere values are unchanged."""
    quantized, inside = fake_quantize(
        x, scale.reshape(()), zero_point.reshape(()), quant_min, quant_max
    )
    enabled = fake_quant_enabled.reshape(()) != 0
    return jnp.where(enabled, quantized, x.astype(quantized.dtype)), inside | ~enabled


@lower("aten::fake_quantize_per_channel_affine_cachemask", meta=_fake_quantize_shapes)
def fake_quantize_channels(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    axis: int,
    quant_min: int,
    quant_max: int,
) -> tuple[jax.Array, jax.Array]:
    """The same with a scale and a zero point for each index along an axis.

    What does not fit in 64 bits is the least integer, as on CPUs.
    """
    shape = [1] * x.ndim
    shape[axis] = -1
    scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    quantized, scale = _on_grid(x, scale, zero_point)
    quantized = jnp.where(
        (quantized >= -(2.0**63)) & (quantized < 2.0**63), jnp.trunc(quantized), -jnp.inf
    )
    inside = (quant_min <= quantized) & (quantized <= quant_max)
    return _off_grid(jnp.clip(quantized, quant_min, quant_max), scale, zero_point), inside


def _on_grid(x: jax.Array, scale: Any, zero_point: Any) -> tuple[jax.Array, jax.Array]:
    """The nearest numbers of the grid, and its scale, which has 32 bits in torch."""
    scale = jnp.asarray(scale).astype(jnp.float32)
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    rounded = jnp.round(x * (1 / scale).astype(x.dtype))
    return rounded + jnp.asarray(zero_point).astype(x.dtype), scale


def _off_grid(quantized: jax.Array, scale: jax.Array, zero_point: Any) -> jax.Array:
    return (quantized - jnp.asarray(zero_point).astype(quantized.dtype)).astype(jnp.float32) * scale


def _learned(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _learned_backward(
    cotangent: torch.Tensor, x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The shapes, for which torch has no meta kernel."""
    return torch.empty_like(x), torch.empty_like(scale), torch.empty_like(zero_point)


@lower("aten::_fake_quantize_learnable_per_tensor_affine", meta=_learned)
def fake_quantize_learned(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> jax.Array:
    """`fake_quantize` with a scale and a zero point that are trained, each of one element."""
    zero_point = jnp.clip(jnp.round(zero_point.reshape(())), quant_min, quant_max)
    return fake_quantize(x, scale.reshape(()), zero_point, quant_min, quant_max)[0]


@lower("aten::_fake_quantize_learnable_per_channel_affine", meta=_learned)
def fake_quantize_learned_channels(
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> jax.Array:
    """The same with a scale and a zero point for each index along an axis."""
    zero_point = jnp.clip(jnp.round(zero_point), quant_min, quant_max)
    return fake_quantize_channels(x, scale, zero_point, axis, quant_min, quant_max)[0]


@lower("aten::_fake_quantize_learnable_per_tensor_affine_backward", meta=_learned_backward)
def fake_quantize_learned_backward(
    cotangent: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cotangents of `x`, the scale and the zero point: learned step size quantization.

    Source: https://arxiv.org/abs/1902.08153, equation 3, and its counterpart for the zero point.
    """
    # Half rounds to even forward, and towards zero from half above here, as in torch.
    point = jnp.trunc(jnp.clip(zero_point.reshape(()) + 0.5, quant_min, quant_max))
    terms = _learned_terms(cotangent, x, scale.reshape(()), point, quant_min, quant_max)
    of_x, of_scale, of_point = terms
    return (
        of_x,
        (jnp.sum(of_scale) * grad_factor).reshape(1),
        (jnp.sum(of_point) * grad_factor).reshape(1),
    )


@lower("aten::_fake_quantize_learnable_per_channel_affine_backward", meta=_learned_backward)
def fake_quantize_learned_channels_backward(
    cotangent: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    axis: int,
    quant_min: int,
    quant_max: int,
    grad_factor: float = 1.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same, where all indices along an axis have a scale and a zero point of their own."""
    shape = [1] * x.ndim
    shape[axis] = -1
    point = jnp.clip(jnp.round(zero_point), quant_min, quant_max).reshape(shape)
    terms = _learned_terms(cotangent, x, scale.reshape(shape), point, quant_min, quant_max)
    of_x, of_scale, of_point = terms
    others = tuple(other for other in range(x.ndim) if other != axis % x.ndim)
    return (
        of_x,
        jnp.sum(of_scale, axis=others) * grad_factor,
        jnp.sum(of_point, axis=others) * grad_factor,
    )


def _learned_terms(
    cotangent: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array,
    quant_min: int,
    quant_max: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What each element adds to the cotangents of `x`, the scale and the zero point."""
    quantized = jnp.round(x * (1 / scale) + zero_point)  # torch rounds the sum here
    clipped = jnp.clip(quantized, quant_min, quant_max)
    inside = (quant_min <= quantized) & (quantized <= quant_max)
    rounding = (_off_grid(clipped, scale, zero_point) - x) / scale
    by_scale = jnp.where(inside, rounding, clipped - zero_point)
    by_point = jnp.where(inside, jnp.zeros_like(scale), -scale)
    return cotangent * inside, cotangent * by_scale, cotangent * by_point
