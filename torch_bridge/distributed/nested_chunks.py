"""Shard sizes of an axis that several mesh dimensions split in turn, and do not divide.

DTensor splits with `torch.chunk`, and each shard with `torch.chunk` again:

>>> nested_chunks((10, 6), ((0, 1), None), (2, 2))
((0, (3, 2, 3, 2)),)
>>> nested_chunks((8, 6), ((0, 1), None), (2, 2))
()
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from isoshard.core.errors import UnevenError
from isoshard.torch_bridge.layout.marks import Chunks


def nested_chunks(
    shape: Sequence[int], entries: Sequence[Any], mesh_shape: Sequence[int]
) -> Chunks:
    """The axes with such shards, and the sizes of these in order.

    Args:
        shape: global.
        entries: for each axis the mesh dimension that splits it; a tuple of several; or None.
        mesh_shape: devices along each mesh dimension.

    Raises:
        UnevenError: the dimensions of an axis are not in their order, as with `_StridedShard`.
    """
    return tuple(
        (axis, _sizes(axis, shape[axis], dims, mesh_shape))
        for axis, dims in enumerate(entries)
        if isinstance(dims, tuple) and shape[axis] % math.prod(mesh_shape[dim] for dim in dims)
    )


def _sizes(
    axis: int, extent: int, dims: tuple[int, ...], mesh_shape: Sequence[int]
) -> tuple[int, ...]:
    if list(dims) != sorted(dims):
        raise UnevenError(
            f"axis {axis} of {extent} elements is split by the mesh dimensions {dims} in this "
            "order (_StridedShard), and they do not divide it: DTensor has no such shards either. "
            "Split it by one mesh dimension, or pad it."
        )
    sizes = [extent]
    for dim in dims:
        sizes = [chunk for size in sizes for chunk in _chunks(size, mesh_shape[dim])]
    return tuple(sizes)


def _chunks(size: int, count: int) -> list[int]:
    step = -(-size // count)
    return [min(max(size - at * step, 0), step) for at in range(count)]
