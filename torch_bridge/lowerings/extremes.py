"""Largest and smallest elements that keep NaN also where an axis is split over devices.

XLA's maximum over the CPU devices of a mesh forgets a NaN that one of them has found. So in a
program on a mesh, whether there is one is computed separately.

>>> float(largest(jnp.array([1.0, jnp.nan, 3.0])))
nan
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .unsharded_axes import on_a_mesh


def largest(x: jax.Array, axis: Any = None, *, keepdims: bool = False, **initial: Any) -> jax.Array:
    """`jnp.max`, and NaN where there is one."""
    return _guarded(jnp.max(x, axis, keepdims=keepdims, **initial), x, axis, keepdims)


def smallest(
    x: jax.Array, axis: Any = None, *, keepdims: bool = False, **initial: Any
) -> jax.Array:
    """`jnp.min`, and NaN where there is one."""
    return _guarded(jnp.min(x, axis, keepdims=keepdims, **initial), x, axis, keepdims)


def _guarded(result: jax.Array, x: jax.Array, axis: Any, keepdims: bool) -> jax.Array:
    if not on_a_mesh() or not jnp.issubdtype(x.dtype, jnp.inexact):
        return result
    return jnp.where(jnp.any(jnp.isnan(x), axis, keepdims=keepdims), jnp.nan, result)


def written(result: jax.Array, x: jax.Array, where: Any, source: jax.Array) -> jax.Array:
    """What a maximum or minimum scattered into `x[where]` is, and NaN where there is one."""
    if not on_a_mesh() or not jnp.issubdtype(x.dtype, jnp.inexact):
        return result
    has_nan = jnp.isnan(x).at[where].max(jnp.isnan(source))
    return jnp.where(has_nan, jnp.nan, result)
