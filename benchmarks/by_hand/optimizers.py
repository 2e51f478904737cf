"""The optimizers of the hand-written steps, with torch's formulas.

An optimizer is a pair of functions: `init(params) -> state` and
`update(params, grads, state) -> params, state`, over dicts of arrays.

>>> import jax.numpy as jnp
>>> params, grads = {"w": jnp.ones(2)}, {"w": jnp.ones(2)}
>>> sgd(lr=0.5)[1](params, grads, {})[0]["w"].tolist()
[0.5, 0.5]

Source: the documentation of `torch.optim.SGD`, `torch.optim.AdamW` and
`torch.nn.utils.clip_grad_norm_`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]
Optimizer = tuple[Callable[..., dict], Callable[..., tuple[Params, dict]]]


def clip(grads: Params, max_norm: float) -> Params:
    """Scale all gradients so that their common norm is at most `max_norm`."""
    norms = jnp.stack([jnp.sqrt(jnp.sum(grad * grad)) for grad in grads.values()])
    scale = jnp.minimum(max_norm / (jnp.linalg.norm(norms) + 1e-6), 1.0)
    return jax.tree.map(lambda grad: grad * scale, grads)


def sgd(lr: float, *, momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """Gradient descent; without momentum it has no state."""

    def init(params: Params):
        return {"momentum": jax.tree.map(jnp.zeros_like, params)} if momentum else {}

    def update(params: Params, grads: Params, state: dict):
        if weight_decay:
            grads = jax.tree.map(lambda p, g: g + weight_decay * p, params, grads)
        if momentum:
            grads = jax.tree.map(lambda m, g: momentum * m + g, state["momentum"], grads)
            state = {"momentum": grads}
        return jax.tree.map(lambda p, g: p - lr * g, params, grads), state

    return init, update


def adamw(
    lr: float,
    *,
    max_norm: float | None = None,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
) -> Optimizer:
    """AdamW, after clipping the global norm of the gradients to `max_norm`."""

    def init(params: Params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"step": jnp.zeros(()), "mean": zeros, "square": jax.tree.map(jnp.copy, zeros)}

    def update(params: Params, grads: Params, state: dict):
        if max_norm is not None:
            grads = clip(grads, max_norm)
        step = state["step"] + 1
        mean = jax.tree.map(lambda m, g: m + (1 - betas[0]) * (g - m), state["mean"], grads)
        square = jax.tree.map(
            lambda v, g: betas[1] * v + (1 - betas[1]) * g * g, state["square"], grads
        )
        rate = lr / (1 - betas[0] ** step)
        root = jnp.sqrt(1 - betas[1] ** step)

        def move(p: jax.Array, m: jax.Array, v: jax.Array):
            return p * (1 - lr * weight_decay) - rate * m / (jnp.sqrt(v) / root + eps)

        params = jax.tree.map(move, params, mean, square)
        return params, {"step": step, "mean": mean, "square": square}

    return init, update
