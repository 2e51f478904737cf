"""Optimizer steps as one operator over all parameters: `torch.optim.AdamW(.., fused=True)`.

Each function returns the new values of what torch updates in place. With a `grad_scale` the
gradients are divided by it first, and stored so; where `found_inf` is 1 nothing changes. Half
precision is computed in float32, as torch does.

The operators of `torch.amp.GradScaler` are here too: unscale gradients, look for infinities, adapt
the scale. They read no value on the host, so a scaled training step is one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .argument_forms import wide
from .registry import lower

_ADAM = ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
_ADAGRAD = ("self", "grads", "state_sums", "state_steps")
_SGD = ("self", "grads", "momentum_buffer_list")


def _each(
    function: Callable[..., tuple[Any, ...]], found_inf: Any, grad_scale: Any, *lists: list[Any]
) -> tuple[list[Any], ...]:
    """Apply `function(param, grad, *state)` to each parameter, unless there is an infinity.

    Args:
        function: returns the new parameter and state; None for a state that is absent.
        found_inf: 1.0 to skip the step, or None.
        grad_scale: what the gradients are multiples of, or None.
        *lists: parameters, gradients, and the lists of states; an empty list is absent.
    """
    new: list[list[Any]] = [[] for _ in lists]
    for index, (param, grad) in enumerate(zip(*lists[:2], strict=True)):
        old = [param, grad, *(state[index] if state else None for state in lists[2:])]
        grad = wide(grad) if grad_scale is None else wide(grad) / grad_scale
        states = [None if x is None else wide(x) for x in old[2:]]
        step = function(wide(param), grad, *states)
        for into, before, after in zip(new, old, (step[0], grad, *step[1:]), strict=True):
            if before is None:
                continue
            after = after.astype(before.dtype)
            into.append(after if found_inf is None else jnp.where(found_inf == 1, before, after))
    return tuple(new)


def _correction(beta: float, step: jax.Array) -> jax.Array:
    """`1 - beta ** step`, without the cancellation that float32 suffers early in training."""
    return -jnp.expm1(step * math.log(beta)) if beta > 0 else jnp.ones_like(step)


def _adam(decoupled: bool) -> Callable[..., Any]:
    """Adam, with weight decay in the gradient, or decoupled from it (AdamW)."""

    def run(
        params: list[jax.Array],
        grads: list[jax.Array],
        exp_avgs: list[jax.Array],
        exp_avg_sqs: list[jax.Array],
        max_exp_avg_sqs: list[jax.Array],
        state_steps: list[jax.Array],
        *,
        lr: jax.Array | float,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: jax.Array | None = None,
        found_inf: jax.Array | None = None,
    ) -> tuple[list[Any], ...]:
        def update(
            param: jax.Array,
            grad: jax.Array,
            average: jax.Array,
            square: jax.Array,
            largest: Any,
            count: jax.Array,
        ) -> tuple[Any, ...]:
            grad = -grad if maximize else grad
            if weight_decay:
                if decoupled:
                    param = param - lr * weight_decay * param
                else:
                    grad = grad + weight_decay * param
            average = average + (grad - average) * (1 - beta1)
            square = beta2 * square + (1 - beta2) * grad * grad
            if amsgrad:
                largest = jnp.maximum(largest, square)
            size = jnp.sqrt(largest if amsgrad else square)
            denominator = size / jnp.sqrt(_correction(beta2, count)) + eps
            step = lr / _correction(beta1, count)
            return param - step * average / denominator, average, square, largest, count

        lists = (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps)
        return _each(update, found_inf, grad_scale, *lists)[:-1]

    return run


def _sgd(
    params: list[jax.Array],
    grads: list[jax.Array],
    momentum_buffers: list[jax.Array],
    *,
    weight_decay: float,
    momentum: float,
    lr: jax.Array | float,
    dampening: float,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
) -> tuple[list[Any], ...]:
    def update(param: jax.Array, grad: jax.Array, velocity: Any) -> tuple[Any, ...]:
        grad = -grad if maximize else grad
        if weight_decay:
            grad = grad + weight_decay * param
        if momentum:
            velocity = grad if is_first_step else momentum * velocity + (1 - dampening) * grad
            grad = grad + momentum * velocity if nesterov else velocity
        return param - lr * grad, velocity

    return _each(update, found_inf, grad_scale, params, grads, momentum_buffers)


def _adagrad(
    params: list[jax.Array],
    grads: list[jax.Array],
    state_sums: list[jax.Array],
    state_steps: list[jax.Array],
    *,
    lr: jax.Array | float,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: jax.Array | None = None,
    found_inf: jax.Array | None = None,
) -> tuple[list[Any], ...]:
    def update(
        param: jax.Array, grad: jax.Array, total: jax.Array, count: jax.Array
    ) -> tuple[Any, ...]:
        grad = -grad if maximize else grad
        if weight_decay:
            grad = grad + weight_decay * param
        rate = lr / (1 + (count - 1) * lr_decay)
        total = total + grad * grad
        return param - rate * grad / (jnp.sqrt(total) + eps), total, count

    return _each(update, found_inf, grad_scale, params, grads, state_sums, state_steps)


for _name, _writes, _function in (
    ("adam", _ADAM, _adam(decoupled=False)),
    ("adamw", _ADAM, _adam(decoupled=True)),
    ("sgd", _SGD, _sgd),
    ("adagrad", _ADAGRAD, _adagrad),
):
    lower(
        f"aten::_fused_{_name}_",
        f"aten::_fused_{_name}_.tensor_lr",
        lift=("lr",),
        writes=_writes,
        meta=lambda *_, **__: (),
    )(_function)


@lower(
    "aten::_amp_foreach_non_finite_check_and_unscale_",
    writes=("self", "found_inf"),
    meta=lambda *_: (),
)
def _unscale(
    grads: Sequence[jax.Array], found_inf: jax.Array, inv_scale: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """The gradients times `inv_scale`; `found_inf` becomes 1 if one of them is not finite."""
    finite = [jnp.all(jnp.isfinite(grad)) for grad in grads]
    bad = jnp.zeros((), bool) if not finite else ~jnp.all(jnp.stack(finite))
    scaled = [(wide(grad) * inv_scale).astype(grad.dtype) for grad in grads]
    return scaled, jnp.where(bad, jnp.ones_like(found_inf), found_inf)


@lower("aten::_amp_update_scale_", writes=("self", "growth_tracker"))
def _update_scale(
    scale: jax.Array,
    growth_tracker: jax.Array,
    found_inf: jax.Array,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> tuple[jax.Array, jax.Array]:
    """Back off after an infinity, grow after `growth_interval` good steps; and their count."""
    bad = found_inf != 0
    streak = growth_tracker + 1
    due = streak == growth_interval
    grown = scale * scale_growth_factor
    grown = jnp.where(due & jnp.isfinite(grown), grown, scale)
    return (
        jnp.where(bad, scale * scale_backoff_factor, grown),
        jnp.where(bad | due, jnp.zeros_like(streak), streak),
    )
