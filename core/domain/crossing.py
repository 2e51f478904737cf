"""Between `UnevenArray`s and the values of a lifted function.

>>> import jax.numpy as jnp
>>> from isoshard.core.mesh import make_mesh
>>> from isoshard.core.place import shard
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

from ..axis_types import auto
from ..errors import ShardingError
from ..spec import axis_names
from ..uneven import Sizes, UnevenArray, is_uneven
from .hints import hints_of, layout_told
from .splits import Split
from .values import Frame, Splits, Value, as_value


def splits_of(u: UnevenArray) -> Splits:
    """How each axis of an array lies in blocks.

    Args:
        u: the array.

    Returns:
        One `Split` per axis, None for those that are not padded.

    Raises:
        ShardingError: the array has another rank than its shape: it is batched.
    """
    rank = len(u.array.shape)
    if rank != u.ndim:
        raise ShardingError(
            f"an UnevenArray of shape {u.shape} holds an array of rank {rank}: it is batched by "
            "jax.vmap, which knows nothing of blocks. Give the function the batch as an axis, or "
            "write jax.vmap inside what is lifted: iso.domain.lift(jax.vmap(f))."
        )
    layout = u.sharding if isinstance(u.sharding, NamedSharding) else u.layout
    return splits_over(u.sizes, u.array.shape, layout)


def splits_over(sizes: Sizes, padded: Sequence[int], layout: NamedSharding | None) -> Splits:
    """How each axis lies in blocks, where a layout splits it into as many.

    Args:
        sizes: per axis the valid elements of each block, or None.
        padded: the shape of the padded array.
        layout: of that; None if it is not known.

    Returns:
        One `Split` per axis, None for those that are not padded.
    """
    entries = () if layout is None else tuple(layout.spec)
    mesh = None if layout is None else auto(layout.mesh)
    splits: list[Split | None] = []
    for axis, size in enumerate(sizes):
        if size is None:
            splits.append(None)
            continue
        names = axis_names(entries[axis]) if axis < len(entries) else ()
        parts = int(np.prod([mesh.shape[name] for name in names])) if mesh is not None else 1
        names = names if parts == len(size) else ()
        splits.append(Split(size, padded[axis] // len(size), names, mesh))
    return tuple(splits)


def value_of(x: Any) -> Value:
    """An array, in blocks or whole, as a value."""
    return frame_of(x).of(x.array) if is_uneven(x) else as_value(x)


def frame_of(u: UnevenArray) -> Frame:
    """How an array lies: in blocks, and along its other axes.

    Raises:
        ShardingError: as `splits_of`.
    """
    layout = u.sharding if isinstance(u.sharding, NamedSharding) else u.layout
    return Frame(splits_of(u), hints_of(layout, u.ndim))


def operand_of(value: Value) -> Any:
    """A value as an array.

    Args:
        value: in blocks that are `placed`, or whole.

    Returns:
        An UnevenArray; its layout is P.UNCONSTRAINED along an axis that is not padded, if it is not
        known how it lies. A whole value as it is.
    """
    if mesh_of_blocks([value]) is None:
        return value.array
    layout = layout_told(value.splits, value.hints, P.UNCONSTRAINED)
    sizes = [None if split is None else split.sizes for split in value.splits]
    return UnevenArray(value.array, value.shape, sizes, layout)


def placed(values: Sequence[Value]) -> bool:
    """Whether it is known on which devices of one mesh every block lies, and there are blocks."""
    return mesh_of_blocks(values) is not None


def mesh_of_blocks(values: Sequence[Value]) -> Mesh | None:
    """The mesh over which blocks lie; None where it is not known, or not one."""
    splits = [split for value in values for split in value.splits if split is not None]
    meshes = {split.mesh if split.names else None for split in splits}
    return meshes.pop() if len(meshes) == 1 else None
