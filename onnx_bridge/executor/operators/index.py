"""Operators that read or write at indices: gather and scatter, in their three forms each.

Negative indices count from the end. An index outside a tensor is an error if the indices are known
while compiling; else it reads NaN (of integers, the smallest), and writes nothing.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import ModelError
from .operator_arguments import axis_of, choice, library, on_device
from .registry import largest, operator, outer

_REDUCTIONS = {"none": "set", "add": "add", "mul": "multiply", "max": "max", "min": "min"}


@operator("Gather", known=("indices",), host=outer)
def gather(data, indices, *, axis=0):
    """The slices of `data` along an axis that the indices name."""
    axis = axis_of(axis, data.ndim)
    if not isinstance(indices, np.ndarray):
        return jnp.take(data, indices, axis=axis)
    positions = _checked(indices, data.shape[axis], axis)
    if positions.ndim == 0:
        return data[(slice(None),) * axis + (int(positions),)]
    if library(data) is np:
        return np.take(data, positions, axis=axis)
    return jnp.take(data, on_device(positions, "indices"), axis=axis)


@operator("GatherElements", since=11)
def gather_elements(data, indices, *, axis=0):
    """Of each place of `indices`, the element of `data` there, its place along `axis` replaced."""
    axis = axis_of(axis, data.ndim)
    leading = tuple(slice(None) if d == axis else slice(n) for d, n in enumerate(indices.shape))
    return jnp.take_along_axis(data[leading], indices, axis=axis)


@operator("GatherND", since=11)
def gather_nd(data, indices, *, batch_dims=0):
    """The slices of `data` at the index tuples in the last axis of `indices`."""

    if not 0 <= batch_dims < min(data.ndim, indices.ndim):
        raise ModelError(f"batch_dims is {batch_dims}, of tensors {data.shape}, {indices.shape}")

    def gather_slices(data, indices):
        return data.at[tuple(jnp.moveaxis(indices, -1, 0))].get(mode="fill")

    for _ in range(batch_dims):
        gather_slices = jax.vmap(gather_slices)
    return gather_slices(data, indices)


@operator("ScatterElements", since=11)
def scatter_elements(data, indices, updates, *, axis=0, reduction="none"):
    """`data` with each update written at its own place, that along `axis` replaced."""
    axis = axis_of(axis, data.ndim)
    positions = list(jnp.indices(indices.shape, jnp.int32, sparse=True))
    positions[axis] = indices
    return _write(data, tuple(jnp.broadcast_arrays(*positions)), updates, reduction)


@operator("ScatterND", since=11)
def scatter_nd(data, indices, updates, *, reduction="none"):
    """`data` with updates written at the index tuples in the last axis of `indices`."""
    return _write(data, tuple(jnp.moveaxis(indices, -1, 0)), updates, reduction)


@operator("NonZero", since=9, host=lambda inputs: inputs[0].ndim * inputs[0].size)
def nonzero(x):
    """The places of what is not zero, a column each; of values known while compiling."""
    if library(x) is np:
        return np.stack(np.nonzero(x)).astype(np.int64)
    raise ModelError(
        "NonZero makes as many columns as the input has elements that are not zero, and shapes "
        "must be known when a program is compiled: use Where or a mask"
    )


@operator("Compress", since=9, static=("condition",), host=largest)
def compress(x, condition, *, axis=None):
    """The slices along an axis (or the elements) at which a condition holds."""
    if axis is None:
        x, axis = x.reshape(-1), 0
    positions = np.nonzero(condition.reshape(-1))[0]
    return library(x).take(x, positions.astype(np.int32), axis=axis_of(axis, x.ndim))


@operator("ReverseSequence", since=10)
def reverse_sequence(x, sequence_lens, *, batch_axis=1, time_axis=0):
    """The first `sequence_lens[i]` steps of sequence i backwards, the rest as it is."""
    y = jnp.moveaxis(x, (batch_axis, time_axis), (0, 1))
    time = jnp.arange(y.shape[1], dtype=sequence_lens.dtype)
    lens = sequence_lens[:, None]
    positions = jnp.where(time < lens, lens - 1 - time, time)
    turned = jax.vmap(lambda row, position: row[position])(y, positions)
    return jnp.moveaxis(turned, (0, 1), (batch_axis, time_axis))


@operator("TensorScatter", since=24)
def tensor_scatter(past_cache, update, write_indices=None, *, axis=-2, mode="linear"):
    """A cache with `update` written along an axis, from an index per batch element on."""
    axis = axis_of(axis, past_cache.ndim)
    batch, size, count = past_cache.shape[0], past_cache.shape[axis], update.shape[axis]
    first = jnp.zeros(batch, jnp.int32) if write_indices is None else write_indices
    positions = first[:, None].astype(jnp.int32) + jnp.arange(count, dtype=jnp.int32)
    if choice(mode, "mode", ("linear", "circular")) == "circular":
        positions %= size
    cache, new = (jnp.moveaxis(x, axis, 1) for x in (past_cache, update))
    written = jax.vmap(lambda row, position, rows: row.at[position].set(rows, mode="drop"))(
        cache, positions, new
    )
    return jnp.moveaxis(written, 1, axis)


def _checked(indices: np.ndarray, size: int, axis: int) -> np.ndarray:
    """Indices from the front."""
    if indices.size and not (-size <= indices.min() and indices.max() < size):
        raise ModelError(
            f"indices {int(indices.min())}..{int(indices.max())} leave axis {axis} of size {size}"
        )
    return np.where(indices < 0, indices + size, indices)


def _write(data: jax.Array, positions: tuple[Any, ...], updates: jax.Array, reduction: str):
    """Write at places, in a form that XLA's partitioner treats rightly.

    XLA turns a scatter of a single index into a slice, and adds the offsets of two slices on a
    mesh; so a single index gets company: a second one outside, at which nothing is written.
    """
    method = _REDUCTIONS[choice(reduction, "reduction", tuple(_REDUCTIONS))]
    if positions[0].size == 1:
        nowhere = [np.full((1,), n, np.int32) for n in data.shape]
        positions = tuple(
            jnp.concatenate([position.reshape(1).astype(jnp.int32), far])
            for position, far in zip(positions, nowhere, strict=False)
        )
        updates = updates.reshape(1, *data.shape[len(positions) :])
        updates = jnp.concatenate([updates, jnp.zeros_like(updates)])
    return getattr(data.at[positions], method)(updates, mode="drop")
