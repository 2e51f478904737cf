"""Layer, root mean square, group and weight norm, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from isoshard.core.nn.normalization import affine, input_gradient, reciprocal_rms, statistics

from .argument_forms import wide, wide_all
from .registry import lower


def _sum_to(x: jax.Array, axes: Sequence[int], like: jax.Array | None) -> jax.Array | None:
    """Sum over `axes`, in the shape of a parameter; None for a parameter that is absent."""
    return None if like is None else jnp.sum(x, axis=axes).reshape(like.shape)


# Layer norm


@lower("aten::native_layer_norm")
def _layer_norm(
    x: jax.Array,
    normalized_shape: Sequence[int],
    weight: jax.Array | None,
    bias: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, weight, bias = wide_all(x, weight, bias)
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    mean, _, rstd = statistics(x, axes, eps)
    return affine((x - mean) * rstd, weight, bias), mean, rstd


@lower("aten::native_layer_norm_backward")
def _layer_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    grad, x, mean, rstd, weight, bias = wide_all(grad, x, mean, rstd, weight, bias)
    inner = x.ndim - len(normalized_shape)
    outer, axes = tuple(range(inner)), tuple(range(inner, x.ndim))
    y = (x - mean) * rstd
    return (
        input_gradient(affine(grad, weight, None), y, rstd, axes) if output_mask[0] else None,
        _sum_to(grad * y, outer, weight) if output_mask[1] else None,
        _sum_to(grad, outer, bias) if output_mask[2] else None,
    )


# RMS norm


@lower("aten::_fused_rms_norm")
def _rms_norm(
    x: jax.Array, normalized_shape: Sequence[int], weight: jax.Array | None, eps: float | None
) -> tuple[jax.Array, jax.Array]:
    if eps is None:
        eps = float(jnp.finfo(wide(x).dtype).eps)
    x, weight = wide_all(x, weight)
    axes = tuple(range(x.ndim - len(normalized_shape), x.ndim))
    rstd = reciprocal_rms(x, axes, eps)
    return affine(x * rstd, weight, None), rstd


@lower("aten::_fused_rms_norm_backward")
def _rms_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    normalized_shape: Sequence[int],
    rstd: jax.Array,
    weight: jax.Array | None,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    grad, x, rstd, weight = wide_all(grad, x, rstd, weight)
    inner = x.ndim - len(normalized_shape)
    outer, axes = tuple(range(inner)), tuple(range(inner, x.ndim))
    y, g = x * rstd, affine(grad, weight, None)
    return (
        input_gradient(g, y, rstd, axes, centred=False) if output_mask[0] else None,
        _sum_to(grad * y, outer, weight) if output_mask[1] else None,
    )


# Group norm. Channels are split into (group, channel in group); other axes are unchanged, so
# that a batch or an image sharded over devices remains so.


def _split_channels(x: jax.Array, n: int, c: int, group: int) -> jax.Array:
    return x.reshape(n, group, c // group, *x.shape[2:])


def _per_channel(parameter: jax.Array | None, group: int, ndim: int) -> jax.Array | None:
    """A parameter of shape (C,) in the shape that broadcasts with split channels."""
    if parameter is None:
        return None
    return parameter.reshape(1, group, parameter.size // group, *(1,) * (ndim - 2))


@lower("aten::native_group_norm")
def _group_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    shape = x.shape
    x, weight, bias = wide_all(x, weight, bias)
    split = _split_channels(x, n, c, group)
    mean, _, rstd = statistics(split, tuple(range(2, split.ndim)), eps)
    scale, shift = (_per_channel(p, group, x.ndim) for p in (weight, bias))
    out = affine((split - mean) * rstd, scale, shift)
    return out.reshape(shape), mean.reshape(n, group), rstd.reshape(n, group)


def _group_norm_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """As torch infers, but its decomposition divides by the pixels of an image, which may be 0."""
    if hxw:
        infer = torch.ops.aten.native_group_norm_backward
        return infer(grad, x, mean, rstd, weight, n, c, hxw, group, output_mask)
    shapes = (x.shape, (c,), (c,))
    masked_shapes = zip(shapes, output_mask, strict=True)
    return tuple(x.new_empty(shape) if required else None for shape, required in masked_shapes)


@lower("aten::native_group_norm_backward", meta=_group_norm_gradients)
def _group_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: jax.Array | None,
    n: int,
    c: int,
    hxw: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    shape = x.shape
    grad, x, mean, rstd, weight = wide_all(grad, x, mean, rstd, weight)
    split, grad = (_split_channels(a, n, c, group) for a in (x, grad))
    mean, rstd = (a.reshape(n, group, *(1,) * (split.ndim - 2)) for a in (mean, rstd))
    y = (split - mean) * rstd
    axes, rest = tuple(range(2, split.ndim)), (0, *range(3, split.ndim))
    g = affine(grad, _per_channel(weight, group, x.ndim), None)
    of_weight = jnp.sum(grad * y, axis=rest).reshape(c)
    if not hxw and n:  # the mean of nothing is NaN
        of_weight = jnp.full_like(of_weight, jnp.nan)
    return (
        input_gradient(g, y, rstd, axes).reshape(shape) if output_mask[0] else None,
        of_weight if output_mask[1] else None,
        jnp.sum(grad, axis=rest).reshape(c) if output_mask[2] else None,
    )


# Weight norm


def _norm_except(v: jax.Array, dim: int) -> jax.Array:
    axes = tuple(d for d in range(v.ndim) if d != dim % v.ndim)
    return jnp.sqrt(jnp.sum(jnp.square(v), axis=axes, keepdims=True))


@lower("aten::_weight_norm_interface")
def _weight_norm(v: jax.Array, g: jax.Array, dim: int = 0) -> tuple[jax.Array, jax.Array]:
    v, g = wide_all(v, g)
    norm = _norm_except(v, dim)
    return v * (g / norm), norm


@lower("aten::_weight_norm_interface_backward")
def _weight_norm_backward(
    grad: jax.Array, v: jax.Array, g: jax.Array, norms: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    grad, v, g, norms = wide_all(grad, v, g, norms)
    axes = tuple(d for d in range(v.ndim) if d != dim % v.ndim)
    along = jnp.sum(grad * v, axis=axes, keepdims=True)
    return g / norms * (grad - v * (along / jnp.square(norms))), along / norms
