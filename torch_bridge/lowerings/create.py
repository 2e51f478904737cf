"""New arrays: constants, ranges, identities.

>>> from isoshard.torch_bridge.lowerings import registry
>>> registry.find(torch.ops.aten.arange.start_step).function(1, 2, 0.5, shape=(2,))
Array([1. , 1.5], dtype=float32)

Ranges are computed in the program, not stored in it. `empty` and its like are zeros: JAX has no
uninitialised memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import jax.scipy.special as jss
import numpy as np
import torch  # noqa: F401  (for the doctest)

from .argument_forms import as_scalar, cast, index_dtype
from .float8 import E8M0
from .memory_order import lower_cloned
from .registry import lower


def _zeros(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Zeros; a float dtype without zero has its least value."""
    return (
        jnp.zeros(shape, dtype) if dtype != E8M0 else jnp.broadcast_to(as_scalar(0.0, dtype), shape)
    )


@lower("aten::zeros", "aten::empty.memory_format", "aten::_efficientzerotensor")
def zeros(size: Sequence[int], *, dtype: np.dtype | None = None) -> jax.Array:
    """Zeros of a shape."""
    return _zeros(tuple(size), dtype or jnp.float32)


@lower("aten::ones")
def ones(size: Sequence[int], *, dtype: np.dtype | None = None) -> jax.Array:
    """Ones of a shape."""
    return jnp.ones(tuple(size), dtype or jnp.float32)


@lower("aten::full", lift=("fill_value",))
def full(
    size: Sequence[int], fill_value: jax.Array | complex, *, dtype: np.dtype | None = None
) -> jax.Array:
    """A constant array of a shape."""
    return jnp.broadcast_to(_scalar(fill_value, dtype), tuple(size))


@lower("aten::scalar_tensor", lift=("s",))
def scalar_tensor(s: jax.Array | complex, *, dtype: np.dtype | None = None) -> jax.Array:
    """A scalar as a 0-d array."""
    return _scalar(s, dtype)


def _scalar(value: jax.Array | complex, dtype: np.dtype | None) -> jax.Array:
    own = value.dtype if isinstance(value, jax.Array) else jnp.result_type(type(value))
    return as_scalar(value, dtype or own)


@lower("aten::empty_strided", "aten::empty_permuted")
def empty_strided(
    size: Sequence[int], layout: Sequence[int], *, dtype: np.dtype | None = None
) -> jax.Array:
    """Zeros of a shape; strides are the engine's concern."""
    return zeros(size, dtype=dtype)


@lower_cloned("aten::zeros_like", "aten::empty_like")
def zeros_like(x: jax.Array, *, dtype: np.dtype | None = None) -> jax.Array:
    """Zeros in the shape of `x`."""
    return _zeros(x.shape, dtype or x.dtype)


@lower("aten::zero")
def zero(x: jax.Array) -> jax.Array:
    """Zeros in the shape and dtype of `x`."""
    return _zeros(x.shape, x.dtype)


@lower_cloned("aten::ones_like")
def ones_like(x: jax.Array, *, dtype: np.dtype | None = None) -> jax.Array:
    """Ones in the shape of `x`."""
    return jnp.ones_like(x, dtype=dtype)


@lower_cloned("aten::full_like", lift=("fill_value",))
def full_like(
    x: jax.Array, fill_value: jax.Array | complex, *, dtype: np.dtype | None = None
) -> jax.Array:
    """A constant array of the shape of `x`."""
    return jnp.broadcast_to(as_scalar(fill_value, dtype or x.dtype), x.shape)


@lower("aten::new_zeros", "aten::new_empty")
def new_zeros(x: jax.Array, size: Sequence[int], *, dtype: np.dtype | None = None) -> jax.Array:
    """Zeros of a shape in the dtype of `x`."""
    return _zeros(tuple(size), dtype or x.dtype)


@lower("aten::new_empty_strided")
def new_empty_strided(
    x: jax.Array, size: Sequence[int], stride: Sequence[int], *, dtype: np.dtype | None = None
) -> jax.Array:
    """Zeros of a shape in the dtype of `x`."""
    return new_zeros(x, size, dtype=dtype)


@lower("aten::new_ones")
def new_ones(x: jax.Array, size: Sequence[int], *, dtype: np.dtype | None = None) -> jax.Array:
    """Ones of a shape in the dtype of `x`."""
    return jnp.ones(tuple(size), dtype or x.dtype)


