"""Normalisations, forward and backward.

All share one backward. With `y = (x - mean) * rstd` normalised over some axes and `g` the gradient
of `y`, the gradient of `x` is

    rstd * (g - average(g) - y * average(g * y))

where the averages run over those axes; the middle term is absent when no mean was subtracted, and
both are when the statistics are constants (batch norm in evaluation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from .argument_forms import lengths, wide
from .memory_order import format_of
from .numerics import averaged, wide_all
from .program_partition import partition
from .registry import lower


def _statistics(
    x: jax.Array, axes: Sequence[int], eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean and reciprocal standard deviation over `axes`, which stay as axes of size 1."""
    mean = averaged(x, axes, keepdims=True)
    variance = averaged(jnp.square(x - mean), axes, keepdims=True)
    return mean, variance, lax.rsqrt(variance + eps)


def _affine(y: jax.Array, weight: jax.Array | None, bias: jax.Array | None) -> jax.Array:
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def _input_gradient(
    g: jax.Array, y: jax.Array, rstd: jax.Array, axes: Sequence[int], *, centred: bool = True
) -> jax.Array:
    """See the module docstring."""
    g_y = jnp.mean(g * y, axis=axes, keepdims=True)
    g_mean = jnp.mean(g, axis=axes, keepdims=True) if centred else 0
    return rstd * (g - g_mean - y * g_y)


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
    mean, _, rstd = _statistics(x, axes, eps)
    return _affine((x - mean) * rstd, weight, bias), mean, rstd


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
        _input_gradient(_affine(grad, weight, None), y, rstd, axes) if output_mask[0] else None,
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
    rstd = lax.rsqrt(averaged(jnp.square(x), axes, keepdims=True) + eps)
    return _affine(x * rstd, weight, None), rstd


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
    y, g = x * rstd, _affine(grad, weight, None)
    return (
        _input_gradient(g, y, rstd, axes, centred=False) if output_mask[0] else None,
        _sum_to(grad * y, outer, weight) if output_mask[1] else None,
    )


# Group norm. Channels are split into (group, channel in group); other axes stay as they are, so
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
    mean, _, rstd = _statistics(split, tuple(range(2, split.ndim)), eps)
    scale, shift = (_per_channel(p, group, x.ndim) for p in (weight, bias))
    out = _affine((split - mean) * rstd, scale, shift)
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
    wanted = zip(shapes, output_mask, strict=True)
    return tuple(x.new_empty(shape) if asked else None for shape, asked in wanted)


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
    g = _affine(grad, _per_channel(weight, group, x.ndim), None)
    of_weight = jnp.sum(grad * y, axis=rest).reshape(c)
    if not hxw and n:  # the mean of nothing is NaN
        of_weight = jnp.full_like(of_weight, jnp.nan)
    return (
        _input_gradient(g, y, rstd, axes).reshape(shape) if output_mask[0] else None,
        of_weight if output_mask[1] else None,
        jnp.sum(grad, axis=rest).reshape(c) if output_mask[2] else None,
    )


# Batch norm


def _channel(parameter: jax.Array | None, ndim: int) -> Any:
    """A parameter of shape (C,) in the shape that broadcasts with (N, C, ..)."""
    return None if parameter is None else parameter.reshape(-1, *(1,) * (ndim - 2))


