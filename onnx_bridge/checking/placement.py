"""Placement: the block of each device, from a ShardingSpecProto.

`Tiles` of core asks for groups of one size and each device once, since JAX does. A check has to
look at what is not so, too: here a device's block is looked up, and nothing is asked of the whole.

>>> spec = onnx.ShardingSpecProto(tensor_name="x", device=[-1, -2])
>>> for key, devices in ((-1, [0, 1]), (-2, [2, 3])):
...     _ = spec.index_to_device_group_map.add(key=key, value=devices)
>>> spec.sharded_dim.add(axis=0).simple_sharding.add(num_shards=2).num_shards
2
>>> print(Placement.read(spec, 2, 4))
2 x 1 blocks: (0, 0) on 0, 1; (1, 0) on 2, 3
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

import onnx

from ..errors import ModelError

_SHOWN = 8


@dataclasses.dataclass(frozen=True)
class Placement:
    """The blocks of a tensor and who holds them.

    Attributes:
        counts: blocks along each axis.
        holds: the block of each device that holds one.
    """

    counts: tuple[int, ...]
    holds: Mapping[int, tuple[int, ...]]

    @classmethod
    def read(cls, spec: onnx.ShardingSpecProto, rank: int, num_devices: int) -> Placement:
        """Read a spec that has no structural error.

        Args:
            spec: the spec.
            rank: of the tensor.
            num_devices: of the configuration; an empty list of devices means all of them.

        Returns:
            The placement.
        """
        counts = [1] * rank
        listed = []
        for dim in spec.sharded_dim:
            axis = dim.axis % rank
            counts[axis] = math.prod(entry.num_shards for entry in dim.simple_sharding)
            listed.append(axis)
        device_groups = expand(spec, num_devices)
        if math.prod(counts) == 1:  # several entries and no split: each holds all of it
            device_groups = [tuple(device for group in device_groups for device in group)]
        holds = {}
        for index, group in enumerate(device_groups):
            block = [0] * rank
            for axis in reversed(listed):  # the first listed one is the outermost loop
                index, block[axis] = divmod(index, counts[axis])
            holds.update(dict.fromkeys(group, tuple(block)))
        return cls(tuple(counts), holds)

    @classmethod
    def unsplit(cls, rank: int, devices: Iterable[int]) -> Placement:
        """Every one of the devices holds the full tensor."""
        return cls((1,) * rank, dict.fromkeys(devices, (0,) * rank))

    @property
    def devices(self) -> frozenset[int]:
        """Those that hold something."""
        return frozenset(self.holds)

    def moved(self, devices: Iterable[int]) -> Placement | None:
        """The same on other devices, the first in the place of the first.

        Args:
            devices: as many as now.

        Returns:
            The placement; None if there are more or fewer.
        """
        sources, targets = sorted(self.holds), sorted(devices)
        if len(sources) != len(targets):
            return None
        return Placement(
            self.counts, {new: self.holds[old] for old, new in zip(sources, targets, strict=True)}
        )

    def __str__(self) -> str:
        """In words, the first blocks with their devices."""
        devices_by_block: dict[tuple[int, ...], list[int]] = {}
        for device in sorted(self.holds):
            devices_by_block.setdefault(self.holds[device], []).append(device)
        if math.prod(self.counts) == 1:
            return f"whole on {_ranges(sorted(self.holds))}"
        blocks = [
            f"{block} on {_ranges(devices_by_block[block])}"
            for block in sorted(devices_by_block)[:_SHOWN]
        ]
        more = ["..."] if len(devices_by_block) > _SHOWN else []
        return f"{' x '.join(map(str, self.counts))} blocks: {'; '.join([*blocks, *more])}"


class Pool:
    """Placements kept once each: a model has thousands of tensors and a few layouts.

    Args:
        most: devices in all distinct placements together.
    """

    def __init__(self, most: int = 4_000_000) -> None:
        """Begin with none."""
        self._remaining = most
        self._by_hash: dict[int, list[Placement]] = {}

    def keep(self, placement: Placement) -> Placement:
        """The placement that is equal to this one and was kept first."""
        key = hash((placement.counts, frozenset(placement.holds.items())))
        same_hash = self._by_hash.setdefault(key, [])
        for candidate in same_hash:
            if candidate == placement:
                return candidate
        self._remaining -= len(placement.holds)
        if self._remaining < 0:
            raise ModelError("it has too many layouts over too many devices to be checked")
        same_hash.append(placement)
        return placement


def expand(spec: onnx.ShardingSpecProto, num_devices: int) -> list[tuple[int, ...]]:
    """The devices of each shard, in the order of the list."""
    groups = {entry.key: tuple(entry.value) for entry in spec.index_to_device_group_map}
    if not spec.device:
        return [(device,) for device in range(num_devices)]
    return [groups.get(entry, (entry,)) for entry in spec.device]


def _ranges(devices: list[int]) -> str:
    more = ", .." if len(devices) > _SHOWN else ""
    return ", ".join(map(str, devices[:_SHOWN])) + more
