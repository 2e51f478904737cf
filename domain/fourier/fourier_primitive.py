"""Fourier transforms as a primitive of JAX: linear, and each device transforms its own lines.

XLA gathers all that an fft reads, also along axes that are not split. This one is compiled as
`fourier_split` says. Its gradient is made of transforms of the same kind, so nothing is gathered
there either. Where shardings are not available (`custom_partitioning.possible`) it is `jnp.fft`.

>>> print(transform("rfft", jnp.arange(4.0), (0,)))
[ 6.+0.j -2.+2.j -2.+0.j]
>>> print(transform("irfft", transform("rfft", jnp.arange(4.0), (0,)), (0,), 4) / 4)
[0. 1. 2. 3.]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from isoshard.core.kit import ShapedArray, custom_partitioning, new_primitive

from .fourier_split import FourierOp, replicated_transform, split_transform


def transform(kind: str, x: Any, axes: Sequence[int], length: int = 0) -> Any:
    """Transform along some axes; nothing is divided by their length."""
    *others, last = [axis % x.ndim for axis in axes]
    if kind == "rfft" and x.shape[last] == 1:
        x, kind = x.astype(jnp.result_type(x, jnp.complex64)), "fft"
    if kind == "irfft" and length == 1:
        return _complex("ifft", lax.slice_in_dim(x, 0, 1, axis=last), others).real
    if kind in ("fft", "ifft"):
        return _complex(kind, x, (*others, last))
    if kind == "rfft":
        return _complex("fft", _bound(x, FourierOp("rfft", (last,))), others)
    return _bound(_complex("ifft", x, others), FourierOp("irfft", (last,), length))


def _complex(kind: str, x: Any, axes: Sequence[int]) -> Any:
    """The same along any number of axes; one of a single element is unchanged."""
    axes = tuple(axis for axis in axes if x.shape[axis] != 1)
    return _bound(x, FourierOp(kind, axes)) if axes else x


def _bound(x: Any, op: FourierOp) -> Any:
    return fourier.bind(x, op=op) if custom_partitioning.possible() else replicated_transform(op, x)


def _result(x: Any, *, op: FourierOp) -> ShapedArray:
    result = jax.eval_shape(lambda x: replicated_transform(op, x), x)
    return ShapedArray(result.shape, result.dtype)


def _transposed(cotangent: Any, x: Any, *, op: FourierOp) -> list[Any]:
    """The transforms are linear and symmetric, but for the half that a real one leaves away."""
    if op.kind in ("fft", "ifft"):
        return [_bound(cotangent, op)]
    (axis,) = op.axes
    shape = x.aval.shape
    if op.kind == "rfft":
        widths = [(0, have - size) for have, size in zip(shape, cotangent.shape, strict=True)]
        return [_bound(jnp.pad(cotangent, widths), FourierOp("fft", (axis,))).real]
    half = _bound(cotangent, FourierOp("rfft", (axis,)))
    # All but the first and, of an even length, the last represent two of the full spectrum.
    twice = jnp.full(shape[axis], 2, cotangent.dtype).at[0].set(1)
    twice = twice.at[-1].set(1) if op.length % 2 == 0 else twice
    return [(half * twice.reshape((-1,) + (1,) * (len(shape) - axis - 1))).conj()]


def _batched(arrays: Sequence[Any], batched: Sequence[Any], *, op: FourierOp) -> Any:
    (x,), (at,) = arrays, batched
    axes = tuple(axis + (axis >= at) for axis in op.axes)
    return _bound(x, op._replace(axes=axes)), at


fourier = new_primitive(
    "fourier",
    lambda x, *, op: split_transform(op, x),
    _result,
    eager=jax.jit(lambda x, *, op: fourier.bind(x, op=op), static_argnames="op"),
    transpose=_transposed,
    batch=_batched,
    devices=True,
)
