"""Valid elements of an array's shards: their slices in the buffer, and in the true array.

Checkpoints contain arrays of their true shape. Of an `UnevenArray` only the valid elements of each
block are written, and reading puts them back at their indices:

>>> (part,) = valid_slices((slice(7, 14), slice(None)), (28, 3), ((5, 2, 7, 4), None))  # the second
>>> part.inside, part.index
((slice(0, 2, None), slice(0, 3, None)), (slice(5, 7, None), slice(0, 3, None)))
>>> valid_slices((slice(0, 3),), (12,), ((0, 3, 1, 2),))                         # an empty one
[]
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax

from isoshard.core.layout.shards import local_shards
from isoshard.core.layout.uneven import Sizes, UnevenArray, padded_of, runs_of
from isoshard.core.layout.virtual_devices import Device


@dataclasses.dataclass(frozen=True)
class ValidSlice:
    """A contiguous run of valid elements.

    Attributes:
        inside: its slice of a device's buffer, per axis with start and stop.
        index: its slice of the array of the true shape.
    """

    inside: tuple[slice, ...]
    index: tuple[slice, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ShardElements:
    """Valid elements of an array in the buffer of a device.

    Attributes:
        buffer: the device's buffer, with padding.
        valid: the elements, in the buffer and in the array.
        device: the buffer's device.
        replica_id: 0 for the first device with these elements, 1 for the next.
    """

    buffer: jax.Array
    valid: ValidSlice
    device: Device
    replica_id: int


def valid_slices(index: Sequence[slice], padded: Sequence[int], sizes: Sizes) -> list[ValidSlice]:
    """The valid elements in a device's buffer.

    Args:
        index: of the buffer in the padded array.
        padded: shape of the padded array.
        sizes: per axis the valid elements of each block, or None without padding.

    Returns:
        As few slices as possible, mostly one; none for empty blocks.
    """
    axes = [
        [run for run in runs_of(range_, extent, size) if size is None or run[0] != slice(0, 0)]
        for range_, extent, size in zip(index, padded, sizes, strict=True)
    ]
    return [
        ValidSlice(tuple(inside for inside, _ in pairs), tuple(index for _, index in pairs))
        for pairs in itertools.product(*axes)
    ]


def local_elements(array: jax.Array | UnevenArray) -> list[ShardElements]:
    """The valid elements of an array's local shards, in mesh order, replicas too; without copies.

    Example:
        >>> import numpy as np
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> rows = np.arange(6, dtype=np.float32)
        >>> mesh = make_mesh((4,), ("x",))
        >>> u = shard(rows, mesh, ("x",), uneven="pad", sizes=(1, 2, 0, 3))
        >>> [(one.device.id, one.valid.index[0].start) for one in local_elements(u)]
        [(0, 0), (1, 1), (3, 3)]
    """
    inner = padded_of(array)
    sizes = array.sizes if isinstance(array, UnevenArray) else (None,) * array.ndim
    return [
        ShardElements(shard.data, valid, shard.device, shard.replica_id)
        for shard in local_shards(inner)
        for valid in valid_slices(shard.index, inner.shape, sizes)
    ]
