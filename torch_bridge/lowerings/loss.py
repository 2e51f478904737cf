"""Losses, forward and backward.

Elementwise losses share one shape: a formula per element, then torch's reduction, whose code is
0 for none, 1 for mean, 2 for sum. Their backward multiplies its derivative by the incoming
gradient and, for a mean, by one over the number of elements.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.nn.precision import averaged

from .argument_forms import wide, wide_all
from .registry import lower
from .vjp import pull_back

_NONE, _MEAN, _SUM = 0, 1, 2
_LOG_FLOOR = -100.0  # binary_cross_entropy clamps its logarithms here
_DERIVATIVE_FLOOR = 1e-12  # and the denominator of its gradient here


def _reduce(x: jax.Array, reduction: int) -> jax.Array:
    if reduction == _MEAN:
        return averaged(x)
    return jnp.sum(x) if reduction == _SUM else x


def _spread(grad: jax.Array, derivative: jax.Array, reduction: int) -> jax.Array:
    """The gradient of an elementwise loss from its derivative per element."""
    scaled = derivative * grad
    return scaled / derivative.size if reduction == _MEAN and derivative.size else scaled


# Elementwise


@lower("aten::mse_loss", promote="inputs")
def _mse(x: jax.Array, target: jax.Array, reduction: int = _MEAN) -> jax.Array:
    return _reduce(jnp.square(wide(x) - wide(target)), reduction)


@lower("aten::mse_loss_backward", promote="inputs")
def _mse_backward(grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int) -> jax.Array:
    grad, x, target = wide_all(grad, x, target)
    return _spread(grad, 2 * (x - target), reduction)


@lower("aten::smooth_l1_loss")
def _smooth_l1(
    x: jax.Array, target: jax.Array, reduction: int = _MEAN, beta: float = 1.0
) -> jax.Array:
    x, target = wide_all(x, target)
    gap = jnp.abs(x - target)
    if beta == 0:
        return _reduce(gap, reduction)
    near = 0.5 * jnp.square(gap) / beta
    return _reduce(jnp.where(gap < beta, near, gap - 0.5 * beta), reduction)


@lower("aten::smooth_l1_loss_backward")
def _smooth_l1_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, beta: float
) -> jax.Array:
    grad, x, target = wide_all(grad, x, target)
    gap = x - target
    near = gap / beta if beta else gap
    derivative = jnp.where(gap <= -beta, -1.0, jnp.where(gap >= beta, 1.0, near)).astype(gap.dtype)
    return _spread(grad, derivative, reduction)


def _like_scores(
    x: torch.Tensor, target: torch.Tensor, reduction: int = _MEAN, *_: Any
) -> torch.Tensor:
    """Two losses have the dtype of their first argument in torch's kernels."""
    if reduction:
        return torch.empty((), dtype=x.dtype, device="meta")
    each = torch.add(x, target)
    return torch.empty_strided(each.shape, each.stride(), dtype=x.dtype, device="meta")


@lower("aten::huber_loss", meta=_like_scores)
def _huber(
    x: jax.Array, target: jax.Array, reduction: int = _MEAN, delta: float = 1.0
) -> jax.Array:
    x, target = wide_all(x, target)
    gap = jnp.abs(x - target)
    loss = jnp.where(gap < delta, 0.5 * jnp.square(gap), delta * (gap - 0.5 * delta))
    return _reduce(loss, reduction)


@lower("aten::huber_loss_backward")
def _huber_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, delta: float
) -> jax.Array:
    grad, x, target = wide_all(grad, x, target)
    return _spread(grad, jnp.clip(x - target, -delta, delta), reduction)


@lower("aten::binary_cross_entropy")
def _bce(
    x: jax.Array, target: jax.Array, weight: jax.Array | None = None, reduction: int = _MEAN
) -> jax.Array:
    x, target, weight = wide_all(x, target, weight)
    negative = jnp.maximum(jnp.log1p(-x), _LOG_FLOOR)
    positive = jnp.maximum(jnp.log(x), _LOG_FLOOR)
    loss = (target - 1) * negative - target * positive
    return _reduce(loss if weight is None else loss * weight, reduction)


