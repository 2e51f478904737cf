"""`nn.LinearCrossEntropyLoss`: a linear layer and the cross entropy of its scores, as one.

torch computes it chunk by chunk, so that the scores are never all in memory, and works out the
gradients on the way. XLA sees the whole program and plans memory itself, so here the two are simply
composed; the chunk sizes and accumulation policies that torch passes change nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .argument_forms import wide
from .registry import lower


def _losses(
    x: jax.Array,
    matrix: jax.Array,
    bias: jax.Array | None,
    target: jax.Array,
    weight: jax.Array | None,
    ignore_index: int,
    smoothing: float,
) -> tuple[jax.Array, jax.Array]:
    """The loss of each sample, and the weight of each."""
    scores = wide(x) @ wide(matrix).T
    scores = scores if bias is None else scores + wide(bias)
    logs = jax.nn.log_softmax(scores, axis=-1)
    counted = target != ignore_index
    safe = jnp.where(counted, target, 0)
    share = jnp.ones(logs.shape[-1:], logs.dtype) if weight is None else wide(weight)
    factor = jnp.where(counted, share[safe], 0)
    loss = -jnp.take_along_axis(logs, safe[:, None], axis=1)[:, 0] * factor
    if smoothing:
        spread = -jnp.sum(logs * share, axis=-1) / logs.shape[-1]
        loss = (1 - smoothing) * loss + smoothing * jnp.where(counted, spread, 0)
    return loss, factor


@lower("torch_nn::_linear_cross_entropy_batch_chunked")
def _reduced(
    x: jax.Array,
    matrix: jax.Array,
    target: jax.Array,
    bias: jax.Array | None,
    weight: jax.Array | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: np.dtype,
    allow_retain_graph: bool,
    compute_input_grad: bool,
    compute_linear_weight_grad: bool,
    compute_linear_bias_grad: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The mean or sum, and the gradients for autograd."""

    def forward(x: jax.Array, matrix: jax.Array, bias: jax.Array | None) -> jax.Array:
        loss, factor = _losses(x, matrix, bias, target, weight, ignore_index, label_smoothing)
        total = jnp.sum(loss)
        return total / jnp.sum(factor) if reduction == "mean" else total

    loss, back = jax.vjp(forward, x, matrix, bias)
    grad_x, grad_matrix, grad_bias = back(jnp.ones_like(loss))
    none = jnp.zeros((0, 0), x.dtype)
    return (
        loss,
        grad_x if compute_input_grad else none,
        grad_matrix if compute_linear_weight_grad else none,
        grad_bias if compute_linear_bias_grad else none.reshape(0),
    )


@lower("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction")
def _each(
    x: jax.Array,
    matrix: jax.Array,
    target: jax.Array,
    bias: jax.Array | None,
    weight: jax.Array | None,
    ignore_index: int,
    batch_chunk_size: int,
    acc_policy: str,
    acc_dtype: np.dtype,
) -> jax.Array:
    """The loss of each sample; torch composes its gradient of ordinary operators."""
    return _losses(x, matrix, bias, target, weight, ignore_index, 0.0)[0]
