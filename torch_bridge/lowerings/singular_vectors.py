"""Singular value decompositions with vectors, which compile on every platform.

JAX (0.10.2) decomposes matrices on a TPU by their polar form. Where 64-bit types are on, as they
are here, it multiplies float32 vectors with a matrix of 64-bit integers, and the compiler has no
such product. So for TPUs the same is done by hand, with the same functions: `a = q h` with `q`
orthogonal and `h` symmetric, and `h = v s v'`, so `a = (q v) s v'`. Other dtypes compile as they
are.

>>> import numpy as np
>>> from isoshard.torch_bridge.lowerings.singular_vectors import by_polar_form
>>> a = np.array([[0, 2], [3, 0], [0, 0]], np.float32)
>>> u, s, vh = jax.jit(by_polar_form, static_argnums=1)(a, False)
>>> print(s, u.shape)
[3. 2.] (3, 2)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

Factors = tuple[jax.Array, jax.Array, jax.Array]
"""Left vectors as columns, singular values from the largest on, right vectors as rows."""


def svd(a: jax.Array, *, full_matrices: bool) -> Factors:
    """`jnp.linalg.svd`.

    Args:
        a: matrices (.., m, n).
        full_matrices: whether the vectors span the full spaces.
    """

    def usual(a: jax.Array) -> Factors:
        u, s, vt = jnp.linalg.svd(a, full_matrices=full_matrices)
        return u, s, vt

    if a.dtype != "float32" or 0 in a.shape:
        return usual(a)
    polar = functools.partial(by_polar_form, full_matrices=full_matrices)
    return lax.platform_dependent(a, tpu=polar, default=usual)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def by_polar_form(a: jax.Array, full_matrices: bool) -> Factors:
    """A decomposition by polar forms; not of empty matrices. What is not finite gives NaN.

    Args:
        a: matrices (.., m, n), real.
        full_matrices: as for `svd`.
    """
    wide = a.shape[-2] < a.shape[-1]
    decompose = functools.partial(_of_tall, full_matrices=full_matrices)
    for _ in a.shape[:-2]:
        decompose = jax.vmap(decompose)
    with jax.default_matmul_precision("float32"):
        u, s, vh = decompose(_transpose(a) if wide else a)
    return (_transpose(vh), s, _transpose(u)) if wide else (u, s, vh)


def _of_tall(a: jax.Array, full_matrices: bool) -> Factors:
    """Of one matrix that has no more columns than rows."""
    rows, n = a.shape
    q, r = (None, a) if rows == n else jnp.linalg.qr(a, "complete" if full_matrices else "reduced")
    orthogonal, symmetric, *_ = lax.linalg.qdwh(r[:n])
    v, s = lax.linalg.eigh(symmetric, sort_eigenvalues=False)
    order = jnp.argsort(s, descending=True)
    v, s = v[:, order], jnp.maximum(s[order], 0)
    u = orthogonal @ v
    # Vectors of singular values that are 0 are any: Nakatsukasa and Higham (2013), section 5.5.
    deficient = s[-1] <= n * jnp.finfo(s.dtype).eps * s[0]
    u = lax.cond(deficient, _orthonormal, lambda u: u, u)
    if q is not None:
        u = jnp.concatenate([q[:, :n] @ u, q[:, n:]], axis=1)
    finite = jnp.all(jnp.isfinite(a))
    u, s, vh = (jnp.where(finite, x, jnp.full_like(x, jnp.nan)) for x in (u, s, _transpose(v)))
    return u, s, vh


def _orthonormal(u: jax.Array) -> jax.Array:
    """Orthonormal columns; orthonormal input columns are unchanged."""
    q, r = jnp.linalg.qr(u)
    return jnp.where(jnp.diagonal(r) >= 0, q, -q)


@by_polar_form.defjvp
def _tangents(
    full_matrices: bool, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[Factors, Factors]:
    """As JAX has it for its own: Giles (2008), "An extended collection of matrix derivatives"."""
    (a,), (da,) = primals, tangents
    m, n = a.shape[-2:]
    if full_matrices and m != n:
        raise NotImplementedError(
            f"no derivative of the full singular vectors of {m} x {n} matrices: those beyond the "
            f"first {min(m, n)} are any; take full_matrices=False"
        )
    u, s, vh = by_polar_form(a, False)
    v, row, column = _transpose(vh), s[..., None, :], s[..., :, None]
    with jax.default_matmul_precision("float32"):
        inner = _transpose(u) @ da @ v
        ds = jnp.diagonal(inner, axis1=-2, axis2=-1)
        same = jnp.eye(s.shape[-1], dtype=bool)
        inverse_gaps = jnp.where(same, 0, 1 / jnp.where(same, 1, (row + column) * (row - column)))
        du = u @ (inverse_gaps * (inner * row + _transpose(inner * row)))
        dv = v @ (inverse_gaps * (inner * column + _transpose(inner * column)))
        if m > n:
            du = du + (da @ v - u @ (_transpose(u) @ (da @ v))) / row
        if n > m:
            dv = dv + (_transpose(da) @ u - v @ (vh @ (_transpose(da) @ u))) / row
    return (u, s, vh), (du, ds, _transpose(dv))


def _transpose(a: jax.Array) -> jax.Array:
    return jnp.swapaxes(a, -1, -2)