@lower("aten::binary_cross_entropy_backward")
def _bce_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    grad, x, target, weight = wide_all(grad, x, target, weight)
    derivative = (x - target) / jnp.maximum((1 - x) * x, _DERIVATIVE_FLOOR)
    return _spread(grad, derivative if weight is None else derivative * weight, reduction)


@lower("aten::binary_cross_entropy_with_logits")
def _bce_with_logits(
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None = None,
    pos_weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    x, target, weight, pos_weight = wide_all(x, target, weight, pos_weight)
    softplus = jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(-x, 0)
    if pos_weight is not None:
        softplus = softplus * (1 + (pos_weight - 1) * target)
    loss = (1 - target) * x + softplus
    return _reduce(loss if weight is None else loss * weight, reduction)


@lower("aten::soft_margin_loss", meta=_like_scores)
def _soft_margin(x: jax.Array, target: jax.Array, reduction: int = _MEAN) -> jax.Array:
    x, target = wide_all(x, target)
    return _reduce(jnp.log1p(jnp.exp(-target * x)), reduction)


@lower("aten::soft_margin_loss_backward")
def _soft_margin_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int
) -> jax.Array:
    grad, x, target = wide_all(grad, x, target)
    return _spread(grad, -target * jax.nn.sigmoid(-target * x), reduction)


# Negative log likelihood. `axis` is the class axis: 1 of a batch, 0 of a single sample.


def _class_axis(x: jax.Array) -> int:
    return 0 if x.ndim == 1 else 1