@lower("aten::new_full", lift=("fill_value",))
def new_full(
    x: jax.Array,
    size: Sequence[int],
    fill_value: jax.Array | complex,
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """A constant array of a shape, in the dtype of `x`."""
    return jnp.broadcast_to(as_scalar(fill_value, dtype or x.dtype), tuple(size))


@lower("aten::eye", "aten::eye.m")
def eye(n: int, m: int | None = None, *, dtype: np.dtype | None = None) -> jax.Array:
    """The identity matrix of n rows and m columns."""
    return cast(jnp.eye(n, m, dtype=bool), dtype or jnp.float32)


@lower("aten::arange", sized=True)
def arange(end: float, *, shape: Sequence[int], dtype: np.dtype | None = None) -> jax.Array:
    """0, 1, .. below `end`."""
    return arange_step(0, end, shape=shape, dtype=dtype)


@lower("aten::arange.start", "aten::arange.start_step", sized=True)
def arange_step(
    start: float,
    end: float,
    step: float = 1,
    *,
    shape: Sequence[int],
    dtype: np.dtype | None = None,
) -> jax.Array:
    """`start`, `start + step`, .. before `end`; releases of torch differ in how many integers."""
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        start, step = int(start), int(step)
    return _steps(start, step, shape[0], dtype)


@lower("aten::range", "aten::range.step")
def range_step(
    start: float, end: float, step: float = 1, *, dtype: np.dtype | None = None
) -> jax.Array:
    """`start`, `start + step`, .. up to and with `end`."""
    return _steps(start, step, math.floor((end - start) / step) + 1, dtype)


def _steps(start: float, step: float, count: int, dtype: np.dtype | None) -> jax.Array:
    if isinstance(start, int) and isinstance(step, int):
        ends = (start, start + step * count, count)
        return start + jax.lax.iota(index_dtype(*ends), count) * step
    return start + jax.lax.iota(_real(dtype), count) * step


def _real(dtype: np.dtype | None) -> np.dtype:
    """The float dtype that numbers of a dtype are computed in."""
    exact = dtype is not None and dtype in (jnp.float64, jnp.complex128, jnp.int64, jnp.uint64)
    return np.dtype(np.float64 if exact else np.float32)


@lower(
    "aten::linspace",
    "aten::linspace.Tensor_Tensor",
    "aten::linspace.Tensor_Scalar",
    "aten::linspace.Scalar_Tensor",
    lift=("start", "end"),
)
def linspace(
    start: jax.Array | complex,
    end: jax.Array | complex,
    steps: int,
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """`steps` evenly spaced numbers from `start` to `end`, counted from the nearer end."""
    real = _real(dtype)
    start, end = jnp.asarray(start), jnp.asarray(end)
    if not (jnp.iscomplexobj(start) or jnp.iscomplexobj(end)):
        start, end = start.astype(real), end.astype(real)
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        start, end = jnp.trunc(start), jnp.trunc(end)
    index = jax.lax.iota(real, steps)
    step = (end - start) / max(steps - 1, 1)
    near = index < max(steps // 2, 1)
    return jnp.where(near, start + step * index, end - step * (steps - 1 - index))


@lower(
    "aten::logspace",
    "aten::logspace.Tensor_Tensor",
    "aten::logspace.Tensor_Scalar",
    "aten::logspace.Scalar_Tensor",
    lift=("start", "end"),
)
def logspace(
    start: jax.Array | complex,
    end: jax.Array | complex,
    steps: int,
    base: float = 10.0,
    *,
    dtype: np.dtype | None = None,
) -> jax.Array:
    """`base` to the power of `steps` evenly spaced numbers."""
    return jnp.power(base, linspace(start, end, steps, dtype=dtype))


@lower("aten::kaiser_window", "aten::kaiser_window.periodic", "aten::kaiser_window.beta")
def kaiser_window(
    window_length: int, periodic: bool = True, beta: float = 12.0, *, dtype: np.dtype | None = None
) -> jax.Array:
    """The Kaiser window: Bessel's I0 over a half circle."""
    if window_length <= 1:
        return jnp.ones((window_length,), dtype or jnp.float32)
    half = (window_length if periodic else window_length - 1) / 2
    position = jax.lax.iota(_real(dtype), window_length) / half - 1
    return jss.i0(beta * jnp.sqrt(1 - position * position)) / jss.i0(_real(dtype).type(beta))


@lower("aten::tril_indices")
def tril_indices(
    row: int, col: int, offset: int = 0, *, dtype: np.dtype | None = None
) -> jax.Array:
    """Rows and columns of the lower triangle of a (row, col) matrix."""
    return jnp.asarray(np.stack(np.tril_indices(row, offset, col)).astype(np.int32))


@lower("aten::triu_indices")
def triu_indices(
    row: int, col: int, offset: int = 0, *, dtype: np.dtype | None = None
) -> jax.Array:
    """Rows and columns of the upper triangle of a (row, col) matrix."""
    return jnp.asarray(np.stack(np.triu_indices(row, offset, col)).astype(np.int32))
