"""Writes at one place, said so that XLA does not confuse two offsets on a mesh.

XLA turns a scatter of a single index into a slice read at that index, a choice and a slice written.
On the devices that the index does not belong to it lies outside, and where the array was itself
sliced from one that every device had, XLA adds the two offsets without bringing the inner one
inside: it reads another element and writes that. So a place known beforehand is written as a slice,
which the partitioner guards itself, and one that is not gets company: a second index, of which
nothing is written. Two indices are not turned into slices.

>>> put(jnp.zeros(3), np.array([1]), jnp.ones(1))
Array([0., 1., 0.], dtype=float32)
>>> write(jnp.zeros(3), (jnp.array([2]),), jnp.array(5.0), "add")
Array([0., 0., 5.], dtype=float32)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arguments import places
from .whole import on_a_mesh

_SCATTERS: dict[str, Any] = {
    "set": lax.scatter,
    "add": lax.scatter_add,
    "multiply": lax.scatter_mul,
    "max": lax.scatter_max,
    "min": lax.scatter_min,
}


def put(flat: jax.Array, places: np.ndarray | jax.Array, part: jax.Array) -> jax.Array:
    """`flat` (1-d) with `part` at `places`, an array of its shape; a single one is known."""
    if places.size == 1:
        return lax.dynamic_update_slice_in_dim(flat, part.reshape(-1), places.item(), 0)
    return flat.at[places].set(part)


def write(
    x: jax.Array, where: tuple[Any, ...], src: jax.Array, method: str, mode: str | None = None
) -> jax.Array:
    """`getattr(x.at[where], method)(src, mode=mode)`.

    Args:
        x: at least 1-d.
        where: index arrays and whole slices.
        src: what is written; can be broadcast to `x[where]`.
        method: "set", "add", "multiply", "max" or "min".
        mode: what becomes of an index out of range: dropped (None), or "clip".
    """
    axes = [d for d, index in enumerate(where) if not isinstance(index, slice)]
    if not on_a_mesh() or any(where[d].size != 1 or where[d].dtype == bool for d in axes):
        return getattr(x.at[where], method)(src, mode=mode)
    place = jnp.stack([_inside(where[d].reshape(()), x.shape[d], mode) for d in axes])
    nowhere = jnp.array([x.shape[d] for d in axes], place.dtype)
    rest = [extent for d, extent in enumerate(x.shape) if d not in axes]
    got = jnp.broadcast_to(src, jax.eval_shape(lambda: x[where]).shape).reshape(rest)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, 1 + len(rest))),
        inserted_window_dims=tuple(axes),
        scatter_dims_to_operand_dims=tuple(axes),
    )
    indices, updates = jnp.stack([place, nowhere]), jnp.stack([got, got]).astype(x.dtype)
    return _SCATTERS[method](x, indices, updates, numbers, mode="drop")


def _inside(index: jax.Array, size: int, mode: str | None) -> jax.Array:
    index = places(index, size)
    index = jnp.where(index < 0, index + size, index)
    return jnp.clip(index, 0, size - 1) if mode == "clip" else index
