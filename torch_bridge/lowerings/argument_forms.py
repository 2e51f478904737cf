"""aten's axes, scalars and half precisions in JAX; shared by the lowerings.

Softmax, norms, losses and smooth activations of a bfloat16 tensor are computed by torch in float32
and rounded once at the end: `wide`, `wide_all`, `widely`. float32 and wider are unchanged, so their
compiled program is what one would write by hand.

>>> axes([-1], 3), axes([], 3), axes(0, 0)
((2,), (0, 1, 2), ())
>>> as_scalar(2**32 + 5, jnp.dtype("int32"))
Array(5, dtype=int32)
>>> print(*(x.dtype for x in wide_all(jnp.ones(2, "bfloat16"), None, jnp.ones(2)) if x is not None))
float32 float32
>>> widely(lambda x: x.dtype)(jnp.ones(2, "float16"))
dtype('float32')
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.nn.precision import wide as wide
from isoshard.core.nn.precision import wide_dtype as wide_dtype
from isoshard.torch_bridge.common.dtypes import NARROW

from .float8 import FLOAT8, from_float8, to_float8


def axes(dim: int | Sequence[int] | None, ndim: int) -> tuple[int, ...]:
    """The axes an aten reduction means by `dim`: None and `[]` are all, 0-d arrays have none."""
    if dim is None or ndim == 0:
        return tuple(range(ndim))
    dims = [dim] if isinstance(dim, int) else dim
    return tuple(d % ndim for d in dims) or tuple(range(ndim))


def axis(dim: int, ndim: int) -> int:
    """One axis counted from the front; torch lets a 0-d tensor have axis 0."""
    return dim % max(ndim, 1)


def per_axis(values: int | Sequence[int], rank: int) -> tuple[int, ...]:
    """One value per spatial axis; torch takes a single value for all."""
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * rank if len(values) == 1 else values


def index_dtype(*ends: int) -> np.dtype:
    """The narrowest dtype, from int32 on, for integers between bounds."""
    fits = all(-(2**31) <= end < 2**31 for end in ends)
    return np.dtype(np.int32 if fits else np.int64)


def in_bounds_indices(index: jax.Array, size: int) -> jax.Array:
    """Indices along an axis in 32 bits, if its size fits; out of range remains out of range.

    Devices count in 32 bits faster, TPUs much so.

    Args:
        index: integers; other dtypes are returned unchanged.
        size: of the axis.
    """
    if index.dtype not in (jnp.int64, jnp.uint64) or index_dtype(size + 1) == np.int64:
        return index
    bounds = np.iinfo(np.int32)
    return jnp.clip(index, bounds.min, bounds.max).astype(np.int32)


def first_index(function: Any, x: jax.Array, axis: int, *, keepdims: bool = False) -> jax.Array:
    """Where the first largest or smallest element along an axis is, or the first NaN.

    Args:
        function: `jax.lax.argmax` or `jax.lax.argmin`.
        x: at least 1-d.
        axis: counted from either end.
        keepdims: keep the axis, with one element.
    """
    axis %= x.ndim
    index = function(x, axis, index_dtype(x.shape[axis]))
    return jnp.expand_dims(index, axis) if keepdims else index


def lengths(shape: Sequence[int], along: Sequence[int]) -> int:
    """How many elements are reduced to one over the axes `along`."""
    return int(np.prod([shape[a] for a in along], dtype=np.int64))


def as_scalar(value: Any, dtype: np.dtype) -> jax.Array:
    """`value` as a 0-d array of `dtype`.

    An integer out of range wraps, as in torch: `-1` is 255 to a uint8 tensor. But where 64 bits are
    kept in 32 the bounds of int64 become those of int32: torch code writes them for "no bound".
    """
    if type(value) is int and jnp.issubdtype(dtype, jnp.integer):
        low, high = int(jnp.iinfo(dtype).min), int(jnp.iinfo(dtype).max)
        if NARROW and dtype.itemsize == 4 and value in (2**63 - 1, -(2**63)):
            value = min(max(value, low), high)
        value = (value - low) % (high - low + 1) + low
    elif type(value) is int and jnp.issubdtype(dtype, jnp.inexact):
        value = float(value)  # of any size: JAX takes an int for one of 32 or 64 bits
    elif type(value) is int:
        value = bool(value)
    return cast(jnp.asarray(value), dtype)


def cast(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """`x` as `dtype`; of complex numbers the real part, but as bool whether they are not 0."""
    if x.dtype == dtype and not getattr(x, "weak_type", False):
        return x  # at once: steps cast each operand
    if jnp.iscomplexobj(x) and not jnp.issubdtype(dtype, jnp.complexfloating):
        x = x != 0 if np.dtype(dtype).kind == "b" else jnp.real(x)
    if dtype in FLOAT8:
        return to_float8(x, dtype)
    if x.dtype in FLOAT8:
        single = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize > 1
        x = from_float8(x, dtype if single else jnp.float32)
    if x.dtype == bool and jnp.issubdtype(dtype, jnp.inexact):
        # XLA takes a converted bool times x for a choice between x and 0, also where x is infinite.
        return jnp.where(x, jnp.ones((), dtype), jnp.zeros((), dtype))
    if jnp.issubdtype(x.dtype, jnp.floating) and jnp.issubdtype(dtype, jnp.signedinteger):
        return _truncated(x, np.int32 if np.dtype(dtype).itemsize < 4 else dtype).astype(dtype)
    if jnp.issubdtype(x.dtype, jnp.floating) and dtype == jnp.uint8:
        return _truncated(x, np.int32).astype(dtype)
    return x.astype(dtype)


def _truncated(x: jax.Array, dtype: Any) -> jax.Array:
    """Floats as integers; what does not fit is the least integer, as on CPUs.

    XLA takes the nearest bound, and 0 for NaN.
    """
    least = float(jnp.iinfo(dtype).min)
    if float(jnp.finfo(x.dtype).max) < -least:  # float16
        x = x.astype(jnp.float32)
    fits = (x >= least) & (x < -least)
    return jnp.where(fits, x, least).astype(dtype)


def floating(x: jax.Array) -> jax.Array:
    """Integers and bool as float32, other arrays unchanged."""
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else cast(x, np.dtype(np.float32))


def at_least_1d(x: jax.Array) -> jax.Array:
    """A 0-d array as one of shape (1,), others unchanged."""
    return x if x.ndim else x.reshape(1)


def wide_all(*arrays: Any) -> tuple[Any, ...]:
    """The arrays in the one dtype that torch would compute in; None stays None."""
    widened = [wide(x) for x in arrays if x is not None]
    dtype = functools.reduce(jnp.promote_types, [x.dtype for x in widened])
    return tuple(None if x is None else x.astype(dtype) for x in arrays)


def widely(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hand the array arguments to `function` in the dtype that torch would compute in."""

    @functools.wraps(function)
    def widened(*args: Any, **kwargs: Any) -> Any:
        return function(*(wide(a) if isinstance(a, jax.Array) else a for a in args), **kwargs)

    return widened
