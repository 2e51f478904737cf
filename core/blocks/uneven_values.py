"""Between `UnevenArray`s and the values of a lifted function.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> mesh = make_mesh((4,), ("x",))
>>> u = shard(jnp.arange(6.0), mesh, ("x",), uneven="pad", sizes=(1, 2, 0, 3))
>>> value = value_of(u)
>>> value.shape, value.splits[0].names
((6,), ('x',))
>>> operand_of(value).sizes
((1, 2, 0, 3),)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.spec import axis_names
from isoshard.core.layout.uneven import Sizes, UnevenArray, is_uneven

from .block_values import Frame, Splits, Value, as_value
from .hints import hints_of, sharding_from
from .splits import AxisSplit


def splits_of(u: UnevenArray) -> Splits:
    """The split of each axis of an array."""
    rank = len(u.array.shape)
    if rank != u.ndim:
        raise ShardingError(
            f"an UnevenArray of shape {u.shape} has an array of rank {rank}: it is batched by "
            "jax.vmap, which does not support blocks. Pass the batch as an axis, or "
            "write jax.vmap inside what is lifted: iso.domain.lift(jax.vmap(f))."
        )
    layout = u.sharding if isinstance(u.sharding, NamedSharding) else u.layout
    return splits_over(u.sizes, u.array.shape, layout)


def splits_over(sizes: Sizes, padded: Sequence[int], layout: NamedSharding | None) -> Splits:
    """The split of each axis, where a sharding splits it into as many blocks."""
    entries = () if layout is None else tuple(layout.spec)
    mesh = None if layout is None else auto(layout.mesh)
    splits: list[AxisSplit | None] = []
    for axis, size in enumerate(sizes):
        if size is None:
            splits.append(None)
            continue
        names = axis_names(entries[axis]) if axis < len(entries) else ()
        shards = int(np.prod([mesh.shape[name] for name in names])) if mesh is not None else 1
        names = names if shards == len(size) else ()
        splits.append(AxisSplit(size, padded[axis] // len(size), names, mesh))
    return tuple(splits)


def value_of(x: Any) -> Value:
    """An array, in blocks or not, as a value."""
    return frame_of(x).of(x.array) if is_uneven(x) else as_value(x)


def frame_of(u: UnevenArray) -> Frame:
    """The frame of an array: its blocks, and the sharding of its other axes."""
    layout = u.sharding if isinstance(u.sharding, NamedSharding) else u.layout
    return Frame(splits_of(u), hints_of(layout, u.ndim))


def operand_of(value: Value) -> Any:
    """A value as an array."""
    if mesh_of_blocks([value]) is None:
        return value.array
    layout = sharding_from(value.splits, value.hints, P.UNCONSTRAINED)
    sizes = [None if split is None else split.sizes for split in value.splits]
    return UnevenArray(value.array, value.shape, sizes, layout)


def placed(values: Sequence[Value]) -> bool:
    """Whether there are blocks, and all are on one known mesh."""
    return mesh_of_blocks(values) is not None


def mesh_of_blocks(values: Sequence[Value]) -> Mesh | None:
    """The mesh of the blocks; None where it is unknown, or not one."""
    splits = [split for value in values for split in value.splits if split is not None]
    meshes = {split.mesh if split.names else None for split in splits}
    return meshes.pop() if len(meshes) == 1 else None
