"""Fourier transforms as a primitive of JAX: linear, and each device transforms its own lines.

XLA gathers all that an fft reads, also along axes that are whole. This one is compiled as
`fourier_split` says. Its gradient is made of transforms of the same kind, so nothing is gathered
there either. Where layouts cannot be asked for (`custom_partitioning.possible`) it is `jnp.fft`.

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

from isoshard.core.layout import custom_partitioning
from isoshard.core.runtime._jax_internals.primitive_rules import ShapedArray
from isoshard.core.runtime.primitives import new_primitive

from .fourier_split import Along, split_transform, whole_transform


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
        return _complex("fft", _bound(x, Along("rfft", (last,))), others)
    return _bound(_complex("ifft", x, others), Along("irfft", (last,), length))


def _complex(kind: str, x: Any, axes: Sequence[int]) -> Any:
    """The same along any number of axes; one of a single element stays as it is."""
    axes = tuple(axis for axis in axes if x.shape[axis] != 1)
    return _bound(x, Along(kind, axes)) if axes else x


def _bound(x: Any, along: Along) -> Any:
    return (
        fourier.bind(x, along=along)
        if custom_partitioning.possible()
        else whole_transform(along, x)
    )


def _result(x: Any, *, along: Along) -> ShapedArray:
    found = jax.eval_shape(lambda x: whole_transform(along, x), x)
    return ShapedArray(found.shape, found.dtype)


def _transposed(slope: Any, x: Any, *, along: Along) -> list[Any]:
    """The transforms are linear and symmetric, but for the half that a real one leaves away."""
    if along.kind in ("fft", "ifft"):
        return [_bound(slope, along)]
    (axis,) = along.axes
    shape = x.aval.shape
    if along.kind == "rfft":
        widths = [(0, have - got) for have, got in zip(shape, slope.shape, strict=True)]
        return [_bound(jnp.pad(slope, widths), Along("fft", (axis,))).real]
    half = _bound(slope, Along("rfft", (axis,)))
    # All but the first and, of an even length, the last stand for two of the whole spectrum.
    twice = jnp.full(shape[axis], 2, slope.dtype).at[0].set(1)
    twice = twice.at[-1].set(1) if along.length % 2 == 0 else twice
    return [(half * twice.reshape((-1,) + (1,) * (len(shape) - axis - 1))).conj()]


def _batched(arrays: Sequence[Any], batched: Sequence[Any], *, along: Along) -> Any:
    (x,), (at,) = arrays, batched
    axes = tuple(axis + (axis >= at) for axis in along.axes)
    return _bound(x, along._replace(axes=axes)), at


fourier = new_primitive(
    "fourier",
    lambda x, *, along: split_transform(along, x),
    _result,
    eager=jax.jit(lambda x, *, along: fourier.bind(x, along=along), static_argnames="along"),
    transpose=_transposed,
    batch=_batched,
    devices=True,
)
