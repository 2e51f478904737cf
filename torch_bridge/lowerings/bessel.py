"""Bessel functions and the Airy function, by Moshier's (Cephes) approximations, as torch does.

>>> print(jax.jit(_bessel_j0)(jnp.array([0.0, 2.4048256])).round(5))
[ 1. -0.]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jax.scipy.special as jss

from . import bessel_tables as tables
from .registry import lower

_QUARTER = math.pi / 4
_ROOT_2_PI = math.sqrt(2 / math.pi)
_J0_ZEROS = (5.78318596294678452118, 30.4712623436620863991)  # squares of the first two
_J1_ZEROS = (14.6819706421238932572, 49.2184563216946036703)


def _polynomial(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """A polynomial in `x`, highest power first."""
    return jnp.polyval(jnp.asarray(coefficients, x.dtype), x)


def _chebyshev(x: jax.Array, coefficients: Sequence[float]) -> jax.Array:
    """A Chebyshev series in `x / 2`, by Clenshaw's recurrence."""
    before = last = jnp.zeros_like(x)
    value = jnp.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        before, last = last, value
        value = x * last - before + coefficient
    return 0.5 * (value - before)


def _ratio(x: jax.Array, top: Sequence[float], bottom: Sequence[float]) -> jax.Array:
    return _polynomial(x, top) / _polynomial(x, bottom)


def _asymptotic(order: int, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Amplitudes of the cosine and sine in Hankel's expansion, and the angle, for `x > 5`."""
    t = 25 / (x * x)
    p = _ratio(
        t, *((tables.PHASE0_PP, tables.PHASE0_PQ), (tables.PHASE1_PP, tables.PHASE1_PQ))[order]
    )
    q = _ratio(
        t, *((tables.PHASE0_QP, tables.PHASE0_QQ), (tables.PHASE1_QP, tables.PHASE1_QQ))[order]
    )
    scale = _ROOT_2_PI / jnp.sqrt(x)
    return p * scale, 5 / x * q * scale, x - _QUARTER * (1 + 2 * order)


def _first_kind(order: int, x: jax.Array) -> jax.Array:
    cosine, sine, angle = _asymptotic(order, jnp.maximum(x, 5))
    return cosine * jnp.cos(angle) - sine * jnp.sin(angle)


def _second_kind(order: int, x: jax.Array) -> jax.Array:
    cosine, sine, angle = _asymptotic(order, jnp.maximum(x, 5))
    return cosine * jnp.sin(angle) + sine * jnp.cos(angle)


@lower("aten::special_bessel_j0", promote="float")
def _bessel_j0(x: jax.Array) -> jax.Array:
    x = jnp.abs(x)
    s = x * x
    near = (s - _J0_ZEROS[0]) * (s - _J0_ZEROS[1]) * _ratio(s, tables.J0_TOP, tables.J0_BOTTOM)
    near = jnp.where(x < 1e-5, 1 - s / 4, near)
    return jnp.where(x <= 5, near, _first_kind(0, x))


@lower("aten::special_bessel_j1", promote="float")
def _bessel_j1(x: jax.Array) -> jax.Array:
    size = jnp.abs(x)
    s = x * x
    near = _ratio(s, tables.J1_TOP, tables.J1_BOTTOM) * size
    near = near * (s - _J1_ZEROS[0]) * (s - _J1_ZEROS[1])
    return jnp.where(x < 0, -1.0, 1.0) * jnp.where(size <= 5, near, _first_kind(1, size))


def _from_zero(x: jax.Array, value: jax.Array, pole: float) -> jax.Array:
    """`value` for positive `x`, `pole` at 0, NaN for negative `x`."""
    return jnp.where(x == 0, pole, jnp.where(x < 0, jnp.nan, value))


@lower("aten::special_bessel_y0", promote="float")
def _bessel_y0(x: jax.Array) -> jax.Array:
    s = x * x
    near = _ratio(s, tables.Y0_TOP, tables.Y0_BOTTOM) + 2 / math.pi * jnp.log(x) * _bessel_j0(x)
    return _from_zero(x, jnp.where(x <= 5, near, _second_kind(0, x)), -jnp.inf)


@lower("aten::special_bessel_y1", promote="float")
def _bessel_y1(x: jax.Array) -> jax.Array:
    near = x * _ratio(x * x, tables.Y1_TOP, tables.Y1_BOTTOM)
    near = near + 2 / math.pi * (_bessel_j1(x) * jnp.log(x) - 1 / x)
    return _from_zero(x, jnp.where(x <= 5, near, _second_kind(1, x)), -jnp.inf)


lower("aten::special_modified_bessel_i0", promote="float")(jss.i0)
lower("aten::special_modified_bessel_i1", promote="float")(jss.i1)


def _scaled_k0(x: jax.Array) -> jax.Array:
    """`exp(x) K0(x)`."""
    near = _chebyshev(x * x - 2, tables.K0_NEAR) - jnp.log(0.5 * x) * jss.i0(x)
    far = _chebyshev(8 / jnp.maximum(x, 2) - 2, tables.K0_FAR) / jnp.sqrt(x)
    return _from_zero(x, jnp.where(x <= 2, near * jnp.exp(jnp.minimum(x, 2)), far), jnp.inf)


def _scaled_k1(x: jax.Array) -> jax.Array:
    """`exp(x) K1(x)`."""
    near = _chebyshev(x * x - 2, tables.K1_NEAR) / x + jnp.log(0.5 * x) * jss.i1(x)
    far = _chebyshev(8 / jnp.maximum(x, 2) - 2, tables.K1_FAR) / jnp.sqrt(x)
    return _from_zero(x, jnp.where(x <= 2, near * jnp.exp(jnp.minimum(x, 2)), far), jnp.inf)


for _order, _scaled in enumerate((_scaled_k0, _scaled_k1)):
    lower(f"aten::special_scaled_modified_bessel_k{_order}", promote="float")(_scaled)
    lower(f"aten::special_modified_bessel_k{_order}", promote="float")(
        lambda x, scaled=_scaled: scaled(x) * jnp.exp(-x)
    )


@lower("aten::special_spherical_bessel_j0", promote="float")
def _spherical_j0(x: jax.Array) -> jax.Array:
    s = x * x
    series = [(-1.0) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)]
    far = jnp.where(jnp.isinf(x), 0.0, jnp.sin(x) / x)
    return jnp.where(jnp.abs(x) < 0.5, _polynomial(s, series), far)


