"""Accumulation dtype: 16-bit floats are summed in float32, and rounded once.

>>> wide(jnp.ones(2, "bfloat16")).dtype, wide(jnp.ones(2, "int8")).dtype
(dtype('float32'), dtype('int8'))
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """float32 for 16-bit and smaller floats; other dtypes unchanged."""
    small = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32) if small else dtype


def wide(x: jax.Array) -> jax.Array:
    """16-bit and smaller floats as float32; other arrays unchanged."""
    dtype = wide_dtype(x.dtype)
    return x if dtype == x.dtype else x.astype(dtype)


def averaged(x: jax.Array, axes: Any = None, *, keepdims: bool = False) -> jax.Array:
    """The mean; of equal numbers exactly that number, of no elements NaN.

    XLA multiplies by the reciprocal of a constant divisor, and so rounds twice: the mean of seven
    times 1.5 would be 1.5000001. The barrier hides that the divisor is constant.

    Args:
        x: floats or complex numbers; 16-bit floats are summed in float32, and rounded once.
        axes: to average over; None for all.
        keepdims: whether they are kept, with size 1.

    >>> print(averaged(jnp.full(7, 1.5)))
    1.5
    """
    total = jnp.sum(wide(x), axes, keepdims=keepdims)
    count = math.prod(x.shape if axes is None else [x.shape[axis] for axis in axes])
    divisor = lax.optimization_barrier(jnp.full(total.shape, count, total.real.dtype))
    return (total / divisor).astype(x.dtype)
