"""Batch norm, forward and backward, under each of the names that aten has for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.nn.convolution import on_channel_axis
from isoshard.core.nn.normalization import affine, statistics
from isoshard.core.nn.precision import averaged

from .argument_forms import lengths, wide, wide_all
from .memory_order import format_of
from .program_partition import partition
from .registry import lower


def _channel(parameter: jax.Array | None, ndim: int) -> Any:
    """A parameter of shape (C,) in the shape that broadcasts with (N, C, ..)."""
    return None if parameter is None else on_channel_axis(parameter, ndim - 2)


def _batch_statistics(
    x: jax.Array, axes: Sequence[int], eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `statistics`; where devices share a batch, with one collective instead of two.

    Mean and variance of the shards are combined to those of the batch (Chan,
    Golub and LeVeque, 1983). As torch's, and unlike a mean of squares, nothing cancels.
    """
    mesh, images, *_ = partition()
    if mesh is None or images or not x.size or x.shape[0] % mesh.size:
        return statistics(x, axes, eps)
    x = x.reshape(mesh.size, -1, *x.shape[1:])
    mean, variance, _ = statistics(x, tuple(axis + 1 for axis in axes), eps)
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
        return affine(y, scale, shift), unsaved, unsaved, running_mean, running_var
    mean, variance, rstd = _batch_statistics(x, axes, eps)
    out = affine(x - mean, rstd if scale is None else rstd * scale, shift)
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


for _name in ("native_batch_norm", "_native_batch_norm_legit"):
    _lower_batch_norm(_name, **_UPDATES)(_batch_norm)
_lower_batch_norm("_native_batch_norm_legit_functional", lift=("momentum",))(_batch_norm)


@lower("aten::_native_batch_norm_legit.no_stats")
def _batch_norm_without_statistics(
    x: jax.Array, weight: jax.Array | None, bias: jax.Array | None, training: bool, *options: Any
) -> tuple[Any, ...]:
    return _batch_norm(x, weight, bias, None, None, True, *options)[:3]


def _by_name(training: bool, *args: Any) -> tuple[Any, ...]:
    """`_batch_norm`, whose operator's name determines whether it trains."""
    x, weight, bias, running_mean, running_var, momentum, eps = args
    return _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)


@_lower_batch_norm("_native_batch_norm_legit_no_training")
def _batch_norm_no_training(*args: Any) -> tuple[Any, ...]:
    return _by_name(False, *args)[:3]


def _reserve() -> jax.Array:
    """The scratch space of other backends' batch norm: always empty here."""
    return jnp.zeros((0,), "uint8")


@_lower_batch_norm("_batch_norm_no_update")
def _batch_norm_no_update(*args: Any) -> tuple[Any, ...]:
    return (*_by_name(False, *args)[:3], _reserve())


@_lower_batch_norm("_batch_norm_with_update", **_UPDATES)
@_lower_batch_norm("_batch_norm_with_update_functional", lift=("momentum",))
def _batch_norm_with_update(*args: Any) -> tuple[Any, ...]:
    out = _by_name(True, *args)
    return (*out[:3], _reserve(), *out[3:])


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
def _batch_norm_backward_with_reserve(*args: Any) -> tuple[jax.Array | None, ...]:
    return _batch_norm_backward(*args[:-1])
