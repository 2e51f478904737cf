"""Distances between all pairs of rows, and their gradients.

The gradient of a p-norm |d| is `sign(d) * (|d| / norm) ** (p - 1)`, and 0 between equal rows.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from .argument_forms import cast
from .extremes import largest
from .registry import lower

_ALWAYS_MATMUL, _NEVER_MATMUL = 1, 2
_MATMUL_FROM = 25  # rows from which torch computes Euclidean distances by a matrix product


def _norm(gap: jax.Array, p: float) -> jax.Array:
    size = jnp.abs(gap)
    if p == 0:
        return jnp.sum(cast(gap != 0, gap.dtype), axis=-1)
    if p == 1:
        return jnp.sum(size, axis=-1)
    if p == 2:
        return jnp.sqrt(jnp.sum(jnp.square(gap), axis=-1))
    if p == np.inf:
        return largest(size, axis=-1)
    return jnp.sum(size**p, axis=-1) ** (1 / p)


def _derivative(gap: jax.Array, norm: jax.Array, p: float) -> jax.Array:
    """The derivative of the norm (..., 1) by each difference (..., d)."""
    if p == 0:
        return jnp.zeros_like(gap)
    if p == 1:
        return jnp.sign(gap)
    if p == np.inf:
        return jnp.where(jnp.abs(gap) == norm, jnp.sign(gap), jnp.zeros_like(gap))
    nonzero = norm != 0
    safe = jnp.where(nonzero, norm, jnp.ones_like(norm))
    if p == 2:
        return jnp.where(nonzero, gap / safe, jnp.zeros_like(gap))
    moved = gap != 0
    share = jnp.where(moved, jnp.abs(gap), safe) / safe
    return jnp.where(nonzero & moved, jnp.sign(gap) * share ** (p - 1), jnp.zeros_like(gap))


def _euclidean(a: jax.Array, b: jax.Array) -> jax.Array:
    """By |a|^2 - 2ab + |b|^2: one matrix product instead of all differences."""
    squares = jnp.sum(jnp.square(a), -1)[..., :, None] + jnp.sum(jnp.square(b), -1)[..., None, :]
    return jnp.sqrt(jnp.maximum(squares - 2 * a @ jnp.swapaxes(b, -1, -2), 0))


@lower("aten::_euclidean_dist")
def _euclidean_dist(a: jax.Array, b: jax.Array) -> jax.Array:
    return _euclidean(a, b)


@lower("aten::_cdist_forward")
def _cdist(a: jax.Array, b: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    if 0 in (a.shape[-1], a.size, b.size):
        lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        return jnp.zeros((*lead, a.shape[-2], b.shape[-2]), a.dtype)
    large = a.shape[-2] > _MATMUL_FROM or b.shape[-2] > _MATMUL_FROM
    matmul = large if compute_mode in (None, 0) else compute_mode == _ALWAYS_MATMUL
    if p == 2 and matmul:
        return _euclidean(a, b)
    return _norm(a[..., :, None, :] - b[..., None, :, :], p)


@lower("aten::_cdist_backward")
def _cdist_backward(
    grad: jax.Array, a: jax.Array, b: jax.Array, p: float, cdist: jax.Array
) -> jax.Array:
    """The gradient of the first operand; torch computes the second by exchanging the two."""
    gap = a[..., :, None, :] - b[..., None, :, :]
    if not gap.size:
        return jnp.zeros_like(a)
    return jnp.sum(grad[..., None] * _derivative(gap, cdist[..., None], p), axis=-2)


def _pairs(x: jax.Array) -> tuple[np.ndarray, np.ndarray, jax.Array]:
    first, second = np.triu_indices(x.shape[0], 1)
    return first, second, x[first] - x[second]


@lower("aten::_pdist_forward")
def _pdist(x: jax.Array, p: float = 2.0) -> jax.Array:
    if x.shape[0] < 2 or x.shape[1] == 0:
        return jnp.zeros((x.shape[0] * (x.shape[0] - 1) // 2,), x.dtype)
    return _norm(_pairs(x)[2], p)


@lower("aten::_pdist_backward")
def _pdist_backward(grad: jax.Array, x: jax.Array, p: float, pdist: jax.Array) -> jax.Array:
    first, second, gap = _pairs(x)
    each = grad[:, None] * _derivative(gap, pdist[:, None], p)
    return jnp.zeros_like(x).at[first].add(each).at[second].add(-each)
