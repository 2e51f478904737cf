"""Conversions to and from floats of eight bits, with torch's rounding.

>>> to_float8(jnp.array([600.0, 3.0]), jnp.float8_e4m3fn).tolist()
[448.0, 3.0]
>>> to_float8(jnp.array([3.0, -1.4]), jnp.float8_e8m0fnu).tolist()
[4.0, 1.0]
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

E4M3, E8M0 = np.dtype(jnp.float8_e4m3fn), np.dtype(jnp.float8_e8m0fnu)
FLOAT8 = frozenset(
    map(np.dtype, (E4M3, E8M0, jnp.float8_e5m2, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz))
)
_UNSIGNED_ZERO = frozenset(map(np.dtype, (jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz)))
_TINY = float(jnp.finfo(jnp.float32).tiny)


def to_float8(x: jax.Array, dtype: Any) -> jax.Array:
    """Real numbers as floats of eight bits, rounded twice as torch does: to float32 first.

    Args:
        x: of another dtype.
        dtype: one of `FLOAT8`.
    """
    if dtype == E8M0:
        return _exponents(x)
    x = from_float8(x, jnp.float32)
    if dtype == E4M3 and _saturates():
        x = jnp.where(jnp.isnan(x), x, jnp.clip(x, -448.0, 448.0))
    if dtype in _UNSIGNED_ZERO:  # XLA without fusion emitters makes -0.0 of what rounds to 0: NaN
        x = jnp.where(jnp.abs(x) <= float(jnp.finfo(dtype).smallest_subnormal) / 2, 0.0, x)
    return x.astype(dtype)


def from_float8(x: jax.Array, dtype: Any) -> jax.Array:
    """Numbers in a float dtype of 16 bits or more; XLA's CPU takes 2^-127 of e8m0 for 0."""
    if x.dtype != E8M0:
        return x.astype(dtype)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint8).astype(jnp.uint32)
    single = jnp.where(bits == 0, 0x00400000, jnp.where(bits == 255, 0x7FC00000, bits << 23))
    result = jax.lax.bitcast_convert_type(single.astype(jnp.uint32), jnp.float32)
    if dtype == jnp.float64:
        return jnp.where(bits == 0, 2.0**-127, result.astype(dtype))
    return result.astype(dtype)


def _exponents(x: jax.Array) -> jax.Array:
    """The powers of two nearest to magnitudes, the larger one of two; NaN for what is infinite."""
    if x.dtype == np.float64:  # XLA's CPU rounds what float32 has as denormal numbers to 0
        small = jnp.abs(x) < _TINY
        denormal = jnp.round(jnp.where(small, jnp.abs(x), 0) * 2.0**149).astype(jnp.uint32)
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        bits = jnp.where(small, denormal, bits)
    else:
        bits = jax.lax.bitcast_convert_type(from_float8(x, jnp.float32), jnp.uint32)
    exponent, fraction = (bits >> 23) & 255, bits & 0x7FFFFF
    up = (fraction > 0x400000) | ((fraction == 0x400000) & (exponent > 0))
    exponent = jnp.where(exponent == 255, exponent, exponent + up)
    return jax.lax.bitcast_convert_type(exponent.astype(jnp.uint8), E8M0)


@functools.cache
def _saturates() -> bool:
    """Whether this torch takes the largest float8_e4m3fn for what is too large: from 2.13 on."""
    return not torch.full((1,), 600.0).to(torch.float8_e4m3fn).float().isnan().item()
