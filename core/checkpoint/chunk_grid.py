"""How an array is cut: into files, and each file into chunks that are read on their own.

Each device's shard is a file of its own, or several where it is large. Readers have other meshes,
so a file is cut further, along all axes alike: whoever wants a part of it reads little else. Files
are of one size, and blocks of an `UnevenArray` need not be: see `file_size`.

>>> cut((4096, 4096), (2048, 1024), 4)
Grid(files=(2048, 1024), chunks=(128, 128))
>>> cut((1000,), (1000,), 4)
Grid(files=(1000,), chunks=(1000,))
"""

from __future__ import annotations

import dataclasses
import itertools
import math

FILE = 256 << 20  # bytes at most: a file is put together in memory before it is written
_LARGEST, _SMALLEST = 64 << 10, 4 << 10  # bytes of a chunk; each takes 20 more for its checksum
_CHUNKS = 256
_FILES = 4  # files per block at most, where files could begin where blocks do
_DIVISORS = (2, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The sizes of what an array is cut into.

    Attributes:
        files: shape of what stands in one file.
        chunks: shape of what is read on its own; divides `files`.
    """

    files: tuple[int, ...]
    chunks: tuple[int, ...]

    def count(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """How many files an array has along each axis."""
        return tuple(-(-extent // size) for extent, size in zip(shape, self.files, strict=True))


def cut(shape: tuple[int, ...], shard: tuple[int, ...], itemsize: int) -> Grid:
    """Choose the files and chunks of an array.

    Args:
        shape: of the array, without empty axes.
        shard: shape of what one device holds, or of a file; files at the end may be smaller.
        itemsize: bytes of an element.

    Returns:
        Sizes that divide `shard`.
    """
    total = math.prod(shape) * itemsize
    files = _divided(shape, shard, itemsize, FILE)
    limit = min(_LARGEST, max(_SMALLEST, total // _CHUNKS))
    return Grid(files, _divided(shape, files, itemsize, limit))


def file_size(sizes: tuple[int, ...]) -> int:
    """How long files are along an axis in blocks of unequal sizes.

    Args:
        sizes: the elements of each block.

    Returns:
        A size of which every block begins at a multiple, if that does not make many files;
        otherwise one for about as many files as there are blocks, which is cut well.

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
    """Divide a block until it has at most `limit` bytes, first where there are the fewest cuts."""
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
