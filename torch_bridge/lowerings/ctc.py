"""Connectionist temporal classification: the likelihood of a label sequence under all alignments.

The classes of an alignment are the labels with a blank around each; the likelihood of each prefix
at each time follows from the one before, in logarithms, as one scan over time (Graves et al.,
"Connectionist temporal classification", 2006). An impossible prefix has a very low logarithm rather
than minus infinity, which keeps gradients finite.

The lengths of the sequences are lists or arrays; an array's values may be unknown when compiling.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from .argument_forms import wide
from .registry import lower
from .vjp import pull_back

_IMPOSSIBLE = -1e30


def _likelihoods(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Sequence[int] | jax.Array,
    target_lengths: Sequence[int] | jax.Array,
    blank: int,
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihoods (N,), and the logarithms of all prefixes (N, T, 2 S + 1)."""
    steps, batch, _ = log_probs.shape
    sizes, spans = (jnp.asarray(x, jnp.int32).reshape(-1) for x in (target_lengths, input_lengths))
    labels = _rows(targets, sizes, _longest(targets, target_lengths))
    states = 2 * labels.shape[1] + 1
    classes = jnp.full((batch, states), blank, labels.dtype).at[:, 1::2].set(labels)
    # A label may follow the one before it, without a blank between, if they differ.
    jumps = jnp.pad(classes[:, 2:] != classes[:, :-2], ((0, 0), (2, 0)))[:, :states]
    jumps &= jnp.arange(states) % 2 == 1
    scores = jnp.maximum(jnp.swapaxes(log_probs, 0, 1), _IMPOSSIBLE)
    emitted = jnp.take_along_axis(scores, classes[:, None, :], axis=2)
    inside = jnp.arange(states) < (2 * sizes + 1)[:, None]
    first = jnp.where((jnp.arange(states) < 2) & inside, emitted[:, 0], _IMPOSSIBLE)

    def step(alpha: jax.Array, time: jax.Array) -> tuple[jax.Array, jax.Array]:
        same_label = alpha
        move = jnp.pad(alpha[:, :-1], ((0, 0), (1, 0)), constant_values=_IMPOSSIBLE)
        jump = jnp.pad(alpha, ((0, 0), (2, 0)), constant_values=_IMPOSSIBLE)[:, :states]
        jump = jnp.where(jumps, jump, _IMPOSSIBLE)
        fresh = jax.nn.logsumexp(jnp.stack([same_label, move, jump]), axis=0) + emitted[:, time]
        fresh = jnp.where(inside, jnp.maximum(fresh, _IMPOSSIBLE), _IMPOSSIBLE)
        return jnp.where((time < spans)[:, None], fresh, alpha), fresh

    last, rest = jax.lax.scan(step, first, jnp.arange(1, steps))
    ends = jnp.stack([2 * sizes, jnp.maximum(2 * sizes - 1, 0)], axis=1)
    finals = jnp.take_along_axis(last, ends, axis=1)
    finals = jnp.where((jnp.arange(2) == 1) & (sizes == 0)[:, None], _IMPOSSIBLE, finals)
    loss = -jax.nn.logsumexp(finals, axis=1)
    # Without time only the empty sequence is possible.
    timeless = jnp.where(sizes == 0, 0.0, -_IMPOSSIBLE).astype(loss.dtype)
    loss = jnp.where(spans == 0, timeless, loss)
    return loss, jnp.concatenate([first[:, None], jnp.swapaxes(rest, 0, 1)], axis=1)


def _count(lengths: Sequence[int] | torch.Tensor) -> int:
    """How many sequences there are; one, without a batch, has a length without an axis."""
    return lengths.numel() if isinstance(lengths, torch.Tensor) else len(lengths)


def _longest(
    targets: jax.Array | torch.Tensor, target_lengths: Sequence[int] | jax.Array | torch.Tensor
) -> int:
    """How many labels a sequence has at most."""
    if isinstance(target_lengths, list | tuple):
        return max(target_lengths, default=0)
    return targets.shape[-1]


def _rows(targets: jax.Array, sizes: jax.Array, longest: int) -> jax.Array:
    """Labels as (N, longest), from a padded matrix or from sequences one after the other."""
    if targets.ndim == 2:
        return targets[:, :longest]
    starts = jnp.cumsum(sizes) - sizes
    indices = starts[:, None] + jnp.arange(longest)
    if targets.shape[0] == 0:
        return jnp.zeros(indices.shape, targets.dtype)
    return jnp.take(targets, jnp.minimum(indices, targets.shape[0] - 1))


def _shapes(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Sequence[int] | torch.Tensor,
    target_lengths: Sequence[int] | torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """torch's `meta` kernel does not serve lengths in tensors."""
    batched = log_probs if log_probs.dim() == 3 else log_probs.unsqueeze(1)
    steps, batch, classes = batched.shape
    if not 0 <= blank < classes:
        raise RuntimeError(f"blank must be in label range: got {blank} of {classes} classes")
    counts = [_count(lengths) for lengths in (input_lengths, target_lengths)]
    if counts != [batch, batch]:
        raise RuntimeError(
            f"input_lengths and target_lengths must be of size {batch} (the batch), but are of "
            f"sizes {counts[0]} and {counts[1]}"
        )
    if isinstance(input_lengths, list | tuple) and max(input_lengths, default=0) > steps:
        raise RuntimeError(
            f"Expected input_lengths to have value at most {steps}, but got value "
            f"{max(input_lengths)}"
        )
    states = 2 * _longest(targets, target_lengths) + 1
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, steps, states))


@lower("aten::_ctc_loss", "aten::_ctc_loss.Tensor", meta=_shapes)
def _ctc_loss(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Sequence[int] | jax.Array,
    target_lengths: Sequence[int] | jax.Array,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[jax.Array, jax.Array]:
    loss, alpha = _likelihoods(wide(log_probs), targets, input_lengths, target_lengths, blank)
    loss = jnp.where(loss > -_IMPOSSIBLE / 2, jnp.inf, loss)
    return loss, jnp.where(alpha < _IMPOSSIBLE / 2, -jnp.inf, alpha)


def _gradient_shape(
    grad: torch.Tensor, log_probs: torch.Tensor, *_: Sequence[int] | torch.Tensor | int
) -> torch.Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


@lower("aten::_ctc_loss_backward", "aten::_ctc_loss_backward.Tensor", meta=_gradient_shape)
def _ctc_loss_backward(
    grad: jax.Array,
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Sequence[int] | jax.Array,
    target_lengths: Sequence[int] | jax.Array,
    neg_log_likelihood: jax.Array,
    log_alpha: jax.Array,
    blank: int,
    zero_infinity: bool = False,
) -> jax.Array:
    """The gradient that torch gives: that of the scores before their log-softmax."""
    scores, grad, loss = (wide(x) for x in (log_probs, grad, neg_log_likelihood))

    def forward(x: jax.Array) -> jax.Array:
        return _likelihoods(x, targets, input_lengths, target_lengths, blank)[0]

    (posterior,) = pull_back(forward, jnp.where(jnp.isinf(loss), 0.0, grad), scores)
    spans = jnp.asarray(input_lengths, jnp.int32).reshape(-1)
    there = (jnp.arange(scores.shape[0])[:, None] < spans)[:, :, None]
    cotangent = jnp.where(there, jnp.exp(scores) * grad[None, :, None], 0.0) + posterior
    impossible = jnp.where(there, 0.0 if zero_infinity else jnp.nan, 0.0)
    return jnp.where(jnp.isinf(loss)[None, :, None], impossible, cotangent)
