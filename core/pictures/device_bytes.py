"""Bytes of an array on each device.

>>> from isoshard.core.layout.op_sharding import parse_op_sharding
>>> tiles = parse_op_sharding("{devices=[2,1,2]<=[4] last_tile_dim_replicate}", 2)
>>> stored = device_bytes(tiles, [[0, 4, 8], [0, 16]], 4)
>>> stored.array_bytes, stored.by_device
(512, {0: 256, 1: 256, 2: 256, 3: 256})
>>> print(*bars(stored, width=40), sep="\\n")
0-3  ████████████████████████████  256 B
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

from isoshard.core.layout.tiles import Tiles
from isoshard.core.runtime.formatting import human_bytes

from .device_labels import device_ranges

_AMOUNTS = 8


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
    """Bytes of an array on devices.

    Attributes:
        array_bytes: bytes of the array.
        by_device: bytes of each device's block with its padding, by number of the device.
    """

    array_bytes: int
    by_device: Mapping[int, int]

    @property
    def most(self) -> int:
        """Bytes of the device with most."""
        return max(self.by_device.values(), default=0)


def device_bytes(tiles: Tiles, bounds: Sequence[Sequence[int]], itemsize: float) -> DeviceBytes:
    """Count the bytes on each device.

    Args:
        tiles: the devices of each block.
        bounds: per axis, where its blocks begin, and where the last one ends.
        itemsize: bytes of an element; a half for types of four bits.
    """
    extents = [max(b - a for a, b in itertools.pairwise(axis)) for axis in bounds]
    block = math.ceil(math.prod(extents) * itemsize)
    devices = set(tiles.grid.ravel().tolist())
    return DeviceBytes(
        math.ceil(math.prod(axis[-1] for axis in bounds) * itemsize),
        {device: block if device in devices else 0 for device in range(tiles.num_devices)},
    )


def amounts(stored: DeviceBytes) -> tuple[list[tuple[str, int]], int]:
    """The devices with equally many bytes.

    Returns:
        Their numbers and the bytes, of the first few amounts; and how many more amounts there are.
    """
    devices_of_size: dict[int, list[int]] = {}
    for device, size in stored.by_device.items():
        devices_of_size.setdefault(size, []).append(device)
    rows = [(device_ranges(devices), size) for size, devices in devices_of_size.items()]
    return rows[:_AMOUNTS], max(0, len(rows) - _AMOUNTS)


def bars(stored: DeviceBytes, width: int) -> list[str]:
    """A line for the devices with equally many bytes, with a bar."""
    shown, left_out = amounts(stored)
    sizes = [human_bytes(size) for _, size in shown]
    gutter = max([len(name) for name, _ in shown], default=0)
    longest = max(1, width - gutter - max(map(len, sizes), default=0) - 4)
    scale = longest / stored.most if stored.most else 0
    lines = [
        f"{name:<{gutter}}  {'█' * round(size * scale)}  {text}"
        for (name, size), text in zip(shown, sizes, strict=True)
    ]
    return [*lines, *[f"… {left_out} more amounts"] * bool(left_out)]
