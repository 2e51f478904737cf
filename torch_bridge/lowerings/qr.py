"""Orthogonal factorisations, in full and as the Householder reflectors that LAPACK makes.

`geqrf` packs R in the upper triangle and below it the reflectors, whose scales are `tau`;
`householder_product` multiplies them to Q, `ormqr` applies Q without forming it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from .registry import lower


@lower("aten::linalg_qr")
def _qr(a: jax.Array, mode: str = "reduced") -> tuple[jax.Array, ...]:
    if mode == "r":
        return jnp.zeros((0,), a.dtype), jnp.linalg.qr(a, mode="r")
    return tuple(jnp.linalg.qr(a, mode=mode))


def _geqrf_shapes(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if a.dim() < 2:
        raise RuntimeError(f"torch.geqrf: input must have at least 2 dimensions, but has {a.dim()}")
    packed = torch.empty_like(a.mT, memory_format=torch.contiguous_format).mT
    return packed, a.new_empty((*a.shape[:-2], min(a.shape[-2:])))


@lower("aten::geqrf", meta=_geqrf_shapes)
def _geqrf(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    if 0 in a.shape:
        return a, jnp.zeros((*a.shape[:-2], min(a.shape[-2:])), a.dtype)
    packed, tau = jnp.linalg.qr(a, mode="raw")
    return jnp.swapaxes(packed, -1, -2), tau


@lower("aten::linalg_householder_product")
def _householder_product(a: jax.Array, tau: jax.Array) -> jax.Array:
    return a if 0 in a.shape else lax.linalg.householder_product(a, tau)


@lower("aten::ormqr")
def _ormqr(
    a: jax.Array, tau: jax.Array, other: jax.Array, left: bool = True, transpose: bool = False
) -> jax.Array:
    """Q times `other` (or `other` times Q), or with the adjoint of Q."""
    if other.size == 0 or tau.size == 0:
        return other
    if hasattr(lax.linalg, "ormqr"):
        return lax.linalg.ormqr(a, tau, other, left=left, transpose=transpose)
    rows, lead = a.shape[-2], [(0, 0)] * (a.ndim - 2)  # JAX 0.9: by Q itself
    square = jnp.pad(a, [*lead, (0, 0), (0, max(rows - a.shape[-1], 0))])[..., :rows]
    q = lax.linalg.householder_product(square, tau)
    q = jnp.conj(jnp.swapaxes(q, -1, -2)) if transpose else q
    return q @ other if left else other @ q
