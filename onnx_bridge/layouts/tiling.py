"""Tiling: a ShardingSpecProto as core's `Tiles`.

>>> proto = onnx.ShardingSpecProto(tensor_name="w", device=[-1, -2])
>>> for key, members in ((-1, [0, 1]), (-2, [2, 3])):
...     _ = proto.index_to_device_group_map.add(key=key, value=members)
>>> _ = proto.sharded_dim.add(axis=0, simple_sharding=[onnx.SimpleShardedDimProto(num_shards=2)])
>>> read_tiles(proto, (2, 2))
Tiles([[[0, 1]], [[2, 3]]])

Where the specification is silent:

- An entry of `device` is a group if the map has it as a key, else a device.
- Blocks go to devices in the order in which the split axes are listed, the first outermost.
- Several numbers of shards for one axis mean an axis that a Reshape made of several: the shard
  (i, j) holds rows of block i and columns of block j. Only where such shards are contiguous do they
  split the one axis; else it is an error.
- Without devices, as many as there are shards; one shard and several devices: a copy on each.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

import numpy as np
import onnx

from isoshard.core.kit import Tiles

from ..errors import AnnotationError

Dims = Sequence[int | str | None]
_MOST_DEVICES = 1 << 20  # that a file may leave out; a hostile one would have us count for ever
_MOST_AXES = 32
_MOST_NAMED = 8  # devices in a message


def read_tiles(
    proto: onnx.ShardingSpecProto, shape: Dims | None = None, num_devices: int | None = None
) -> Tiles:
    """Read which device holds which block.

    Raises:
        AnnotationError: the message contradicts itself or the shape, or says what no array is like:
            groups of different sizes, shards that are not contiguous.
    """
    try:
        return _read(proto, shape, num_devices)
    except AnnotationError as error:
        raise error.at(tensor=proto.tensor_name) from None


def replicate_axes(tiles: Tiles, axes: Sequence[int]) -> Tiles:
    """Unshard axes that were split: their blocks become replicas.

    Example:
        >>> replicate_axes(Tiles([[[0], [1]], [[2], [3]]]), [1])
        Tiles([[[0, 1]], [[2, 3]]])
    """
    grid = tiles.grid
    shape = [1 if axis in axes else count for axis, count in enumerate(tiles.blocks)]
    ends = range(grid.ndim - 1 - len(axes), grid.ndim - 1)
    return Tiles(np.moveaxis(grid, axes, ends).reshape(*shape, -1), tiles.num_devices)


def uneven_axes(tiles: Tiles, shape: Dims | None) -> list[int]:
    """The axes of a known size that do not split evenly.

    Example:
        >>> uneven_axes(Tiles([[[0], [1]]]), (4, 3))
        [1]
    """
    pairs = enumerate(zip(tiles.blocks, shape or (), strict=False))
    return [axis for axis, (count, dim) in pairs if isinstance(dim, int) and dim % count]


def _read(proto: onnx.ShardingSpecProto, shape: Dims | None, num_devices: int | None) -> Tiles:
    counts = _counts(proto, shape)
    groups = _groups(proto, math.prod(counts.values()), num_devices)
    rank = len(shape) if shape is not None else max(counts, default=-1) + 1
    size = len(groups[0])
    if any(len(group) != size for group in groups):
        sizes = ", ".join(str(len(group)) for group in groups)
        raise AnnotationError(
            f"its blocks are on groups of {sizes} devices; a NamedSharding has as many copies of "
            "each block: make the groups equal"
        )
    listed = list(counts)
    grid = np.array(groups).reshape(*counts.values(), size)
    grid = grid.transpose(*(listed.index(axis) for axis in sorted(listed)), len(listed))
    if rank > _MOST_AXES:
        raise AnnotationError(f"the tensor has {rank} axes; arrays have {_MOST_AXES} at most")
    full = [counts.get(axis, 1) for axis in range(rank)]
    total = int(grid.max()) + 1 if num_devices is None else num_devices
    return Tiles(grid.reshape(*full, size), total)


def _groups(proto: onnx.ShardingSpecProto, shards: int, num_devices: int | None) -> list[list[int]]:
    """The devices of each shard, in the order listed."""
    members = {entry.key: list(entry.value) for entry in proto.index_to_device_group_map}
    groups = [members.get(device, [device]) for device in proto.device]
    if not groups and 1 < shards <= _MOST_DEVICES and num_devices in (None, shards):
        groups = [[device] for device in range(shards)]
    if shards == 1 and len(groups) > 1:
        groups = [sorted(device for group in groups for device in group)]
    if len(members) < len(proto.index_to_device_group_map):
        raise AnnotationError("its map of device groups has one key twice; number them apart")
    if len(groups) != shards:
        raise AnnotationError(
            f"it lists {len(groups)} devices or groups for {shards} shards, the product of its "
            "num_shards; list one for each"
        )
    _check_devices([device for group in groups for device in group], num_devices)
    if not all(groups):
        raise AnnotationError("one of its device groups is empty; name its devices, or drop it")
    return groups


def _check_devices(devices: list[int], num_devices: int | None) -> None:
    wrong = []
    for device, times in collections.Counter(devices).items():
        if times > 1:
            wrong.append(f"device {device} is named {times} times")
        if device < 0:
            wrong.append(f"{device} is neither a device nor a key of the map of groups")
        elif num_devices is not None and device >= num_devices:
            wrong.append(f"there is no device {device}")
    if len(wrong) > _MOST_NAMED:
        wrong[_MOST_NAMED:] = [f"and {len(wrong) - _MOST_NAMED} errors more"]
    if wrong:
        among = "" if num_devices is None else f" The devices are 0..{num_devices - 1}."
        raise AnnotationError(f"{'; '.join(wrong)}.{among}")


def _counts(proto: onnx.ShardingSpecProto, shape: Dims | None) -> dict[int, int]:
    """Pieces of each axis that is spoken of, in the order listed."""
    counts: dict[int, int] = {}
    for sharded in proto.sharded_dim:
        axis = _axis(sharded, None if shape is None else len(shape))
        if axis in counts:
            raise AnnotationError("the axis is listed twice; list it once", axis=axis)
        dim = None if shape is None else shape[axis]
        counts[axis] = _shard_count(sharded.simple_sharding, axis, dim)
    return counts


def _axis(sharded: onnx.ShardedDimProto, rank: int | None) -> int:
    axis = sharded.axis
    if not sharded.HasField("axis"):
        raise AnnotationError("a sharded_dim names no axis; give it one")
    if rank is None and axis < 0:
        raise AnnotationError(
            "the axis counts from the end, and the rank of the tensor is not known; count from the "
            "start, or give the tensor a shape",
            axis=axis,
        )
    if rank is not None and not -rank <= axis < rank:
        raise AnnotationError(f"the tensor has rank {rank} and no such axis", axis=axis)
    return axis + rank if axis < 0 and rank is not None else axis


def _shard_count(
    entries: Sequence[onnx.SimpleShardedDimProto], axis: int, dim: int | str | None
) -> int:
    if not entries:
        raise AnnotationError("its sharded_dim has no num_shards; give it one", axis=axis)
    wrong = [entry.num_shards for entry in entries if entry.num_shards < 1]
    if wrong:
        raise AnnotationError(f"num_shards is {wrong[0]}; it must be 1 or more", axis=axis)
    sizes = [entry.dim_value if entry.HasField("dim_value") else None for entry in entries]
    product = math.prod(size for size in sizes if size is not None)
    if None not in sizes and isinstance(dim, int) and product != dim:
        raise AnnotationError(f"its dim_value is {product}, the tensor's size {dim}", axis=axis)
    counts = [entry.num_shards for entry in entries]
    last = max((i for i, count in enumerate(counts) if count > 1), default=0)
    if any(size != count for size, count in zip(sizes[:last], counts[:last], strict=True)):
        sizes_text = " x ".join("?" if size is None else str(size) for size in sizes)
        raise AnnotationError(
            f"the axis is {sizes_text} fused, split {' x '.join(map(str, counts))}: its shards "
            "are not contiguous, and a NamedSharding splits an axis into contiguous blocks; "
            "annotate the tensor before the Reshape that fuses it",
            axis=axis,
        )
    return math.prod(counts)
