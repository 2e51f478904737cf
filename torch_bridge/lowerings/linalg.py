"""Factorisations and solvers of `torch.linalg`, batched over leading axes.

torch reports trouble through `info`, one integer per matrix: 0 for success, k when the k-th leading
minor is not positive definite or the k-th pivot is zero. Pivots count from 1, as LAPACK has them.

Orthogonal factorisations are full or LAPACK's Householder reflectors: `geqrf` packs R in the upper
triangle and below it the reflectors, whose scales are `tau`; `householder_product` multiplies them
to Q, `ormqr` applies Q without forming it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from isoshard.core.runtime.private_names import release

from .argument_forms import wide
from .registry import lower
from .singular_vectors import svd
from .unsharded_axes import diagonal


def _transpose(a: jax.Array) -> jax.Array:
    return jnp.swapaxes(a, -1, -2)


def _adjoint(a: jax.Array) -> jax.Array:
    return jnp.conj(_transpose(a))


def _diagonal(a: jax.Array) -> jax.Array:
    return diagonal(a, 0, -2, -1)


def _first(bad: jax.Array) -> jax.Array:
    """The index, from 1, of the first True along the last axis; 0 if there is none."""
    if bad.shape[-1] == 0:
        return jnp.zeros(bad.shape[:-1], "int32")
    return jnp.where(jnp.any(bad, axis=-1), jnp.argmax(bad, axis=-1).astype("int32") + 1, 0)


# LU and what follows from it


def _lu(a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Packed factors, pivots from 1, the row permutation, and info."""
    packed, pivots, permutation = lax.linalg.lu(a)
    return packed, pivots + 1, permutation, _first(_diagonal(packed) == 0)


def _parity(pivots: jax.Array) -> jax.Array:
    """The sign of the row permutation of pivots (from 1)."""
    positions = jnp.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype)
    swaps = jnp.sum(pivots != positions, axis=-1)
    return 1 - 2 * (swaps % 2)


def _permutation(pivots: jax.Array, rows: int) -> jax.Array:
    """The row permutation of pivots (from 1)."""
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)


def _permute_rows(b: jax.Array, order: jax.Array) -> jax.Array:
    return jnp.take_along_axis(b, order[..., None], axis=-2)


def _solve_packed(
    packed: jax.Array, order: jax.Array, b: jax.Array, *, adjoint: bool = False
) -> jax.Array:
    """Solve A x = b (or its adjoint) from packed LU factors and a row order."""
    lead = jnp.broadcast_shapes(packed.shape[:-2], b.shape[:-2])
    packed = jnp.broadcast_to(packed, (*lead, *packed.shape[-2:]))
    order = jnp.broadcast_to(order, (*lead, order.shape[-1]))
    b = jnp.broadcast_to(b, (*lead, *b.shape[-2:]))
    lower = {"left_side": True, "lower": True, "unit_diagonal": True}
    upper = {"left_side": True, "lower": False}
    solve = lax.linalg.triangular_solve
    if not adjoint:
        half = solve(packed, _permute_rows(b, order), **lower)
        return solve(packed, half, **upper)
    turned = {"transpose_a": True, "conjugate_a": True}
    half = solve(packed, b, **upper, **turned)
    return _permute_rows(solve(packed, half, **lower, **turned), jnp.argsort(order, axis=-1))


