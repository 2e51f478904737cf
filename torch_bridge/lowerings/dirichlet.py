"""How a Dirichlet draw moves with its concentrations.

A component `x` of such a draw is Beta distributed, with `alpha` and `beta = total - alpha`. If it
moves with alpha so that it is the same quantile, its derivative is -(d cdf / d alpha) / pdf, which
has no closed form. As in torch there are four approximations, good to about a thousandth: two
series near the ends, a saddle point expansion where alpha and beta are large, and a fitted rational
function between. Source: ATen/native/Distributions.h, also of the coefficients.

>>> import numpy as np
>>> x, alpha, total = np.float32([0.5, 1, 2])
>>> print(f"{jax.jit(dirichlet_grad)(x, alpha, total):.3f}")  # cdf x**alpha: -x log(x) / (1 - x)
0.693
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch

from .argument_forms import wide
from .elementwise import digamma
from .registry import lower

# Index: numerator or denominator, power of u, power of a, power of b.
_COEFFICIENTS = (
    (
        (
            (1.003668233, -0.01061107488, -0.0657888334, 0.01201642863),
            (0.6336835991, -0.3557432599, 0.05486251648, -0.001465281033),
            (-0.03276231906, 0.004474107445, 0.002429354597, -0.0001557569013),
        ),
        (
            (0.221950385, -0.3187676331, 0.01799915743, 0.01074823814),
            (-0.2951249643, 0.06219954479, 0.01535556598, 0.001550077057),
            (0.02155310298, 0.004170831599, 0.001292462449, 6.976601077e-05),
        ),
        (
            (-0.05980841433, 0.008441916499, 0.01085618172, 0.002319392565),
            (0.02911413504, 0.01400243777, -0.002721828457, 0.000751041181),
            (0.005900514878, -0.001936558688, -9.495446725e-06, 5.385558597e-05),
        ),
    ),
    (
        (
            (1.0, -0.02924021934, -0.04438342661, 0.007285809825),
            (0.6357567472, -0.3473456711, 0.05454656494, -0.002407477521),
            (-0.03301322327, 0.004845219414, 0.00231480583, -0.0002307248149),
        ),
        (
            (0.5925320577, -0.1757678135, 0.01505928619, 0.000564515273),
            (0.1014815858, -0.06589186703, 0.01272886114, -0.0007316646956),
            (-0.007258481865, 0.001096195486, 0.0003934994223, -4.12701925e-05),
        ),
        (
            (0.06469649321, -0.0236701437, 0.002902096474, -5.896963079e-05),
            (0.001925008108, -0.002869809258, 0.0008000589141, -6.063713228e-05),
            (-0.0003477407336, 6.959756487e-05, 1.097287507e-05, -1.650964693e-06),
        ),
    ),
)


@lower("aten::_dirichlet_grad", meta=lambda x, alpha, total: torch.empty_like(x))
def dirichlet_grad(x: jax.Array, alpha: jax.Array, total: jax.Array) -> jax.Array:
    """The derivative of `x` by `alpha`, over 1 - x; all of one shape."""
    x, alpha, total = wide(x), wide(alpha), wide(total)
    beta = total - alpha
    edge = total * x * (1 - x)
    gradient = _between(x, alpha, beta)
    gradient = jnp.where((alpha > 6) & (beta > 6), _of_large(x, alpha, beta), gradient)
    gradient = jnp.where(
        (x >= 0.5) & (edge < 0.75), -_derivative_in_beta_at_0(1 - x, beta, alpha), gradient
    )
    return jnp.where((x <= 0.5) & (edge < 2.5), _derivative_in_alpha_at_0(x, alpha, beta), gradient)


def _derivative_in_alpha_at_0(x: jax.Array, alpha: jax.Array, beta: jax.Array) -> jax.Array:
    factor = digamma(alpha) - digamma(alpha + beta) - jnp.log(x)
    power, series = 1.0, 1 / alpha * (factor + 1 / alpha)
    for i in range(1, 11):
        power = power * (i - beta) * x / i
        series += power / (alpha + i) * (factor + 1 / (alpha + i))
    derivative = x * (1 - x) ** -beta * series
    return jnp.where(jnp.isnan(derivative), 0, derivative)


def _derivative_in_beta_at_0(x: jax.Array, alpha: jax.Array, beta: jax.Array) -> jax.Array:
    factor = digamma(alpha + beta) - digamma(beta)
    power, product, derivative, series = 1.0, 1.0, 0.0, factor / alpha
    for i in range(1, 9):
        power = power * -x / i
        derivative = derivative * (beta - i) + product
        product = product * (beta - i)
        series += power / (alpha + i) * (derivative + factor * product)
    total = -((1 - x) ** (1 - beta)) * series
    return jnp.where(jnp.isnan(total), 0, total)


def _of_large(x: jax.Array, alpha: jax.Array, beta: jax.Array) -> jax.Array:
    """The saddle point expansion; its terms grow towards the mean and cancel.

    torch computes it in float64. Here every term is written in the distance from the mean, which
    leaves enough digits in float32.
    """
    total = alpha + beta
    mean = alpha / total
    away = x - mean
    left, right = away / mean, -away / (beta / total)
    deviation = jnp.sqrt(alpha * beta / (total + 1)) / total
    scale = jnp.sqrt(2 * alpha * beta / total)
    numerator = 2 * alpha**2 * (x - 1) + alpha * beta * (x - 1) - x * beta**2
    numerator = numerator / (jnp.sqrt(2 * alpha / beta) * total**3.5 * away**2)
    divergence = -alpha * _log1p_less(left) - beta * _log1p_less(right)
    sides = 2 * scale / (total * away) - jnp.sign(away) * divergence**-1.5
    far = numerator - jnp.log1p(left) / 2 * sides
    far = -x / scale * _stirling(alpha) * _stirling(beta) / _stirling(total) * far
    return jnp.where(jnp.abs(away) <= 0.1 * deviation, _at_mean(x, alpha, beta), far)


def _at_mean(x: jax.Array, alpha: jax.Array, beta: jax.Array) -> jax.Array:
    """As `_of_large`, within a tenth of the deviation; of parts of degree 0, or none overflows."""
    total = alpha + beta
    a, b, s = alpha / total, beta / total, 1 / total
    third = (453 * s + 1620 * b * (1 - x) - 455 * x * s) * b + a * 8 * (1 - x) * (135 * b - 11 * s)
    second = 3 * (59 * s + 180 * b - 90 * x * s) * b**2 + a * third
    first = (43 * s + 20 * (16 * s + 27 * b) * x) * b**3 + a * second
    poly = 47 * x * s * b**4 + a * first
    shape = (s + 12 * a) * (s + 12 * b) / (12960 * a**3 * b**2 * (s + 12))
    return shape / (1 - x) * poly * s


def _log1p_less(x: jax.Array) -> jax.Array:
    """The logarithm of 1 + x, less x."""
    near = jnp.abs(x) < 0.25
    small = jnp.where(near, x, 0)
    series = sum((-1) ** (k + 1) / k * small**k for k in range(12, 1, -1))
    return jnp.where(near, series, jnp.log1p(x) - x)


def _stirling(x: jax.Array) -> jax.Array:
    return 1 + 1 / (12 * x) + 1 / (288 * x**2)


def _between(x: jax.Array, alpha: jax.Array, beta: jax.Array) -> jax.Array:
    total = alpha + beta
    u = jnp.log(x)
    a = jnp.log(alpha) - u
    b = jnp.log(total) - a
    above, below = (
        sum(
            u**i * a**j * (c[0] + b * (c[1] + b * (c[2] + b * c[3])))
            for i, row in enumerate(table)
            for j, c in enumerate(row)
        )
        for table in _COEFFICIENTS
    )
    return above / below * x * (digamma(total) - digamma(alpha)) / beta
