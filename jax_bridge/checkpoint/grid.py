"""How an array is cut: into files, and each file into chunks that are read on their own.

Each device's shard is a file of its own, or several where it is large. Readers have other meshes,
so a file is cut further, along all axes alike: whoever wants a part of it reads little else.

>>> cut((4096, 4096), (2048, 1024), 4)
Grid(files=(2048, 1024), chunks=(128, 128))
>>> cut((1000,), (1000,), 4)
Grid(files=(1000,), chunks=(1000,))
"""

from __future__ import annotations

import dataclasses
import math

FILE = 256 << 20  # bytes at most: a file is put together in memory before it is written
_LARGEST, _SMALLEST = 64 << 10, 4 << 10  # bytes of a chunk; each takes 20 more for its checksum
_CHUNKS = 256
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
        shard: shape of what one device holds; divides `shape`.
        itemsize: bytes of an element.

    Returns:
        Sizes that divide `shard`.
    """
    total = math.prod(shape) * itemsize
    files = _divided(shape, shard, itemsize, FILE)
    limit = min(_LARGEST, max(_SMALLEST, total // _CHUNKS))
    return Grid(files, _divided(shape, files, itemsize, limit))


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
