"""Maximum and minimum over devices, keeping NaN.

XLA's maximum over the devices of a mesh may forget a NaN that one of them has found; on CPUs it
does. So extremes of floats are found as those of integers in the same order, where NaN is beyond
all numbers. What is sent stays the same.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def keeping_nan(
    reduce: Callable[[jax.Array], jax.Array], x: jax.Array, *, least: bool
) -> jax.Array:
    """What `reduce` makes of floats, NaN where it met one.

    Returns:
        What it gives, of the dtype of `x`.

    Example:
        >>> keeping_nan(jnp.max, jnp.array([-1.5, 2.0, -jnp.inf]), least=False).item()
        2.0
        >>> keeping_nan(jnp.min, jnp.array([-1.5, 2.0, jnp.nan]), least=True).item()
        nan
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return reduce(x)
    kind = jnp.dtype(f"int{8 * x.dtype.itemsize}")
    limits = jnp.iinfo(kind)
    beyond = limits.min if least else limits.max
    bits = jax.lax.bitcast_convert_type(x, kind)
    found = reduce(jnp.where(jnp.isnan(x), beyond, _turned(bits)))
    back = jax.lax.bitcast_convert_type(_turned(found), x.dtype)
    return jnp.where(found == beyond, jnp.asarray(jnp.nan, x.dtype), back)


def _turned(bits: jax.Array) -> jax.Array:
    """The bits of floats as integers of their order, or the reverse: below 0 they run backward."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)