def _unpack(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    rows, columns = packed.shape[-2:]
    k = min(rows, columns)
    low = jnp.tril(packed[..., :, :k], -1) + jnp.eye(rows, k, dtype=packed.dtype)
    return low, jnp.triu(packed[..., :k, :])


def _permutation_matrix(order: jax.Array, dtype: np.dtype) -> jax.Array:
    return _transpose(jax.nn.one_hot(order, order.shape[-1], dtype=dtype))


def _demand_pivoting(pivot: bool) -> None:
    if not pivot:
        raise NotImplementedError(
            "LU factorisation with pivot=False is not available in JAX. Use pivot=True."
        )


@lower("aten::linalg_lu_factor_ex")
def _lu_factor(
    a: jax.Array, *, pivot: bool = True, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    _demand_pivoting(pivot)
    packed, pivots, _, info = _lu(a)
    return packed, pivots, info


@lower("aten::linalg_lu")
def _linalg_lu(a: jax.Array, *, pivot: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    _demand_pivoting(pivot)
    packed, _, order, _ = _lu(a)
    return _permutation_matrix(order, a.dtype), *_unpack(packed)


@lower("aten::lu_unpack")
def _lu_unpack(
    packed: jax.Array, pivots: jax.Array, unpack_data: bool = True, unpack_pivots: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array]:
    empty = jnp.zeros((0,), packed.dtype)
    order = _permutation(pivots, packed.shape[-2]) if unpack_pivots else None
    p = empty if order is None else _permutation_matrix(order, packed.dtype)
    return p, *(_unpack(packed) if unpack_data else (empty, empty))


@lower("aten::linalg_lu_solve")
def _lu_solve(
    packed: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool = True, adjoint: bool = False
) -> jax.Array:
    order = _permutation(pivots, packed.shape[-2])
    if left:
        return _solve_packed(packed, order, b, adjoint=adjoint)
    return _adjoint(_solve_packed(packed, order, _adjoint(b), adjoint=not adjoint))


@lower("aten::lu_solve")
def _lu_solve_old(b: jax.Array, packed: jax.Array, pivots: jax.Array) -> jax.Array:
    return _lu_solve(packed, pivots, b)


def _turns(a: jax.Array, contiguous: bool) -> bool:
    """Whether torch's gradient formulas take the factors for those of the transpose.

    They do where the matrix is real and row-major in memory.
    """
    return contiguous and not jnp.iscomplexobj(a)


@lower("aten::_linalg_det", strided=True)
def _det(a: jax.Array, *, contiguous: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    packed, pivots, _, _ = _lu(_transpose(a) if _turns(a, contiguous) else a)
    return _parity(pivots) * jnp.prod(_diagonal(packed), axis=-1), packed, pivots


@lower("aten::_linalg_slogdet", strided=True)
def _slogdet(
    a: jax.Array, *, contiguous: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    packed, pivots, _, _ = _lu(_transpose(a) if _turns(a, contiguous) else a)
    along = _diagonal(packed)
    sign = _parity(pivots) * jnp.prod(jnp.sign(along), axis=-1)
    return sign, jnp.sum(jnp.log(jnp.abs(along)), axis=-1), packed, pivots


_SOLVES_TURNED = release(torch.__version__) < (2, 11)


@lower("aten::_linalg_solve_ex", strided=_SOLVES_TURNED)
def _solve(
    a: jax.Array,
    b: jax.Array,
    *,
    left: bool = True,
    check_errors: bool = False,
    contiguous: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    turned = _SOLVES_TURNED and _turns(a, contiguous)
    packed, pivots, order, info = _lu(_transpose(a) if turned else a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    columns = b[..., None] if vector else b
    if left:
        x = _solve_packed(packed, order, columns, adjoint=turned)
    else:
        x = _adjoint(_solve_packed(packed, order, _adjoint(columns), adjoint=not turned))
    return x[..., 0] if vector else x, packed, pivots, info


@lower("aten::linalg_inv_ex")
def _inverse(a: jax.Array, *, check_errors: bool = False) -> tuple[jax.Array, jax.Array]:
    packed, _, order, info = _lu(a)
    return _solve_packed(packed, order, jnp.eye(a.shape[-1], dtype=a.dtype)), info


# Triangular systems and Cholesky


@lower("aten::linalg_solve_triangular")
def _solve_triangular(
    a: jax.Array, b: jax.Array, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> jax.Array:
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=not upper, unit_diagonal=unitriangular
    )


@lower("aten::triangular_solve")
def _triangular_solve(
    b: jax.Array,
    a: jax.Array,
    upper: bool = True,
    transpose: bool = False,
    unitriangular: bool = False,
) -> tuple[jax.Array, jax.Array]:
    lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (a, b))
    x = lax.linalg.triangular_solve(
        a,
        b,
        left_side=True,
        lower=not upper,
        transpose_a=transpose,
        unit_diagonal=unitriangular,
    )
    return x, a


def _half(a: jax.Array, upper: bool) -> jax.Array:
    """The Cholesky factor of the matrix whose lower (or upper) triangle is in `a`."""
    low = lax.linalg.cholesky(_adjoint(a) if upper else a, symmetrize_input=False)
    return _adjoint(low) if upper else low


@lower("aten::linalg_cholesky_ex")
def _cholesky_ex(
    a: jax.Array, *, upper: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array]:
    factor = _half(a, upper)
    return factor, _first(jnp.isnan(_diagonal(factor)))


@lower("aten::cholesky")
def _cholesky(a: jax.Array, upper: bool = False) -> jax.Array:
    return _half(a, upper)


@lower("aten::_cholesky_solve_helper")
def _cholesky_solve(b: jax.Array, factor: jax.Array, upper: bool) -> jax.Array:
    solve = lax.linalg.triangular_solve
    turned = {"transpose_a": True, "conjugate_a": True}
    first, second = (turned, {}) if upper else ({}, turned)
    half = solve(factor, b, left_side=True, lower=not upper, **first)
    return solve(factor, half, left_side=True, lower=not upper, **second)


@lower("aten::cholesky_solve")
def _cholesky_solve_broadcast(b: jax.Array, factor: jax.Array, upper: bool = False) -> jax.Array:
    lead = jnp.broadcast_shapes(b.shape[:-2], factor.shape[:-2])
    b, factor = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (b, factor))
    return _cholesky_solve(b, factor, upper)


@lower("aten::cholesky_inverse")
def _cholesky_inverse(factor: jax.Array, upper: bool = False) -> jax.Array:
    eye = jnp.broadcast_to(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor.shape)
    return _cholesky_solve(eye, factor, upper)


# Spectral factorisations


@lower("aten::_linalg_svd")
def _svd(
    a: jax.Array, full_matrices: bool = False, compute_uv: bool = True, *, driver: str | None = None
) -> tuple[jax.Array, ...]:
    if not compute_uv:
        empty = jnp.zeros((0,), a.dtype)
        return empty, jnp.linalg.svd(a, compute_uv=False), empty
    return svd(a, full_matrices=full_matrices)


@lower("aten::_linalg_eigh")
def _eigh(a: jax.Array, UPLO: str = "L", compute_v: bool = True) -> tuple[jax.Array, jax.Array]:
    vectors, values = lax.linalg.eigh(a, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values, vectors if compute_v else jnp.zeros((0,), a.dtype)


@lower("aten::linalg_pinv.atol_rtol_tensor")
def _pinv(
    a: jax.Array,
    *,
    atol: jax.Array | None = None,
    rtol: jax.Array | None = None,
    hermitian: bool = False,
) -> jax.Array:
    """The pseudo-inverse; singular values up to max(atol, rtol * largest) count as 0."""
    if 0 in a.shape[-2:]:
        return jnp.zeros(_transpose(a).shape, a.dtype)
    if hermitian:
        u, s = lax.linalg.eigh(a, lower=True, symmetrize_input=False)
        vh = _adjoint(u)
    else:
        u, s, vh = svd(a, full_matrices=False)
    size = jnp.abs(s)
    default = max(a.shape[-2:]) * jnp.finfo(a.dtype).eps
    atol = jnp.zeros((), s.dtype) if atol is None else atol
    relative = jnp.where(atol > 0, 0.0, default) if rtol is None else rtol
    least = jnp.maximum(atol, relative * jnp.max(size, axis=-1))[..., None]
    inverse = jnp.where(size > least, 1 / s, jnp.zeros_like(s))
    return (_adjoint(vh) * inverse[..., None, :]) @ _adjoint(u)


@lower("aten::linalg_matrix_exp")
def _matrix_exp(a: jax.Array) -> jax.Array:
    return a if a.size == 0 else jax.scipy.linalg.expm(wide(a))


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