_AI_AT_0, _DERIVATIVE_AT_0 = 0.355028053887817239260, 0.258819403792806798405


@lower("aten::special_airy_ai", promote="float")
def _airy_ai(x: jax.Array) -> jax.Array:
    """Waves left of -2.09, a Taylor series about 0, decay beyond 2.09; NaN at infinity."""
    left = jnp.minimum(x, -2.09)
    phase = -2 * left * jnp.sqrt(-left) / 3
    z = 1 / phase
    f = _ratio(z * z, tables.AIRY_SINE_TOP, tables.AIRY_SINE_BOTTOM)
    g = _ratio(z * z, tables.AIRY_COSINE_TOP, tables.AIRY_COSINE_BOTTOM)
    angle = phase + _QUARTER
    waves = jnp.sin(angle) * (1 + z * z * f) - jnp.cos(angle) * z * g
    waves = waves / (math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(-left)))
    right = jnp.maximum(x, 2.09)
    zeta = 2 * right * jnp.sqrt(right) / 3
    decay = _ratio(1 / zeta, tables.AIRY_DECAY_TOP, tables.AIRY_DECAY_BOTTOM)
    decay = decay / (2 * math.sqrt(math.pi) * jnp.sqrt(jnp.sqrt(right)) * jnp.exp(zeta))
    tail = jnp.where(x > 103.892, 0.0, decay)
    out = jnp.where(x < -2.09, waves, jnp.where(x >= 2.09, tail, _airy_series(x)))
    return jnp.where(jnp.isinf(x), jnp.nan, out)


def _airy_series(x: jax.Array) -> jax.Array:
    cube = jnp.clip(x, -2.09, 2.09) ** 3
    f = even = jnp.ones_like(x)
    g = odd = jnp.clip(x, -2.09, 2.09)
    for k in range(3, 40, 3):
        even = even * cube / ((k - 1) * k)
        odd = odd * cube / (k * (k + 1))
        f, g = f + even, g + odd
    return _AI_AT_0 * f - _DERIVATIVE_AT_0 * g
