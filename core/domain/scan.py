"""Running sums along an axis that is split: a local one, and the totals of the shards before.

>>> import numpy as np
>>> from isoshard.core.mesh import make_mesh
>>> from isoshard.core.place import shard
>>> rows = shard(np.arange(1, 9), make_mesh((4,), ("x",)), ("x",))
>>> cumsum(rows, 0).tolist()
[1, 3, 6, 10, 15, 21, 28, 36]

Each device gets one total from each other, and no rows (the compiler alone gathers the axis).
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from isoshard.core.uneven import UnevenArray

from .arguments import Faults, is_whole
from .layouts import Layout, layout_of


def cumsum(x: Any, axis: int, *, reverse: bool = False, mesh: Any = None, spec: Any = None) -> Any:
    """Sum the rows up to each one.

    Args:
        x: a jax.Array or UnevenArray of numbers.
        axis: along which axis.
        reverse: sum from the last row instead of the first.
        mesh: with `spec`, how `x` lies; needed inside `jax.jit`.
        spec: any spelling of a spec.

    Returns:
        An array as `x`: same dtype, layout and sizes.

    Raises:
        ShardingError: an argument does not fit.
    """
    faults = Faults("cumsum")
    ndim = len(x.shape)
    inside = is_whole(axis) and -ndim <= axis < ndim
    faults.unless(inside, f"axis {axis!r} is none of the {ndim} axes")
    faults.unless(x.dtype != bool, "x is of bool; convert it to the integers to sum in")
    faults.raise_any()
    layout = layout_of(x, mesh, spec, verb="cumsum")
    out = _cumsum(layout, axis % ndim, reverse, x.array if layout.uneven else x)
    return UnevenArray(out, x.shape, x.sizes) if layout.uneven else out


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _cumsum(layout: Layout, axis: int, reverse: bool, array: Any) -> Any:
    array = lax.with_sharding_constraint(array, layout.sharding)
    sizes = np.array(layout.sizes[axis], np.int32)[:, None]
    valid = (np.arange(layout.blocks[axis]) < sizes).reshape(-1)
    valid = valid.reshape((-1,) + (1,) * (array.ndim - axis - 1))
    out = _sums(layout, axis, reverse, jnp.where(valid, array, 0))
    return jnp.where(valid, out, 0)  # so that no gradient comes from padding


def _sums(layout: Layout, axis: int, reverse: bool, array: Any) -> Any:
    names, shards = layout.names[axis], len(layout.sizes[axis])
    if not names:
        return lax.cumsum(array, axis, reverse)
    spec, manual = layout.manual()

    def shard(block: Any, number: Any) -> Any:
        sums = lax.cumsum(block, axis, reverse)
        last = 0 if reverse else block.shape[axis] - 1
        totals = lax.all_gather(lax.index_in_dim(sums, last, axis), names, axis=axis, tiled=True)
        others = jnp.arange(shards)
        counted = others > number if reverse else others < number
        counted = counted.reshape((-1,) + (1,) * (block.ndim - axis - 1))
        return sums + jnp.where(counted, totals, 0).sum(axis, keepdims=True, dtype=sums.dtype)

    numbers = np.arange(shards, dtype=np.int32)
    return jax.shard_map(
        shard,
        mesh=layout.mesh,
        in_specs=(spec, P(names)),
        out_specs=spec,
        axis_names=manual,
    )(array, numbers)
