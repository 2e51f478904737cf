"""Normalizations: statistics over axes, and the gradient that all of them share.

With `y = (x - mean) * rstd` normalized over some axes and `g` the gradient of `y`, the gradient of
`x` is

    rstd * (g - average(g) - y * average(g * y))

where the averages run over those axes; the middle term is absent when no mean was subtracted, and
both are when the statistics are constants (batch norm in evaluation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .precision import averaged


def statistics(
    x: jax.Array, axes: Sequence[int], eps: float, mean_of: Callable[..., Any] = averaged
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mean, variance and reciprocal standard deviation over axes, which are kept with size 1.

    Args:
        x: floats, of the width that they are to be added up in.
        axes: those that are normalized.
        eps: added to the variance.
        mean_of: takes the means: `averaged`, or `jnp.mean`.

    >>> print(*jax.jit(statistics, static_argnums=1)(jnp.array([1.0, 3.0]), (0,), 0.0))
    [2.] [1.] [1.]
    """
    mean = mean_of(x, axes, keepdims=True)
    variance = mean_of(jnp.square(x - mean), axes, keepdims=True)
    return mean, variance, lax.rsqrt(variance + eps)


def reciprocal_rms(
    x: jax.Array, axes: Sequence[int], eps: float, mean_of: Callable[..., Any] = averaged
) -> jax.Array:
    """One over the root of the mean square; arguments as of `statistics`."""
    return lax.rsqrt(mean_of(jnp.square(x), axes, keepdims=True) + eps)


def affine(y: jax.Array, scale: jax.Array | None, shift: jax.Array | None) -> jax.Array:
    """Scale and shift, each unless None."""
    y = y if scale is None else y * scale
    return y if shift is None else y + shift


def input_gradient(
    g: jax.Array, y: jax.Array, rstd: jax.Array, axes: Sequence[int], *, centred: bool = True
) -> jax.Array:
    """The gradient of the input of a normalization."""
    g_y = jnp.mean(g * y, axis=axes, keepdims=True)
    g_mean = jnp.mean(g, axis=axes, keepdims=True) if centred else 0
    return rstd * (g - g_mean - y * g_y)
