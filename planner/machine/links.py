"""The links of a mesh's axes: rings and lines of a torus, a switch, hosts' network, memory.

A group is the devices along an axis, or along several. Its `levels` are, from the inside out, the
networks between its devices: the chips of a slice are joined by links of the torus, the slices by
the data centre's network; the GPUs of one switch by NVLink, those groups by the hosts' network.

>>> from .topologies import topology
>>> mesh = topology("v5e:16x16").mesh((16, 16), ("data", "model"))
>>> print(links(mesh)["model"])
model (16): ici, a ring of 16, 9e+10 bytes/s a device
>>> print(links_of(mesh, ("data", "model")))
data+model (256): ici, rings of 16 x 16, 1.8e+11 bytes/s a device
>>> print(links(topology("h100:2x8").mesh((4, 4), ("data", "model")))["data"])
data (4): nvlink of 2, 4.5e+11 bytes/s a device; network of 2, 5e+10 bytes/s a device

Bandwidth is out of a device: of a ring both directions, of a line without wrap-around links one,
since its ends have only one. Where an axis takes every other chip of a torus axis, its messages
pass through the chips between, and groups share the links: `Way.shared`.

Where groups are not blocks of a torus' grid, `busiest` counts the messages on its busiest link:
each device of a group sends to the next in the group's order, and to the one before it, all groups
at once. Messages take the shortest way, one axis after the other.

>>> line = np.array([[(0, 0, 0), (2, 0, 0)], [(1, 0, 0), (3, 0, 0)]])
>>> busiest(line, np.zeros((2, 2), int), (4, 1), (False, False))
2
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import ShardingError, cached, slice_ids

from .topologies import Topology, topology_of

LinkKind = Literal["memory", "ici", "nvlink", "network", "dcn"]
"""Copies in one host's memory; links of a torus; a switch; the hosts' network; that of slices."""


@dataclasses.dataclass(frozen=True)
class Way:
    """Chips of a group along one axis of a torus.

    Attributes:
        size: how many.
        ring: whether they have wrap-around links.
        shared: how many groups share each link.
    """

    size: int
    ring: bool
    shared: int = 1


@dataclasses.dataclass(frozen=True)
class LinkLevel:
    """One network that joins devices, or groups of devices that the level before it joins.

    Attributes:
        kind: of the network.
        size: how many it joins.
        bandwidth: bytes a second out of one device over it, all its links together.
        latency: seconds before the first byte arrives at the next.
        hops: how many latencies until the first byte is everywhere.
        link: bytes a second and direction of one link.
        ways: of a torus, the axes of the group.
    """

    kind: LinkKind
    size: int
    bandwidth: float
    latency: float
    hops: int
    link: float
    ways: tuple[Way, ...] = ()

    def __str__(self) -> str:
        """In words."""
        how = f" of {self.size}"
        if self.ways:
            sizes = " x ".join(str(way.size) for way in self.ways)
            closed = [way.ring for way in self.ways]
            word = "ring" if all(closed) else "block" if any(closed) else "line"
            how = f", a {word} of {sizes}" if len(self.ways) == 1 else f", {word}s of {sizes}"
        return f"{self.kind}{how}, {self.bandwidth:.3g} bytes/s a device"


@dataclasses.dataclass(frozen=True)
class AxisLinks:
    """The links of one axis of a mesh, or of several together.

    Attributes:
        axes: the axes, in the mesh's order.
        size: devices of one group.
        levels: the networks, from the inside out; () of one device.
        inside_host: whether all devices of a group are on one host.
        note: how the axes do not match the links; "" if they do.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> print(links(topology("h100:2x8").mesh((2, 8), ("data", "model")))["model"].inside_host)
        True
    """

    axes: tuple[str, ...]
    size: int
    levels: tuple[LinkLevel, ...]
    inside_host: bool
    note: str = ""

    @property
    def kind(self) -> LinkKind:
        """The slowest network of a group."""
        return self.levels[-1].kind if self.levels else "memory"

    @property
    def bandwidth(self) -> float:
        """Bytes a second out of one device over that network."""
        return self.levels[-1].bandwidth if self.levels else math.inf

    @property
    def latency(self) -> float:
        """Seconds until the first byte is everywhere."""
        return sum(level.latency * level.hops for level in self.levels)

    @property
    def ring(self) -> bool:
        """Whether all its ways have wrap-around links."""
        return bool(self.levels) and all(
            level.ways and all(way.ring for way in level.ways) for level in self.levels
        )

    def __str__(self) -> str:
        """In words."""
        levels = "; ".join(map(str, self.levels)) or "one device"
        note = f" ({self.note})" if self.note else ""
        return f"{'+'.join(self.axes)} ({self.size}): {levels}{note}"


@cached(256)
def links(mesh: Mesh) -> dict[str, AxisLinks]:
    """The links of each axis of a mesh.

    Args:
        mesh: over attached or described devices.

    Returns:
        By name of the axis, in the mesh's order.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> found = links(topology("v5e:16x16").mesh((16, 16), ("data", "model")))
        >>> found["model"].size, [level.kind for level in found["model"].levels]
        (16, ['ici'])
    """
    return {name: links_of(mesh, (name,)) for name in mesh.axis_names}


def links_of(mesh: Mesh, axes: Sequence[str]) -> AxisLinks:
    """The links of axes of a mesh as one group.

    Args:
        mesh: over attached or described devices.
        axes: names of its axes, in any order.

    Raises:
        ShardingError: the mesh has no such axis.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:16x16").mesh((16, 16), ("data", "model"))
        >>> links_of(mesh, ("model", "data")).axes
        ('data', 'model')
    """
    unknown = [name for name in axes if name not in mesh.axis_names]
    if unknown:
        raise ShardingError(
            f"there is no axis {', '.join(unknown)}; the mesh has {', '.join(mesh.axis_names)}"
        )
    return _links_of(mesh, tuple(name for name in mesh.axis_names if name in axes))


@cached(1024)
def _links_of(mesh: Mesh, axes: tuple[str, ...]) -> AxisLinks:
    machine, positions = topology_of(mesh), _device_arrays(mesh)
    size = math.prod(mesh.shape[name] for name in axes)
    if size == 1:
        return AxisLinks(axes, 1, (), True)
    last = [mesh.axis_names.index(name) for name in axes]
    rest = [axis for axis in range(mesh.devices.ndim) if axis not in last]

    def grouped(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """(group, device of it, ..)."""
        inner = values.shape[mesh.devices.ndim :]
        order = (*rest, *last, *range(mesh.devices.ndim, values.ndim))
        return values.transpose(order).reshape(-1, size, *inner)

    hosts, slices = grouped(positions.hosts), grouped(positions.slices)
    inside = bool((hosts == hosts[:, :1]).all())
    chip = machine.chip
    if chip.platform == "cpu":
        latency = chip.meetings.get(size, chip.latency)
        level = LinkLevel("memory", size, chip.link, latency, 1, chip.link)
        return AxisLinks(axes, size, (level,), inside)
    outer = max(len(set(group)) for group in slices.tolist())
    inner = max(1, size // outer)
    note = "" if inner * outer == size else "groups have parts of different size in slices or hosts"
    levels: list[LinkLevel] = []
    if chip.links:
        if inner > 1:
            level, odd = _torus_level(machine, grouped(positions.coords), slices, inner)
            levels.append(level)
            note = "; ".join(filter(None, [note, odd]))
    elif inner > 1:
        levels.append(LinkLevel("nvlink", inner, chip.link, chip.latency, 1, chip.link))
    if outer > 1:
        kind = "dcn" if chip.links else "network"
        hops = math.ceil(math.log2(outer))
        levels.append(
            LinkLevel(kind, outer, chip.network, chip.network_latency, hops, chip.network)
        )
    return AxisLinks(axes, size, tuple(levels), inside, note)


@dataclasses.dataclass(frozen=True, eq=False)
class _DeviceArrays:
    """Hosts, slices and coordinates of a mesh's devices: arrays of the mesh's shape.

    `slices` are ids of slices, or of the devices of one switch; `coords` has an axis for x, y, z.
    """

    hosts: np.ndarray[Any, Any]
    slices: np.ndarray[Any, Any]
    coords: np.ndarray[Any, Any]


@cached(64)
def _device_arrays(mesh: Mesh) -> _DeviceArrays:
    flat, shape = list(mesh.devices.flat), mesh.devices.shape
    hosts = [device.process_index for device in flat]
    torus = topology_of(mesh).chip.links > 0
    coords = [device.coords if torus else (0, 0, 0) for device in flat]
    return _DeviceArrays(
        np.array(hosts).reshape(shape),
        slice_ids(mesh),
        np.array(coords).reshape(*shape, -1),
    )


def _torus_level(
    machine: Topology, coords: np.ndarray[Any, Any], slices: np.ndarray[Any, Any], inner: int
) -> tuple[LinkLevel, str]:
    """The links within a slice, and a note if they are shared."""
    chip = machine.chip
    ways = _ways(machine, coords, slices, inner)
    note = ""
    if ways is None:
        load = busiest(coords, slices, machine.shape, machine.wraps)
        ways = (Way(inner, inner > 2, load),)
        note = (
            f"the devices are not a block of the grid; their messages share each link with "
            f"{load - 1} others"
        )
    elif any(way.shared > 1 for way in ways):
        shared = max(way.shared for way in ways)
        note = f"its chips are {shared} apart on an axis, whose links {shared} groups share"
    bandwidth = sum(chip.link * (1 + way.ring) / way.shared for way in ways)
    hops = sum(way.shared * (way.size // 2 if way.ring else way.size - 1) for way in ways)
    return LinkLevel("ici", inner, bandwidth, chip.latency, hops, chip.link, ways), note


def _ways(
    machine: Topology, coords: np.ndarray[Any, Any], slices: np.ndarray[Any, Any], inner: int
) -> tuple[Way, ...] | None:
    """The axes of the torus that groups span; None if they are not equal blocks of the grid."""
    groups = [
        coords[group][slices[group] == chunk]
        for group in range(len(coords))
        for chunk in np.unique(slices[group])
    ]
    if any(len(group) != inner for group in groups):
        return None
    every = np.stack(groups)
    every = every - every.min(axis=1, keepdims=True)
    keys = np.sort(every @ np.array([2**40, 2**20, 1])[: every.shape[-1]], axis=1)
    if (keys != keys[0]).any():
        return None
    ways = []
    for axis, size in enumerate(machine.shape):
        unique = np.unique(every[0, :, axis])
        if len(unique) == 1:
            continue
        steps = np.unique(np.diff(unique))
        if len(steps) > 1:
            return None
        step = int(steps[0])
        ring = machine.wraps[axis] and len(unique) * step == size
        ways.append(Way(len(unique), ring, step))
    return tuple(ways) if math.prod(way.size for way in ways) == inner else None


def busiest(
    coords: np.ndarray[Any, Any],
    slices: np.ndarray[Any, Any],
    grid: tuple[int, ...],
    closed: tuple[bool, ...],
) -> int:
    """Count the messages on the busiest link in one direction.

    Args:
        coords: (group, device, axis): coordinates in the grid.
        slices: (group, device): slice ids; messages between slices are not counted.
        grid: sizes of the torus.
        closed: which axes have wrap-around links.
    """
    loads: collections.Counter[tuple[int, ...]] = collections.Counter()
    for group, positions in zip(coords.tolist(), slices.tolist(), strict=True):
        members: dict[int, list[list[int]]] = {}
        for at, chunk in zip(group, positions, strict=True):
            members.setdefault(chunk, []).append(at)
        for chunk, ring in members.items():
            for current, target in zip(ring, [*ring[1:], ring[0]], strict=True):
                if current != target:
                    _count(loads, chunk, current, target, grid, closed)
                    if len(ring) > 2:
                        _count(loads, chunk, target, current, grid, closed)
    return max(loads.values(), default=1)


def _count(
    loads: collections.Counter[tuple[int, ...]],
    chunk: int,
    current: list[int],
    target: list[int],
    grid: tuple[int, ...],
    closed: tuple[bool, ...],
) -> None:
    at = list(current)
    for axis, size in enumerate(grid):
        ahead = target[axis] - at[axis]
        if closed[axis] and abs(ahead) * 2 > size:
            ahead -= size if ahead > 0 else -size
        step = 1 if ahead > 0 else -1
        for _ in range(abs(ahead)):
            loads[(chunk, axis, step, *at)] += 1
            at[axis] = (at[axis] + step) % size
