"""The files of an array, and the chunks of a file, each of which can be read by itself.

Each device's shard is a file of its own, or several where it is large. Readers have other meshes,
so a file is divided further, evenly along all axes: to read a part of it little else is read. Files
are of one size, and blocks of an `UnevenArray` need not be: see `file_size`.

>>> grid_of((4096, 4096), (2048, 1024), 4)
Grid(files=(2048, 1024), chunks=(128, 128))
>>> grid_of((1000,), (1000,), 4)
Grid(files=(1000,), chunks=(1000,))
"""

from __future__ import annotations

import dataclasses
import itertools
import math

FILE = 256 << 20  # bytes at most: a file is joined in memory before it is written
_LARGEST, _SMALLEST = 64 << 10, 4 << 10  # bytes of a chunk; each takes 20 more for its checksum
_CHUNKS = 256
_FILES = 4  # files per block at most, where files could begin where blocks do
_DIVISORS = (2, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The shapes of files and chunks.

    Attributes:
        files: elements of a file, along each axis.
        chunks: elements of a chunk; a divisor of `files`.
    """

    files: tuple[int, ...]
    chunks: tuple[int, ...]

    def count(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The number of files along each axis."""
        return tuple(-(-extent // size) for extent, size in zip(shape, self.files, strict=True))


def grid_of(shape: tuple[int, ...], shard: tuple[int, ...], itemsize: int) -> Grid:
    """The files and chunks of an array, whose sizes divide `shard`.

    Args:
        shape: of the array, without empty axes.
        shard: shape of the shard of a device, or of a file; files at the end may be smaller.
        itemsize: bytes of an element.
    """
    total = math.prod(shape) * itemsize
    files = _divided(shape, shard, itemsize, FILE)
    limit = min(_LARGEST, max(_SMALLEST, total // _CHUNKS))
    return Grid(files, _divided(shape, files, itemsize, limit))


def file_size(sizes: tuple[int, ...]) -> int:
    """The size of files along an axis in blocks of unequal sizes, by the size of each block.

    Every block begins at a multiple of it, if that does not make many files; otherwise there are
    about as many files as blocks, and the size has many divisors.

    Example:
        >>> file_size((5, 5, 5, 3)), file_size((16, 4, 20, 8)), file_size((0, 3, 9, 6))
        (5, 4, 3)
        >>> file_size((501, 502, 700, 333))
        512
    """
    extent = sum(sizes)
    common = math.gcd(*(at for at in itertools.accumulate(sizes) if 0 < at < extent)) or extent
    if extent // common <= _FILES * len(sizes):
        return common
    size = -(-extent // len(sizes))
    step = 1 << max(size.bit_length() - 4, 0)
    return -(-size // step) * step


def _divided(
    shape: tuple[int, ...], block: tuple[int, ...], itemsize: int, limit: int
) -> tuple[int, ...]:
    """Divide a block until it has at most `limit` bytes, first the axes in the fewest blocks."""
    sizes = list(block)
    while math.prod(sizes) * itemsize > limit:
        steps = [
            (shape[axis] // size, axis, divisor)
            for axis, size in enumerate(sizes)
            for divisor in _DIVISORS
            if size % divisor == 0
        ]
        if not steps:
            break
        _, axis, divisor = min(steps)
        sizes[axis] //= divisor
    return tuple(sizes)