def _batch_statistics(
    x: jax.Array, axes: Sequence[int], eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `_statistics`; where devices share a batch, with one collective instead of two.

    Each device has mean and variance of its part, and all of them make those of the whole (Chan,
    Golub and LeVeque, 1983). As torch's, and unlike a mean of squares, nothing cancels.
    """
    mesh, images, _ = partition()
    if mesh is None or images or not x.size or x.shape[0] % mesh.size:
        return _statistics(x, axes, eps)
    x = x.reshape(mesh.size, -1, *x.shape[1:])
    mean, variance, _ = _statistics(x, tuple(axis + 1 for axis in axes), eps)
    everywhere = NamedSharding(mesh, P(None, None, *(P.UNCONSTRAINED,) * (x.ndim - 1)))
    both = lax.with_sharding_constraint(jnp.stack([mean, variance]), everywhere)
    means, variances = both[0], both[1]
    mean = averaged(means, (0,))
    variance = averaged(variances + jnp.square(means - mean), (0,))
    return mean, variance, lax.rsqrt(variance + eps)


def _batch_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    training: bool,
    momentum: jax.Array | float,
    eps: float,
) -> tuple[Any, ...]:
    """Result, saved mean, saved reciprocal deviation, new running mean, new running variance."""
    x, weight, bias = wide_all(x, weight, bias)
    axes = (0, *range(2, x.ndim))
    scale, shift = _channel(weight, x.ndim), _channel(bias, x.ndim)
    if not training:
        mean, variance = wide_all(running_mean, running_var)
        rstd = lax.rsqrt(variance + eps)
        y = (x - _channel(mean, x.ndim)) * _channel(rstd, x.ndim)
        unsaved = jnp.zeros((0,), x.dtype)
        return _affine(y, scale, shift), unsaved, unsaved, running_mean, running_var
    mean, variance, rstd = _batch_statistics(x, axes, eps)
    out = _affine(x - mean, rstd if scale is None else rstd * scale, shift)
    mean, variance, rstd = (a.reshape(-1) for a in (mean, variance, rstd))
    count = x.size // max(mean.size, 1)
    unbiased = variance * (count / max(count - 1, 1))
    return (
        out,
        mean,
        rstd,
        _moved(running_mean, mean, momentum),
        _moved(running_var, unbiased, momentum),
    )


def _moved(
    running: jax.Array | None, fresh: jax.Array, momentum: jax.Array | float
) -> jax.Array | None:
    """The running statistic after one step towards `fresh`."""
    return None if running is None else (1 - momentum) * running + momentum * fresh


def _meta(op: Any) -> Callable[..., Any]:
    """As torch infers, but nothing is saved in evaluation, as on the CPU."""

    def meta(
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        *options: bool | float,
    ) -> tuple[Any, ...]:
        results = list(op(x, weight, bias, running_mean, running_var, *options))
        results[0] = results[0].contiguous(memory_format=format_of(x) or torch.contiguous_format)
        trains = options[0] if len(options) == 3 else "with_update" in op.name()
        if not trains:
            results[1:3] = [saved.new_empty((0,)) for saved in results[1:3]]
        return tuple(results)

    return meta


def _lower_batch_norm(
    name: str, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a batch norm that takes running statistics."""
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
    return lower(f"aten::{name}", meta=_meta(op), **options)


_UPDATES = {"writes": ("running_mean", "running_var"), "lift": ("momentum",)}


@_lower_batch_norm("native_batch_norm", **_UPDATES)
@_lower_batch_norm("_native_batch_norm_legit", **_UPDATES)
def _native_batch_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    training: bool,
    momentum: jax.Array | float,
    eps: float,
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@_lower_batch_norm("_native_batch_norm_legit_functional", lift=("momentum",))
def _functional_batch_norm(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    training: bool,
    momentum: jax.Array | float,
    eps: float,
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@lower("aten::_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    training: bool,
    momentum: jax.Array | float,
    eps: float,
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, None, None, True, momentum, eps)[:3]


@_lower_batch_norm("_native_batch_norm_legit_no_training")
def _batch_norm_no_training(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: jax.Array | float,
    eps: float,
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


def _reserve() -> jax.Array:
    """The scratch space of other backends' batch norm: always empty here."""
    return jnp.zeros((0,), "uint8")


@_lower_batch_norm("_batch_norm_no_update")
def _batch_norm_no_update(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    momentum: jax.Array | float,
    eps: float,
) -> tuple[Any, ...]:
    got = _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)
    return (*got[:3], _reserve())


@_lower_batch_norm("_batch_norm_with_update", **_UPDATES)
def _batch_norm_with_update(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: jax.Array | float,
    eps: float,
) -> tuple[Any, ...]:
    got = _batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    return (*got[:3], _reserve(), *got[3:])


@_lower_batch_norm("_batch_norm_with_update_functional", lift=("momentum",))
def _batch_norm_with_update_functional(
    x: jax.Array,
    weight: jax.Array | None,
    bias: jax.Array | None,
    running_mean: jax.Array,
    running_var: jax.Array,
    momentum: jax.Array | float,
    eps: float,
) -> tuple[Any, ...]:
    return _batch_norm_with_update(x, weight, bias, running_mean, running_var, momentum, eps)


@lower("aten::native_batch_norm_backward")
def _batch_norm_backward(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array | None,
    running_mean: jax.Array | None,
    running_var: jax.Array | Any,
    save_mean: jax.Array | None,
    save_invstd: jax.Array | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, ...]:
    if train:
        mean, rstd = save_mean, save_invstd
    else:
        mean, rstd = running_mean, lax.rsqrt(wide(running_var) + eps)
    grad, x, weight, mean, rstd = wide_all(grad, x, weight, mean, rstd)
    axes = (0, *range(2, x.ndim))
    mean, rstd, scale = (_channel(a, x.ndim) for a in (mean, rstd, weight))
    y = (x - mean) * rstd
    of_weight, of_bias = jnp.sum(grad * y, axis=axes), jnp.sum(grad, axis=axes)
    of_x = grad
    if train:
        count = lengths(x.shape, axes)
        of_x = grad - _channel(of_bias / count, x.ndim) - y * _channel(of_weight / count, x.ndim)
    return (  # torch promises the first result whatever the mask
        of_x * (rstd if scale is None else rstd * scale),
        of_weight if output_mask[1] else None,
        of_bias if output_mask[2] else None,
    )


@lower("aten::batch_norm_backward")
def _batch_norm_backward_with_reserve(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    running_mean: jax.Array | None,
    running_var: jax.Array | None,
    save_mean: jax.Array | None,
    save_var: jax.Array | None,
    update: bool,
    eps: float,
    mask: Sequence[bool],
    reserve: jax.Array,
) -> tuple[jax.Array | None, ...]:
    return _batch_norm_backward(
        grad, x, weight, running_mean, running_var, save_mean, save_var, update, eps, mask
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
