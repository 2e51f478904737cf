"""The local ranges of a tensor axis: split as by `torch.chunk`, for one mesh axis after another.

`Shard` splits what the mesh axes to its left have left into as many chunks as there are devices:
the first ones of equal size, the last ones smaller or empty. `_StridedShard` splits it into parts
first, each of those into chunks, and a device has the same chunk of every part.

>>> chunk(0, 5, 4, 2)                                   # the third of four chunks of 5 elements
(4, 5)
>>> chunk_ranges(8, [(2, 0, 4)])                        # strided: the first half of every quarter
[(0, 1), (2, 3), (4, 5), (6, 7)]
>>> chunk_ranges(8, [(2, 0, 4), (4, 1, 1)])             # and of those the second of four
[(2, 3)]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from isoshard.core.errors import UnrepresentableError
from isoshard.core.runtime.caches import cached

from .placement_kinds import factor_of, split_axes


def local_shape_and_offset(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    placements: Sequence[Any],
    coordinate: Sequence[int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of one device's part of a tensor, and where it begins. Cached.

    Args:
        shape: global shape of the tensor.
        mesh_shape: devices along each mesh axis.
        placements: one per mesh axis; `Partial` and `Replicate` split nothing.
        coordinate: the device's index along each mesh axis.

    Returns:
        The local shape, and the index of its first element along each axis: the global extent for
        an empty shard, as in DTensor. A strided shard may be several ranges.

    Raises:
        IndexError, SpecError: as `spec_of`.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> local_shape_and_offset((5, 3), (2, 2), (Shard(0), Shard(0)), (1, 0))
        ((1, 3), (3, 0))
    """
    return _local(tuple(shape), tuple(mesh_shape), tuple(placements), tuple(coordinate))


@cached(8192)
def _local(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    placements: tuple[Any, ...],
    coordinate: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    local, offset = list(shape), [0] * len(shape)
    split = split_axes(placements, len(shape))
    for dim, axes in enumerate(split):
        if axes:
            steps = [
                (int(mesh_shape[a]), int(coordinate[a]), factor_of(placements[a])) for a in axes
            ]
            chunks = chunk_ranges(shape[dim], steps)
            local[dim] = sum(stop - start for start, stop in chunks)
            offset[dim] = chunks[0][0] if chunks else shape[dim]
    return tuple(local), tuple(offset)


def block_sizes(
    dim: int, extent: int, order: list[int], placements: Sequence[Any], mesh: Mesh
) -> tuple[int, ...] | None:
    """The valid sizes of the blocks along one tensor axis.

    Returns:
        One size per block, in the order of the spec; None if the axis divides.

    Raises:
        UnrepresentableError: a device's elements are not consecutive, or the blocks are not in
            order; uneven strided splits can be so.
    """
    shape = [mesh.axis_sizes[axis] for axis in order]
    if extent % math.prod(shape) == 0:
        return None
    sizes, end = [], 0
    for block in np.ndindex(*shape):
        at = dict(zip(order, block, strict=True))
        steps = [(mesh.axis_sizes[a], at[a], factor_of(placements[a])) for a in sorted(order)]
        chunks = chunk_ranges(extent, steps)
        if len(chunks) > 1 or (chunks and chunks[0][0] != end):
            raise UnrepresentableError(
                f"tensor axis {dim} of size {extent}, split by {tuple(placements)} over "
                f"{dict(mesh.shape)}, has on some device ranges that are not consecutive "
                f"({chunks}): no padded array has these blocks. Pad the axis to a multiple of "
                f"{math.prod(shape)}, or redistribute first."
            )
        end = chunks[0][1] if chunks else end
        sizes.append(sum(stop - start for start, stop in chunks))
    return tuple(sizes)


def chunk_ranges(extent: int, steps: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """A device's elements along an axis, as intervals in order, none empty, none adjacent.

    Args:
        extent: elements of the axis.
        steps: per mesh axis that splits it, from the left: devices, the device's index, and the
            number of parts of which each is split.
    """
    have = [(0, extent)] if extent else []
    for devices, at, factor in steps:
        total = sum(stop - start for start, stop in have)
        ranges = [chunk(0, total, factor, index) for index in range(factor)]
        have = _select(have, [chunk(*bounds, devices, at) for bounds in ranges])
    return have


def chunk(start: int, stop: int, chunks: int, index: int) -> tuple[int, int]:
    """The chunk `index` of `chunks` of an interval, by `torch.chunk`."""
    step = -(-(stop - start) // chunks)
    return min(start + index * step, stop), min(start + (index + 1) * step, stop)


def _select(have: list[tuple[int, int]], targets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The intervals at `targets`, which counts within `have`."""
    selected: list[tuple[int, int]] = []
    for low, high in targets:
        begin = 0
        for start, stop in have:
            first, last = max(low - begin, 0), min(high - begin, stop - start)
            begin += stop - start
            if first >= last:
                continue
            if selected and selected[-1][1] == start + first:
                selected[-1] = (selected[-1][0], start + last)
            else:
                selected.append((start + first, start + last))
    return selected