def _target_weight(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """A class per target that is surely in range, and the weight of each target (0: ignored)."""
    counted = target != ignore_index
    safe = jnp.where(counted, target, jnp.zeros_like(target))
    weights = jnp.ones(target.shape, x.dtype) if weight is None else jnp.take(weight, safe, axis=0)
    return safe, jnp.where(counted, weights, jnp.zeros_like(weights))


@lower("aten::nll_loss_forward", "aten::nll_loss2d_forward")
def _nll(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    x, weight = wide_all(x, weight)
    axis = _class_axis(x)
    safe, factor = _target_weight(x, target, weight, ignore_index)
    chosen = jnp.take_along_axis(x, jnp.expand_dims(safe, axis), axis=axis).squeeze(axis)
    loss = jnp.where(factor == 0, jnp.zeros_like(chosen), -chosen * factor)
    if reduction == _NONE:
        return loss, jnp.zeros((), x.dtype)
    total, weights = jnp.sum(loss), jnp.sum(factor)
    return (total / weights if reduction == _MEAN else total), weights


@lower("aten::nll_loss_backward", "aten::nll_loss2d_backward")
def _nll_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> jax.Array:
    """Minus the weight at the target class and 0 elsewhere, written without a scatter."""
    grad, x, weight, total_weight = wide_all(grad, x, weight, total_weight)
    axis = _class_axis(x)
    safe, factor = _target_weight(x, target, weight, ignore_index)
    if reduction == _MEAN:
        grad = grad / total_weight
    grad_target = jnp.where(factor == 0, jnp.zeros_like(factor), -grad * factor)
    classes = jax.lax.broadcasted_iota(target.dtype, x.shape, axis)
    hit = classes == jnp.expand_dims(safe, axis)
    return jnp.where(hit, jnp.expand_dims(grad_target, axis), jnp.zeros_like(x))


# Margin losses over classes


def _rows(x: jax.Array) -> jax.Array:
    """A single sample as a batch of one."""
    return x[None] if x.ndim == 1 else x.reshape(1, 1) if x.ndim == 0 else x


def _hinge_sums(
    x: jax.Array, target: jax.Array, p: float, margin: float, weight: jax.Array | None
) -> jax.Array:
    """Per row, the mean over other classes j of max(0, margin - x[target] + x[j]) ** p.

    A single sample is a batch of one, also in the shape that torch promises for its result.
    """
    chosen = jnp.take_along_axis(x, target[:, None], axis=1)
    gap = margin - chosen + x
    others = jnp.arange(x.shape[1])[None] != target[:, None]
    hinge = jnp.where((gap > 0) & others, gap, jnp.zeros_like(gap)) ** int(p)
    if weight is not None:
        hinge = hinge * jnp.take(weight, target, axis=0)[:, None]
    return jnp.sum(hinge, axis=1) / x.shape[1]


def _margin_shape(
    x: torch.Tensor,
    target: torch.Tensor,
    p: float = 1,
    margin: float = 1,
    weight: torch.Tensor | None = None,
    reduction: int = _MEAN,
) -> torch.Tensor:
    """One row with one class gives a 0-d result, as the CPU kernel does."""
    out = torch.ops.aten.multi_margin_loss.default(x, target, p, margin, weight, reduction)
    return out.reshape(()) if x.dim() <= 1 and target.dim() == 0 else out


@lower("aten::multi_margin_loss", meta=_margin_shape)
def _multi_margin(
    x: jax.Array,
    target: jax.Array,
    p: float = 1,
    margin: float = 1,
    weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    wide_x, weight = wide_all(x, weight)
    loss = _reduce(_hinge_sums(_rows(wide_x), target.reshape(-1), p, margin, weight), reduction)
    return loss.reshape(()) if x.ndim <= 1 and target.ndim == 0 else loss


def _gradient_shape(grad: torch.Tensor, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """torch has no `meta` kernels for these gradients."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@lower("aten::multi_margin_loss_backward", meta=_gradient_shape)
def _multi_margin_backward(
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    p: float,
    margin: float,
    weight: jax.Array | None = None,
    reduction: int = _MEAN,
) -> jax.Array:
    def forward(a: jax.Array) -> jax.Array:
        return _multi_margin(a, target, p, margin, weight, reduction).reshape(grad.shape)

    return pull_back(forward, grad, wide(x))[0]


def _multilabel_sums(x: jax.Array, target: jax.Array, is_target: jax.Array) -> jax.Array:
    """Per row, the mean of max(0, 1 - x[t] + x[j]) over targets t and other classes j."""
    listed = jnp.cumprod(target >= 0, axis=1).astype(bool)
    chosen = jnp.take_along_axis(x, jnp.where(listed, target, jnp.zeros_like(target)), axis=1)
    gap = 1 - chosen[:, :, None] + x[:, None, :]
    pairs = listed[:, :, None] & ~is_target[:, None, :]
    return jnp.sum(jnp.where(pairs & (gap > 0), gap, jnp.zeros_like(gap)), (1, 2)) / x.shape[1]


def _is_target(target: jax.Array, classes: int) -> jax.Array:
    """Which classes a row lists; the list of a row ends at its first negative entry."""
    listed = jnp.cumprod(target >= 0, axis=1).astype(bool)
    hits = target[:, :, None] == jnp.arange(classes, dtype=target.dtype)
    return jnp.any(hits & listed[:, :, None], axis=1)


def _multilabel_shape(
    x: torch.Tensor, target: torch.Tensor, reduction: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A single sample has a result without axes; torch's `meta` kernel gives it one."""
    rows = x.shape[:1] if x.ndim > 1 and reduction == 0 else ()
    return x.new_empty(rows), torch.empty_like(target, dtype=x.dtype)


@lower("aten::multilabel_margin_loss_forward", meta=_multilabel_shape)
def _multilabel_margin(
    x: jax.Array, target: jax.Array, reduction: int
) -> tuple[jax.Array, jax.Array]:
    rows, targets = _rows(wide(x)), _rows(target)
    hit = _is_target(targets, rows.shape[1])
    loss = _reduce(_multilabel_sums(rows, targets, hit), reduction)
    return loss if x.ndim > 1 else loss.reshape(()), hit.reshape(target.shape)


@lower("aten::multilabel_margin_loss_backward", meta=_gradient_shape)
def _multilabel_margin_backward(
    grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, is_target: jax.Array
) -> jax.Array:
    def forward(a: jax.Array) -> jax.Array:
        return _multilabel_margin(a, target, reduction)[0].reshape(grad.shape)

    return pull_back(forward, grad, wide(x))[0]
