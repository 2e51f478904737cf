"""Orthogonal polynomials `P_n(x)`, by their three-term recurrences.

The degree is a tensor too, so the recurrence runs up to the largest degree in it, and each element
keeps the value at its own. A negative degree gives 0.

>>> chebyshev = _evaluate(*_FAMILIES["chebyshev_polynomial_t"])
>>> print(chebyshev(jnp.array([0.5, 0.5, 2.0]), jnp.array([0.0, 2.0, 3.0])))
[ 1.  -0.5 26. ]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .registry import lower

_HERMITE_LIMIT = {4: 128, 8: 512}  # torch gives NaN beyond this degree, by bytes of the dtype


def _evaluate(first: Callable[..., Any], step: Callable[..., Any]) -> Callable[..., Any]:
    """The polynomial with `P_0 = 1`, `P_1 = first(x)`, `P_(k+1) = step(k, x, P_k, P_(k-1))`."""

    def run(x: jax.Array, n: jax.Array) -> jax.Array:
        x, n = jnp.broadcast_arrays(x, n)
        degree = jnp.where(jnp.isfinite(n), jnp.trunc(n), -1)
        largest = jnp.max(degree, initial=-1)
        zero, p_0 = jnp.zeros_like(x), jnp.ones_like(x)
        start = first(x)
        low = jnp.where(degree == 0, p_0, jnp.where(degree == 1, start, zero))

        def advance(
            state: tuple[jax.Array, jax.Array, jax.Array, jax.Array],
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            k, before, last, result = state
            fresh = step(k, x, last, before)
            return k + 1, last, fresh, jnp.where(degree == k + 1, fresh, result)

        k = jnp.ones((), x.dtype)
        return lax.while_loop(lambda state: state[0] < largest, advance, (k, p_0, start, low))[3]

    return run


def _double(x: jax.Array) -> jax.Array:
    return x + x


def _shifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The polynomial on [0, 1] in place of [-1, 1]."""
    return lambda x, n: function(x + x - 1, n)


def _limited(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: jax.Array, n: jax.Array) -> jax.Array:
        beyond = (n >= _HERMITE_LIMIT[x.dtype.itemsize] + 1) & jnp.isfinite(n)
        return jnp.where(beyond, jnp.nan, function(x, n))

    return run


def _chebyshev(k: jax.Array, x: jax.Array, last: jax.Array, before: jax.Array) -> jax.Array:
    return 2 * x * last - before


_FAMILIES = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev),
    "chebyshev_polynomial_u": (_double, _chebyshev),
    "chebyshev_polynomial_v": (lambda x: x + x - 1, _chebyshev),
    "chebyshev_polynomial_w": (lambda x: x + x + 1, _chebyshev),
    "hermite_polynomial_h": (_double, lambda k, x, last, before: 2 * x * last - 2 * k * before),
    "hermite_polynomial_he": (lambda x: x, lambda k, x, last, before: x * last - k * before),
    "laguerre_polynomial_l": (
        lambda x: 1 - x,
        lambda k, x, last, before: ((2 * k + (1 - x)) * last - k * before) / (k + 1),
    ),
    "legendre_polynomial_p": (
        lambda x: x,
        lambda k, x, last, before: ((2 * k + 1) * x * last - k * before) / (k + 1),
    ),
}


def _register(name: str, function: Callable[..., Any]) -> None:
    overloads = (name, f"{name}.n_scalar", f"{name}.x_scalar")
    lower(*(f"aten::special_{each}" for each in overloads), promote="float")(function)


for _name, _functions in _FAMILIES.items():
    _function = _evaluate(*_functions)
    _register(_name, _limited(_function) if "hermite" in _name else _function)
    if "chebyshev" in _name:
        _register(f"shifted_{_name}", _shifted(_function))
