"""Pieces cut and joined at the ends of files, so that each file is written at once.

Blocks of unequal sizes end in the middle of files. What several pieces of this process have of a
file is put together in host memory; pieces that are whole files are written from where they are.
Of a file that several processes have parts of, each writes its own: TensorStore then reads the file
and writes it anew, under a lock.

>>> rows = np.arange(10)
>>> pieces = [StoredShard((slice(0, 4),), rows[:4]), StoredShard((slice(4, 7),), rows[4:7])]
>>> [(piece.index, piece.joined) for piece in by_file(pieces, Grid((2,), (2,)), (10,))]
[((slice(0, 4, None),), False), ((slice(4, 6, None),), False), ((slice(6, 7, None),), False)]
>>> [(piece.index, piece.joined) for piece in by_file(pieces, Grid((6,), (2,)), (10,))]
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


def by_file(
    pieces: Sequence[StoredShard], grid: Grid, shape: tuple[int, ...]
) -> Iterator[StoredShard]:
    """Cut and join pieces where files end.

    Args:
        pieces: of an array, none of which overlap.
        grid: how the array is cut into files.
        shape: of the array.

    Yields:
        Pieces of whole files, and parts of files of which these pieces have no more.
    """
    files: dict[tuple[int, ...], list[StoredShard]] = {}
    for piece in pieces:
        if _is_whole(piece.index, grid.files, shape):
            yield piece
            continue
        ranges = (
            range(one.start // size, -(-one.stop // size))
            for one, size in zip(piece.index, grid.files, strict=True)
        )
        for place in itertools.product(*ranges):
            files.setdefault(place, []).append(piece)
    for place, found in files.items():
        index = tuple(
            slice(at * size, min((at + 1) * size, extent))
            for at, size, extent in zip(place, grid.files, shape, strict=True)
        )
        parts = [_cut(piece, index) for piece in found]
        size = math.prod(one.stop - one.start for one in index)
        if len(parts) == 1 or sum(part.host.size for part in parts) < size:
            yield from parts
        else:
            yield _joined(parts, index)


def _is_whole(index: tuple[slice, ...], files: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether a piece begins and ends where files do."""
    return all(
        one.start % size == 0 and (one.stop % size == 0 or one.stop == extent)
        for one, size, extent in zip(index, files, shape, strict=True)
    )


def _cut(piece: StoredShard, index: tuple[slice, ...]) -> StoredShard:
    """What a piece has of a file."""
    both = tuple(
        slice(max(mine.start, one.start), min(mine.stop, one.stop))
        for mine, one in zip(piece.index, index, strict=True)
    )
    return StoredShard(both, piece.host[_from(both, piece.index)])


def _joined(parts: Sequence[StoredShard], index: tuple[slice, ...]) -> StoredShard:
    """A file put together."""
    shape = [one.stop - one.start for one in index]
    host = np.empty(shape, parts[0].host.dtype)
    metrics.count("copies")
    metrics.count("copied_bytes", host.nbytes)
    for part in parts:
        host[_from(part.index, index)] = part.host
    return StoredShard(index, host, joined=True)


def _from(index: tuple[slice, ...], start: tuple[slice, ...]) -> tuple[slice, ...]:
    """An index, counted from the start of another."""
    return tuple(
        slice(one.start - other.start, one.stop - other.start)
        for one, other in zip(index, start, strict=True)
    )
