"""The regularised incomplete gamma functions P(a, x) and Q(a, x) = 1 - P(a, x).

Near x = a, for large a, a sum in 32 bits has lost its digits before it starts, in the exponent of
x**a * exp(-x) / gamma(a). There, the uniform expansion of Temme (DLMF 8.12) replaces it:

    Q(a, x) = erfc(eta * sqrt(a / 2)) / 2 + exp(-a * eta**2 / 2) / sqrt(2 * pi * a) * S
    S = c_0(eta) + c_1(eta) / a + c_2(eta) / a**2 + ...
    eta**2 / 2 = mu - log(1 + mu),  mu = (x - a) / a,  eta with the sign of mu

>>> round(float(jax.jit(regularized_lower)(2000.0, 2010.0)), 4)
0.5912
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction

import jax
import jax.numpy as jnp
import jax.scipy.special as jss
import numpy as np

_STIRLING = tuple(
    Fraction(*pair)
    for pair in ((1, 1), (1, 12), (1, 288), (-139, 51840), (-571, 2488320), (163879, 209018880))
)
"""gamma(a + 1) = sqrt(2 * pi * a) * (a / e)**a * sum(g_k / a**k)."""

_TERMS = 14
"""Powers of eta in each c_k: they converge to |eta| = 3.5, and |eta| is below 0.4 here."""


def regularized_lower(a: jax.Array, x: jax.Array) -> jax.Array:
    """P(a, x), as `torch.special.gammainc`; operands broadcast, of one floating dtype."""
    return _either(jss.gammainc, -1, a, x)


def regularized_upper(a: jax.Array, x: jax.Array) -> jax.Array:
    """Q(a, x), as `torch.special.gammaincc`; operands broadcast, of one floating dtype."""
    return _either(jss.gammaincc, 1, a, x)


def _either(
    sums: Callable[[jax.Array, jax.Array], jax.Array], sign: int, a: jax.Array, x: jax.Array
) -> jax.Array:
    a, x = jnp.broadcast_arrays(a, x)
    large = 1000 if a.dtype == jnp.float64 else 20
    near = (a > large) & (jnp.abs(x - a) < 0.3 * a) & jnp.isfinite(a)
    ends = _ends(a, x, jnp.asarray(max(sign, 0), a.dtype))
    outside = near | functools.reduce(jnp.logical_or, [where for where, _ in ends])
    # Elements of no region may not converge, so they are masked.
    out = sums(jnp.where(outside, 1, a), jnp.where(outside, 1, x))
    near_out = _temme(jnp.where(near, a, 2000), jnp.where(near, x, 2000), sign)
    out = jnp.where(near, near_out, out)
    for where, value in reversed(ends):
        out = jnp.where(where, value, out)
    return out


def _ends(a: jax.Array, x: jax.Array, empty: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Where there is nothing to sum, and what torch gives there; the first that holds counts."""
    full, nan = 1 - empty, jnp.asarray(jnp.nan, a.dtype)
    return [
        ((a < 0) | (x < 0), nan),
        (a == 0, jnp.where(x > 0, full, nan)),
        (x == 0, empty),
        (jnp.isinf(a), jnp.where(jnp.isinf(x), nan, empty)),
        (jnp.isinf(x), full),
        (jnp.isnan(a) | jnp.isnan(x), nan),
    ]


def _temme(a: jax.Array, x: jax.Array, sign: int) -> jax.Array:
    mu = (x - a) / a
    half_square = _without_log(mu)
    eta = jnp.copysign(jnp.sqrt(2 * half_square), mu)
    total = jnp.zeros_like(a)
    for row in reversed(_expansion()):
        total = total / a + _polynomial(row, eta)
    rest = jnp.exp(-a * half_square) / jnp.sqrt(2 * np.pi * a) * total
    return jss.erfc(sign * eta * jnp.sqrt(a / 2)) / 2 + sign * rest


def _without_log(mu: jax.Array) -> jax.Array:
    """mu - log(1 + mu) for |mu| < 0.32, without the digits that the difference would lose."""
    return mu * mu * _polynomial([(-1) ** k / (k + 2) for k in range(16)], mu)


def _polynomial(coefficients: Sequence[float], x: jax.Array) -> jax.Array:
    total = jnp.zeros_like(x)
    for coefficient in reversed(coefficients):
        total = total * x + float(coefficient)
    return total


@functools.cache
def _expansion() -> list[list[float]]:
    """The power series of each c_k in eta: c_k = c_(k-1)' / eta + (-1)**k * g_k / mu."""
    orders = len(_STIRLING) - 1
    length = _TERMS + 2 * orders
    inverse = _inverse_of_mu(length + 2)  # of eta / mu
    rows = [inverse[1:]]  # 1 / mu - 1 / eta
    for k in range(1, orders):
        derivative = [n * value for n, value in enumerate(rows[-1])][1:]
        pole = [(-1) ** k * _STIRLING[k] * value for value in inverse]
        rows.append([term + other for term, other in zip(derivative, pole, strict=False)][1:])
    return [[float(value) for value in row[:_TERMS]] for row in rows]


def _inverse_of_mu(length: int) -> list[Fraction]:
    """eta / mu as a power series in eta, from mu * dmu/deta = eta * (1 + mu)."""
    ratio = [Fraction(1)]  # mu / eta
    for n in range(1, length):
        # The coefficient of eta**(n + 1) on both sides, with mu = sum(ratio[i] * eta**(i + 1)).
        partial = sum((ratio[i] * ratio[n - i] * (n - i + 1) for i in range(1, n)), Fraction(0))
        ratio.append((ratio[n - 1] - partial) / (n + 2))
    inverse = [Fraction(1)]
    for n in range(1, length):
        inverse.append(-sum((ratio[i] * inverse[n - i] for i in range(1, n + 1)), Fraction(0)))
    return inverse
