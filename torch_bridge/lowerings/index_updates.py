"""Slices and writes at one index, in a form that XLA's partitioner computes correctly.

XLA turns a scatter of a single index into a slice read at that index, a choice and a slice written.
On devices whose shard does not contain the index it is out of range, and where the array was itself
sliced from one that every device had, XLA adds the two offsets without bringing the inner one
inside: it reads another element and writes that. And a slice written to an axis that is split loses
what follows it, or does not compile, where the slice itself was sharded otherwise (jax 0.10.2:
one in 25 of random programs). So on a mesh a static index or slice is chosen by
position, and of a dynamic index two are scattered, the second dropped: a scatter of two
is not turned into slices. A slice that begins at 0 may be the same array as its source on every
device, and where both are resharded XLA takes one for the other ("Expected instruction to have
shape equal to f32[5], actual shape is f32[8]"); so it is sliced from a copy in name only.

>>> put(jnp.zeros(3), np.array([1]), jnp.ones(1))
Array([0., 1., 0.], dtype=float32)
>>> write(jnp.zeros(3), (jnp.array([2]),), jnp.array(5.0), "add")
Array([0., 0., 5.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .argument_forms import as_scalar, in_bounds_indices
from .unsharded_axes import named, on_a_mesh

_SCATTERS: dict[str, Any] = {
    "set": lax.scatter,
    "add": lax.scatter_add,
    "multiply": lax.scatter_mul,
    "max": lax.scatter_max,
    "min": lax.scatter_min,
}


def put(flat: jax.Array, indices: np.ndarray | jax.Array, updates: jax.Array) -> jax.Array:
    """`flat` (1-d) with `updates` at `indices`, an array of its shape; a single one is known."""
    if indices.size == 1:
        index = indices.item()
        return write_slice(flat, updates.reshape(-1), 0, index, index + 1)
    return flat.at[indices].set(updates)


def read_slice(
    x: jax.Array, dim: int, start: int, stop: int | None = None, step: int = 1
) -> jax.Array:
    """`x[start:stop:step]` along an axis.

    Args:
        x: at least 1-d.
        dim: the axis.
        start: the first index; at least 0, as `stop`, which is at most the size.
        stop: after the last index; None for the end.
        step: from one index to the next.

    >>> read_slice(jnp.arange(6), 0, 1, 6, 2)
    Array([1, 3, 5], dtype=int32)
    """
    if start == 0 and step == 1 and stop not in (None, x.shape[dim]):
        x = named(x)
    return lax.slice_in_dim(x, start, stop, step, dim)


def leading(x: jax.Array, sizes: Sequence[int]) -> jax.Array:
    """The first `sizes[d]` elements along each axis `d`; at most as many as there are."""
    return x if x.shape == tuple(sizes) else lax.slice(named(x), [0] * x.ndim, sizes)


def write_slice(
    x: jax.Array, updates: jax.Array, dim: int, start: Any, stop: Any, step: int = 1
) -> jax.Array:
    """`x` with `start:stop:step` along an axis replaced by `updates`.

    Args:
        x: at least 1-d.
        updates: with as many elements along the axis as the slice.
        dim: the axis.
        start: the first index; at least 0, as `stop`, which is at most the size. Both may be
            traced, without a step; on a mesh if the slice has one element.
        stop: after the last index.
        step: from one index to the next.

    >>> write_slice(jnp.zeros(6), jnp.array([1.0, 2.0]), 0, 1, 5, 2)
    Array([0., 1., 0., 2., 0., 0.], dtype=float32)
    """
    updates = updates.astype(x.dtype)
    if step == 1 and updates.shape == x.shape:
        return updates
    if on_a_mesh():
        position = lax.broadcasted_iota(jnp.int32, x.shape, dim)
        inside = (position >= start) & (position < stop)
        if step > 1:
            inside = inside & ((position - start) % step == 0)
        single = updates.shape[dim] == 1
        return jnp.where(
            inside, updates if single else spread(updates, x.shape[dim], dim, start, step), x
        )
    if step == 1:
        # Under vmap this is a scatter that JAX lowers in the caller's setting, often of 32 bits.
        if max(x.shape) < 2**31:
            start = np.int32(start) if isinstance(start, int) else start.astype(jnp.int32)
        return lax.dynamic_update_slice_in_dim(x, updates, start, dim)
    return x.at[(slice(None),) * dim + (slice(start, stop, step),)].set(updates)


def spread(x: jax.Array, size: int, dim: int, start: int, step: int) -> jax.Array:
    """Zeros of length `size` along `dim` with `x` at `start`, `start + step`, .."""
    if step > 1 and on_a_mesh():
        x, step = _dilated(x, dim, step), 1
    used = start + (x.shape[dim] - 1) * step + 1 if x.shape[dim] else start
    edges = [(0, 0, 0)] * x.ndim
    edges[dim] = (start, size - used, step - 1)
    return lax.pad(x, as_scalar(0, x.dtype), edges)


def _dilated(x: jax.Array, dim: int, step: int) -> jax.Array:
    """`x` with `step - 1` zeros between neighbours along an axis.

    XLA's partitioner misplaces, or rejects, a pad with such zeros over several devices.
    """
    count = max(0, (x.shape[dim] - 1) * step + 1)
    edges = [(0, 0)] * (x.ndim + 1)
    edges[dim + 1] = (0, step - 1)
    wide = jnp.pad(jnp.expand_dims(x, dim + 1), edges)
    wide = wide.reshape(*x.shape[:dim], x.shape[dim] * step, *x.shape[dim + 1 :])
    return lax.slice_in_dim(wide, 0, count, axis=dim)


def write(
    x: jax.Array, where: tuple[Any, ...], src: jax.Array, method: str, mode: str | None = None
) -> jax.Array:
    """`getattr(x.at[where], method)(src, mode=mode)`.

    Args:
        x: at least 1-d.
        where: index arrays and full slices.
        src: what is written; can be broadcast to `x[where]`.
        method: "set", "add", "multiply", "max" or "min".
        mode: what becomes of an index out of range: dropped (None), or "clip".
    """
    axes = [d for d, index in enumerate(where) if not isinstance(index, slice)]
    if not on_a_mesh() or any(where[d].size != 1 or where[d].dtype == bool for d in axes):
        return getattr(x.at[where], method)(src, mode=mode)
    start = jnp.stack([_inside(where[d].reshape(()), x.shape[d], mode) for d in axes])
    nowhere = jnp.array([x.shape[d] for d in axes], start.dtype)
    rest = [extent for d, extent in enumerate(x.shape) if d not in axes]
    values = jnp.broadcast_to(src, jax.eval_shape(lambda: x[where]).shape).reshape(rest)
    dimensions = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, 1 + len(rest))),
        inserted_window_dims=tuple(axes),
        scatter_dims_to_operand_dims=tuple(axes),
    )
    indices, updates = jnp.stack([start, nowhere]), jnp.stack([values, values]).astype(x.dtype)
    return _SCATTERS[method](x, indices, updates, dimensions, mode="drop")


def _inside(index: jax.Array, size: int, mode: str | None) -> jax.Array:
    index = in_bounds_indices(index, size)
    index = jnp.where(index < 0, index + size, index)
    return jnp.clip(index, 0, size - 1) if mode == "clip" else index
