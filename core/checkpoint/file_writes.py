"""Shards split and joined at the ends of files, so that each file is written at once.

Blocks of unequal sizes end in the middle of files. If several shards of this process together
cover a file, they are joined in host memory; a shard that covers files is written without a copy.
If several processes have slices of a file, each writes its own: TensorStore then reads the file
and writes it anew, under a lock.

>>> rows = np.arange(10)
>>> shards = [StoredShard((slice(0, 4),), rows[:4]), StoredShard((slice(4, 7),), rows[4:7])]
>>> [(shard.index, shard.joined) for shard in by_file(shards, Grid((2,), (2,)), (10,))]
[((slice(0, 4, None),), False), ((slice(4, 6, None),), False), ((slice(6, 7, None),), False)]
>>> [(shard.index, shard.joined) for shard in by_file(shards, Grid((6,), (2,)), (10,))]
[((slice(0, 6, None),), True), ((slice(6, 7, None),), False)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from isoshard.core.runtime import metrics

from .chunk_grid import Grid
from .stored_shards import StoredShard

Index = tuple[slice, ...]


def by_file(
    shards: Sequence[StoredShard], grid: Grid, shape: tuple[int, ...]
) -> Iterator[StoredShard]:
    """Split and join shards where files end.

    Args:
        shards: of an array of this shape, none of which overlap.
        grid: the files of the array.
        shape: of the array.

    Yields:
        Shards that cover files, and slices of files that these shards do not cover.
    """
    files: dict[tuple[int, ...], list[StoredShard]] = {}
    for shard in shards:
        if _covers_files(shard.index, grid.files, shape):
            yield shard
            continue
        ranges = (
            range(axis.start // size, -(-axis.stop // size))
            for axis, size in zip(shard.index, grid.files, strict=True)
        )
        for position in itertools.product(*ranges):
            files.setdefault(position, []).append(shard)
    for position, overlapping in files.items():
        index = tuple(
            slice(at * size, min((at + 1) * size, extent))
            for at, size, extent in zip(position, grid.files, shape, strict=True)
        )
        slices = [_sliced(shard, index) for shard in overlapping]
        size = math.prod(axis.stop - axis.start for axis in index)
        if len(slices) == 1 or sum(shard.host.size for shard in slices) < size:
            yield from slices
        else:
            yield _joined(slices, index)


def _covers_files(index: Index, files: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a shard begins and ends where files do."""
    return all(
        axis.start % size == 0 and (axis.stop % size == 0 or axis.stop == extent)
        for axis, size, extent in zip(index, files, shape, strict=True)
    )


def _sliced(shard: StoredShard, index: Index) -> StoredShard:
    """The slice of a shard that is in a file."""
    both = tuple(
        slice(max(axis.start, file.start), min(axis.stop, file.stop))
        for axis, file in zip(shard.index, index, strict=True)
    )
    return StoredShard(both, shard.host[_relative(both, shard.index)])


def _joined(slices: Sequence[StoredShard], index: Index) -> StoredShard:
    """A file's slices, copied into one buffer."""
    host = np.empty([axis.stop - axis.start for axis in index], slices[0].host.dtype)
    metrics.count("copies")
    metrics.count("copied_bytes", host.nbytes)
    for shard in slices:
        host[_relative(shard.index, index)] = shard.host
    return StoredShard(index, host, joined=True)


def _relative(index: Index, to: Index) -> Index:
    """An index relative to the start of another."""
    return tuple(
        slice(axis.start - other.start, axis.stop - other.start)
        for axis, other in zip(index, to, strict=True)
    )
