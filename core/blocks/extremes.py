"""Maximum and minimum over devices, keeping NaN.

XLA's maximum over the devices of a mesh may drop a NaN of one of them; on CPUs it
does. So extremes of floats are computed on integers of the same order, where NaN is beyond
all numbers. As many bytes are sent.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp


def keeping_nan(
    reduce: Callable[[jax.Array], jax.Array], x: jax.Array, *, least: bool
) -> jax.Array:
    """`reduce` of floats, NaN where an element is NaN.

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
    extreme = reduce(jnp.where(jnp.isnan(x), beyond, _turned(bits)))
    back = jax.lax.bitcast_convert_type(_turned(extreme), x.dtype)
    return jnp.where(extreme == beyond, jnp.asarray(jnp.nan, x.dtype), back)


def _turned(bits: jax.Array) -> jax.Array:
    """The bits of floats as integers of their order, or the reverse: below 0 they run backward."""
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)
