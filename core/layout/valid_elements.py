"""What devices hold of an array, padding left out: where it is in a buffer, and in the array.

Checkpoints hold arrays of their true shape. What is written of an `UnevenArray` are the valid
elements of each block, and what is read goes to the places where they belong:

>>> (part,) = parts_of((slice(7, 14), slice(None)), (28, 3), ((5, 2, 7, 4), None))  # the second
>>> part.inside, part.index
((slice(0, 2, None), slice(0, 3, None)), (slice(5, 7, None), slice(0, 3, None)))
>>> parts_of((slice(0, 3),), (12,), ((0, 3, 1, 2),))                         # an empty one
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
    """Valid elements that lie together.

    Attributes:
        inside: where they are in a device's buffer, per axis a slice with start and stop.
        index: where they are in the array of the true shape.
    """

    inside: tuple[slice, ...]
    index: tuple[slice, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ShardElements:
    """Valid elements of an array in the buffer of a device.

    Attributes:
        buffer: all that the device holds.
        part: which elements of it, and of the array.
        device: that device.
        replica_id: 0 for the first device with these elements, 1 for the next.
    """

    buffer: jax.Array
    part: ValidSlice
    device: Device
    replica_id: int


def parts_of(index: Sequence[slice], padded: Sequence[int], sizes: Sizes) -> list[ValidSlice]:
    """The valid elements in a device's buffer.

    Args:
        index: of the buffer in the padded array.
        padded: shape of the padded array.
        sizes: per axis the valid elements of each block, or None where nothing is padded.

    Returns:
        As few as can be, mostly one; none for empty blocks.
    """
    axes = [
        [run for run in runs_of(place, extent, size) if size is None or run[0] != slice(0, 0)]
        for place, extent, size in zip(index, padded, sizes, strict=True)
    ]
    return [
        ValidSlice(tuple(inside for inside, _ in pairs), tuple(index for _, index in pairs))
        for pairs in itertools.product(*axes)
    ]


def held_here(array: jax.Array | UnevenArray) -> list[ShardElements]:
    """What the devices of this process hold of an array.

    Args:
        array: on any devices, not traced.

    Returns:
        The parts in mesh order, replicas too; nothing is copied.

    Example:
        >>> import numpy as np
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.place import shard
        >>> rows = np.arange(6, dtype=np.float32)
        >>> mesh = make_mesh((4,), ("x",))
        >>> u = shard(rows, mesh, ("x",), uneven="pad", sizes=(1, 2, 0, 3))
        >>> [(one.device.id, one.part.index[0].start) for one in held_here(u)]
        [(0, 0), (1, 1), (3, 3)]
    """
    inner = padded_of(array)
    sizes = array.sizes if isinstance(array, UnevenArray) else (None,) * array.ndim
    return [
        ShardElements(shard.data, part, shard.device, shard.replica_id)
        for shard in local_shards(inner)
        for part in parts_of(shard.index, inner.shape, sizes)
    ]
