"""The Hurwitz zeta function, and the polygamma functions it gives.

Both are continued to the left of 0: zeta, for an integer exponent, by adding the terms up to 0;
polygamma by reflection, with derivatives of the cotangent.

>>> print(_cotangent_derivative(2))
[0, 2, 0, 2]
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as jss
from jax import lax

from .argument_forms import floating, wide
from .elementwise import digamma
from .registry import lower

_FARTHEST = 10_000  # terms that are added one by one; further left the result is NaN

_STEEPEST = 10_000  # an exponent with which the next term is always 0


def _left_terms(x: jax.Array, q: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The terms of the series whose base is negative, and the first base that is not."""
    count = jnp.where(jnp.isnan(q), 0, jnp.clip(jnp.ceil(-q), 0, _FARTHEST))

    def add(k: jax.Array, total: jax.Array) -> jax.Array:
        return total + jnp.where(k < count, (q + k) ** (-x), 0)

    last = jnp.max(count, initial=0).astype(jnp.int32)
    return lax.fori_loop(0, last, add, jnp.zeros_like(q)), q + count


@lower(
    "aten::special_zeta",
    "aten::special_zeta.self_scalar",
    "aten::special_zeta.other_scalar",
    promote="float",
)
def zeta(x: jax.Array, other: jax.Array) -> jax.Array:
    """The sum of `(other + k) ** -x` over k; infinite at its poles."""
    x, q = jnp.broadcast_arrays(x, other)
    left, start = _left_terms(x, q)
    pole = (x == 1) | (~(x < 1) & (q <= 0) & (q == jnp.floor(q)))
    undefined = (x < 1) | ((q < 0) & (x != jnp.floor(x))) | (start < 0)
    undefined |= jnp.isnan(x) | jnp.isnan(q)
    steep = x > _STEEPEST  # one term is left, or none
    start = jnp.maximum(start, 0)
    last = jnp.where(start > 1, jnp.nan, start ** (-x))  # torch divides 0 by 0 there
    value = left + jnp.where(steep, last, jss.zeta(jnp.clip(x, 1, _STEEPEST), start))
    return jnp.where(pole, jnp.inf, jnp.where(undefined, jnp.nan, value))


def _cotangent_derivative(n: int) -> list[int]:
    """The n-th derivative of the cotangent, as a polynomial in it (lowest power first)."""
    powers = [0, 1]
    for _ in range(n):
        coefficients = [k * a for k, a in enumerate(powers)][1:]
        powers = [-a for a in coefficients] + [0, 0]
        for k, a in enumerate(coefficients):
            powers[k + 2] -= a
    return powers


def _cotangent(turns: jax.Array) -> jax.Array:
    """The cotangent of pi times a value up to 1/2; exactly 0 there."""
    steep = jnp.sign(turns) * jnp.tan(math.pi * (0.5 - jnp.abs(turns)))
    return jnp.where(jnp.abs(turns) > 0.25, steep, 1 / jnp.tan(math.pi * turns))


@lower("aten::polygamma")
def polygamma(n: int, x: jax.Array) -> jax.Array:
    """The n-th derivative of digamma."""
    x = wide(floating(x))
    if n == 0:
        return digamma(x)
    sign = (-1.0) ** (n + 1)
    left = x < 0.5
    right = jnp.where(left, 1 - x, x)
    value = sign * math.factorial(n) * zeta(jnp.full_like(x, n + 1), right)
    fraction = jnp.where(left, x - jnp.round(x), 0.25)
    powers: list[Any] = _cotangent_derivative(n)
    derivative = jnp.polyval(jnp.asarray(powers[::-1], x.dtype), _cotangent(fraction))
    reflected = -sign * value - math.pi ** (n + 1) * derivative
    pole = left & (fraction == 0)
    if n == 1:
        value = jnp.where(x == jnp.inf, 0, value)
    else:
        pole |= x == -jnp.inf
    return jnp.where(pole, sign * jnp.inf, jnp.where(left, reflected, value))


@lower("aten::polygamma_", writes=("self",))
def polygamma_in_place(x: jax.Array, n: int) -> tuple[jax.Array]:
    """The in-place operator takes its arguments the other way round."""
    return (polygamma(n, x).astype(x.dtype),)
