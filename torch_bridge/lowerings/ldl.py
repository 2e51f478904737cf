"""Symmetric indefinite systems: the factorisation of Bunch and Kaufman, and its solver.

`A = P L D L' P'` with pivots of size 1 and 2, packed as LAPACK's `sytrf` packs the lower triangle:
D on the diagonal (and, for a pivot of size 2, below it), L under it. A pivot number is positive for
size 1, and the same negative number twice for size 2. XLA has no such factorisation, so here are
two loops over columns; `hermitian` matrices of complex numbers use the adjoint for the transpose.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .registry import lower

_ALPHA = (1 + math.sqrt(17)) / 8


class _State(NamedTuple):
    """State of the factorisation: next column, what is left, packed result, pivots, info."""

    k: jax.Array
    rest: jax.Array
    packed: jax.Array
    pivots: jax.Array
    info: jax.Array


def _size(x: jax.Array) -> jax.Array:
    """The cheap absolute value that LAPACK compares pivots by."""
    return jnp.abs(x.real) + jnp.abs(x.imag) if jnp.iscomplexobj(x) else jnp.abs(x)


def _exchanged(n: int, i: jax.Array, j: jax.Array) -> jax.Array:
    """The permutation of `n` rows that swaps rows i and j."""
    indices = jnp.arange(n)
    return jnp.where(indices == i, j, jnp.where(indices == j, i, indices))


def _choose(rest: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The row to bring to the pivot, whether the pivot has size 2, and whether there is none."""
    n = rest.shape[-1]
    indices = jnp.arange(n)
    column = jnp.where(indices > k, _size(rest[:, k]), 0)
    own, top, row = _size(rest[k, k]), jnp.max(column), jnp.argmax(column)
    others = jnp.where((indices >= k) & (indices != row), _size(rest[row]), 0)
    widest = jnp.max(others)
    keep = (own >= _ALPHA * top) | (own * widest >= _ALPHA * top * top)
    single = keep | (_size(rest[row, row]) >= _ALPHA * widest)
    return jnp.where(keep, k, row), ~single, jnp.maximum(own, top) == 0


def _step(hermitian: bool, state: _State) -> _State:
    k, rest, packed, pivots, info = state
    n = rest.shape[-1]
    indices = jnp.arange(n)
    flip: Callable[..., jax.Array] = jnp.conj if hermitian else (lambda x: x)
    chosen, double, singular = _choose(rest, k)
    last = k + double
    order = _exchanged(n, last, chosen)
    rest = rest[order][:, order]
    below = indices > last
    first, second = (jnp.where(below, rest[:, i], 0) for i in (k, last))
    a, b, c = rest[k, k], rest[last, k], rest[last, last]
    # Columns of L: W times the inverse of the pivot.
    determinant = jnp.where(double, a * c - b * flip(b), 1)
    safe = jnp.where(singular, 1, a)
    first_column = jnp.where(double, (first * c - second * b) / determinant, first / safe)
    two = jnp.where(double, (second * a - first * flip(b)) / determinant, 0)
    change = jnp.outer(first_column, flip(first)) + jnp.where(
        double, jnp.outer(two, flip(second)), 0
    )
    rest = jnp.where(singular, rest, rest - change)
    first_column = jnp.where(
        indices == k, a, jnp.where(double & (indices == last), b, first_column)
    )
    packed = packed.at[:, k].set(jnp.where(indices >= k, first_column, 0))
    two = jnp.where(double, jnp.where(indices == last, c, two), packed[:, last])
    packed = packed.at[:, last].set(two)
    pivot = (chosen + 1).astype(pivots.dtype)
    pivots = pivots.at[k].set(jnp.where(double, -pivot, pivot))
    pivots = pivots.at[last].set(jnp.where(double, -pivot, pivot))
    info = jnp.where(singular & (info == 0), (k + 1).astype(info.dtype), info)
    return _State(last + 1, rest, packed, pivots, info)


def _factor_matrix(hermitian: bool, a: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    n = a.shape[-1]
    low = jnp.tril(a)
    turned = jnp.swapaxes(jnp.tril(a, -1), 0, 1)
    hermitian_a = low + (jnp.conj(turned) if hermitian else turned)
    if hermitian and jnp.iscomplexobj(a):
        diagonal = jnp.diagonal(hermitian_a)
        hermitian_a = hermitian_a - jnp.diag(1j * diagonal.imag).astype(a.dtype)
    start = _State(
        jnp.zeros((), jnp.int32),
        hermitian_a,
        jnp.zeros_like(a),
        jnp.zeros((n,), jnp.int32),
        jnp.zeros((), jnp.int32),
    )
    end = lax.while_loop(lambda s: s.k < n, functools.partial(_step, hermitian), start)
    return end.packed, end.pivots, end.info


def _batched(function: Callable[..., Any], rank_of_first: int, *arrays: jax.Array) -> Any:
    lead = arrays[0].shape[: arrays[0].ndim - rank_of_first]
    for _ in lead:
        function = jax.vmap(function)
    return function(*arrays)


@lower("aten::linalg_ldl_factor_ex")
def _ldl_factor(
    a: jax.Array, *, hermitian: bool = False, check_errors: bool = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    if a.size == 0:
        return a, jnp.zeros(a.shape[:-1], "int32"), jnp.zeros(a.shape[:-2], "int32")
    return _batched(functools.partial(_factor_matrix, hermitian), 2, a)


def _solve_matrix(hermitian: bool, packed: jax.Array, pivots: jax.Array, b: jax.Array) -> jax.Array:
    """`F' inv(D) F b` with `F = inv(P L)`, which the elimination of the identity gives."""
    n = packed.shape[-1]
    indices = jnp.arange(n)
    paired = pivots < 0
    opens = paired & (jnp.cumsum(paired) % 2 == 1)

    def eliminate(k: jax.Array, x: jax.Array) -> jax.Array:
        swaps = (pivots[k] > 0) | opens[k]
        here = k + opens[k]
        order = _exchanged(n, here, jnp.abs(pivots[k]) - 1)
        x = jnp.where(swaps, x[order], x)
        factors = jnp.where(indices > here, packed[:, k], 0)
        return x - jnp.outer(factors, x[k])

    f = lax.fori_loop(0, n, eliminate, jnp.eye(n, dtype=packed.dtype))
    off = jnp.where(opens[:-1], jnp.diagonal(packed, -1), 0)
    adjoint: Callable[..., jax.Array] = jnp.conj if hermitian else (lambda x: x)
    d = jnp.diag(jnp.diagonal(packed)) + jnp.diag(off, -1) + jnp.diag(adjoint(off), 1)
    return adjoint(f).T @ jnp.linalg.solve(d, f @ b)


@lower("aten::linalg_ldl_solve")
def _ldl_solve(
    packed: jax.Array, pivots: jax.Array, b: jax.Array, *, hermitian: bool = False
) -> jax.Array:
    if b.size == 0:
        return jnp.zeros(_solution_shape(packed, b), b.dtype)
    lead = jnp.broadcast_shapes(packed.shape[:-2], b.shape[:-2])
    packed, b = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (packed, b))
    pivots = jnp.broadcast_to(pivots, (*lead, pivots.shape[-1]))
    return _batched(functools.partial(_solve_matrix, hermitian), 2, packed, pivots, b)


def _solution_shape(packed: jax.Array, b: jax.Array) -> tuple[int, ...]:
    return (*jnp.broadcast_shapes(packed.shape[:-2], b.shape[:-2]), *b.shape[-2:])
