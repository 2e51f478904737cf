"""Eigenvalues of general matrices, and least squares.

JAX computes the eigenvalues of matrices that are not symmetric on the CPU; on other devices it may
raise an error with that hint. Least squares go through singular values, whichever LAPACK
driver torch names; the drivers differ in what they return in addition to the solution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from .registry import lower
from .singular_vectors import svd


def _columns(x: torch.Tensor, shape: Sequence[int], **options: Any) -> torch.Tensor:
    """A new tensor in column-major order, as LAPACK returns it."""
    *lead, rows, columns = shape
    return x.new_empty((*lead, columns, rows), **options).mT


def _eig_shapes(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops.aten.linalg_eig.default(a)  # raises where a is no square matrix
    dtype = a.dtype.to_complex()
    return a.new_empty(a.shape[:-1], dtype=dtype), _columns(a, a.shape, dtype=dtype)


@lower("aten::linalg_eig", meta=_eig_shapes)
def _eig(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and right eigenvectors, complex, of length 1."""
    dtype = jnp.result_type(a, jnp.complex64)
    if a.size == 0:
        return jnp.zeros(a.shape[:-1], dtype), jnp.zeros(a.shape, dtype)
    values, vectors = lax.linalg.eig(a, compute_left_eigenvectors=False)
    return values, vectors


@lower("aten::_linalg_eigvals", "aten::linalg_eigvals")
def _eigvals(a: jax.Array) -> jax.Array:
    if a.size == 0:
        return jnp.zeros(a.shape[:-1], jnp.result_type(a, jnp.complex64))
    (values,) = lax.linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False)
    return values


# Least squares

_RANKED = ("gelsy", "gelsd", "gelss")
_VALUED = ("gelsd", "gelss")


def _is_vector(a: jax.Array | torch.Tensor, b: jax.Array | torch.Tensor) -> bool:
    return b.ndim == 1 or (a.ndim - 1 == b.ndim and a.shape[:-1] == b.shape)


def _wants_residuals(a: jax.Array | torch.Tensor, driver: str) -> bool:
    return a.shape[-2] > a.shape[-1] and driver != "gelsy"


def _lstsq_shapes(
    a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """torch has no `meta` kernel for it."""
    driver = driver or "gelsy"
    if driver not in ("gels", *_RANKED):
        raise RuntimeError(
            f"torch.linalg.lstsq: parameter `driver` should be one of (gels, gelsy, gelsd, gelss), "
            f"got {driver}"
        )
    if a.dim() < 2 or b.dim() < 1:
        raise RuntimeError(
            f"torch.linalg.lstsq: input must have at least 2 dimensions and other at least 1, but "
            f"they have {a.dim()} and {b.dim()}"
        )
    vector = _is_vector(a, b)
    columns = b.unsqueeze(-1) if vector else b
    if columns.shape[-2] != a.shape[-2]:
        raise RuntimeError(
            f"torch.linalg.lstsq: input.size(-2) should match other.size(-2), but they are "
            f"{a.shape[-2]} and {columns.shape[-2]}"
        )
    if a.dtype != b.dtype:
        raise RuntimeError(
            f"torch.linalg.lstsq: Expected input and other to have the same dtype, but got input's "
            f"dtype {a.dtype} and other's dtype {b.dtype}"
        )
    lead = torch.broadcast_shapes(a.shape[:-2], columns.shape[:-2])
    width = columns.shape[-1:]
    real = a.real if a.is_complex() else a
    return (
        a.new_empty((*lead, a.shape[-1])) if vector else _columns(a, (*lead, a.shape[-1], *width)),
        real.new_empty((*lead, *width) if _wants_residuals(a, driver) else (0,)),
        a.new_empty(a.shape[:-2] if driver in _RANKED else (0,), dtype=torch.int64),
        real.new_empty((*a.shape[:-2], min(a.shape[-2:])) if driver in _VALUED else (0,)),
    )


@lower("aten::linalg_lstsq", meta=_lstsq_shapes)
def _lstsq(
    a: jax.Array, b: jax.Array, rcond: float | None = None, *, driver: str | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Solution, residuals, rank and singular values.

    torch leaves residuals out where `gelsd` or `gelss` find a rank that is not full, which is known
    only when computed: here they are NaN then.
    """
    driver = driver or "gelsy"
    rows, columns = a.shape[-2:]
    vector = _is_vector(a, b)
    right = b[..., None] if vector else b
    u, s, vh = svd(a, full_matrices=False)
    if rcond is None or driver == "gels":
        rcond = 0.0 if driver == "gels" else float(jnp.finfo(s.dtype).eps) * max(rows, columns)
    largest = jnp.max(s, axis=-1, keepdims=True, initial=0)
    counted = s > rcond * largest
    rank = jnp.sum(counted, axis=-1)
    inverse = jnp.where(counted, 1 / s, jnp.zeros_like(s))[..., None]
    adjoint_u, adjoint_vh = (jnp.conj(jnp.swapaxes(x, -1, -2)) for x in (u, vh))
    x = adjoint_vh @ (inverse * (adjoint_u @ right))
    none = jnp.zeros((0,), s.dtype)
    residuals = none
    if _wants_residuals(a, driver):
        residuals = jnp.sum(jnp.square(jnp.abs(a @ x - right)), axis=-2)
        if driver != "gels":
            residuals = jnp.where(jnp.all(rank == columns), residuals, jnp.nan)
    return (
        x[..., 0] if vector else x,
        residuals,
        rank if driver in _RANKED else none,
        s if driver in _VALUED else none,
    )
