"""Machines by a short text, and meshes over them.

>>> machine = topology("v5e:16x16")
>>> machine.size, machine.chip.memory, machine.hosts
(256, 16000000000, 64)
>>> mesh = machine.mesh((16, 16), ("data", "model"))
>>> mesh.shape["model"], topology_of(mesh) is machine
(16, True)

| text | machine |
|---|---|
| `v5e:16x16`, `v6e:4x4`, `v5p:8x8x8`, `v4:4x4x4` | a slice of TPUs: its grid, as libtpu names it |
| `v5e:4*16x16` | four such slices, joined by the data centre's network (DCN) |
| `h100:2x8`, `b200:8` | hosts x GPUs of one; one host |
| `gb200:4x18x4` | racks x hosts of one x GPUs of one; NVLink joins the 72 GPUs of a rack |
| `gb200:6x4` | hosts x GPUs within one rack |
| `cpu:64` | virtual devices of one host |
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import ShardingError, cached

from .chips import Chip, chip, chip_of_kind
from .measured_cpu import cpu_chip
from .slice_grids import check_grid, host_grid, ordered, wraps


@dataclasses.dataclass(frozen=True, eq=False)
class DescribedDevice:
    """One device of hardware that is not attached: what a `jax.sharding.Mesh` reads, no buffers.

    A mesh over them serves all that reads a mesh: plans, specs, tracing. Placing an array or
    running a program fails in JAX; programs are compiled for them by `isoshard.planner.programs`.

    Attributes:
        id: from 0, by slice, then by `coords`.
        coords: of a torus (x, y, z) within its slice; of GPUs (host, GPU of it), before it the
            rack where racks are described; of a CPU its id.
        process_index: its host.
        slice_index: its slice, joined to others by the data centre's network; of GPUs those of
            one switch.
        topology: the machine.
        core_on_chip: as of a TPU's `jax.Device`; a device is a full chip here.
    """

    id: int
    coords: tuple[int, ...]
    process_index: int
    slice_index: int
    topology: Topology
    core_on_chip: int = 0

    @property
    def platform(self) -> str:
        """As of a `jax.Device`: "tpu", "gpu" or "cpu"."""
        return self.topology.chip.platform

    @property
    def device_kind(self) -> str:
        """As of a `jax.Device`."""
        return self.topology.chip.kind

    def __repr__(self) -> str:
        """Short, as of a `jax.Device`."""
        return f"DescribedDevice({self.topology.name}, id={self.id}, coords={self.coords})"


@dataclasses.dataclass(frozen=True)
class Topology:
    """A described machine.

    Attributes:
        name: its text, e.g. "v5e:16x16".
        chip: of its devices.
        shape: of a torus, its grid; of hosts joined by a network, (hosts, devices of one), with
            racks before them (racks, hosts of one, devices of one).
        slices: how many such machines are joined by the data centre's network.

    Example:
        >>> machine = topology("h100:2x8")
        >>> machine.size, machine.shape, machine.chip.name
        (16, (2, 8), 'h100')
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """How many devices there are."""
        return self.slices * math.prod(self.shape)

    @property
    def per_host(self) -> int:
        """How many devices one host has."""
        return math.prod(host_grid(self.chip, self.shape))

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return self.size // self.per_host

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Of a torus, which axes of its grid have wrap-around links."""
        return wraps(self.chip, self.shape)

    @functools.cached_property
    def devices(self) -> tuple[DescribedDevice, ...]:
        """The devices in the order of their ids: by slice, then by coordinates."""
        return tuple(self._device(id_) for id_ in range(self.size))

    def _device(self, id_: int) -> DescribedDevice:
        per_slice = math.prod(self.shape)
        slice_index, within = divmod(id_, per_slice)
        at = tuple(int(axis) for axis in np.unravel_index(within, self.shape))
        blocks = host_grid(self.chip, self.shape)
        host_coords = [axis // block for axis, block in zip(at, blocks, strict=True)]
        grid = [size // block for size, block in zip(self.shape, blocks, strict=True)]
        # Host ids of a torus increase along x first, as in libtpu; of GPUs row by row.
        order = "F" if self.chip.links else "C"
        host = int(np.ravel_multi_index(tuple(host_coords), tuple(grid), order=order))
        if self.chip.links:
            at = (*at, *(0,) * (3 - len(at)))
        elif self.chip.platform == "gpu":
            slice_index = id_ // math.prod(self.shape[1:])
            if self.chip.domain and len(self.shape) < 3:
                slice_index = 0
        return DescribedDevice(
            id_, at, host + (id_ // per_slice) * math.prod(grid), slice_index, self
        )

    def mesh(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str],
        *,
        slices: Mapping[str, int] | None = None,
    ) -> Mesh:
        """Make a mesh with Auto axes over the machine.

        Devices are arranged as by `jax.experimental.mesh_utils`: of a torus the last axes get full
        axes of the torus, or products of them, first; of GPUs the last axes are inside a host.
        `links.links` returns the links of each axis.

        Args:
            shape: sizes of the axes; their product is at most the number of devices. A smaller
                mesh takes a block of the grid, or the first slices or hosts.
            axis_names: a name for each.
            slices: how many slices each axis spans, by name; by default the first axes that can.

        Raises:
            ShardingError: the machine has fewer devices, or no block of its grid has so many, or
                the axes do not span the slices.

        Example:
            >>> two = topology("v5e:2*4x4").mesh((2, 4, 4), ("replica", "data", "model"))
            >>> [int(device.slice_index) for device in two.devices[:, 0, 0]]
            [0, 1]
        """
        if len(shape) != len(axis_names):
            raise ShardingError(
                f"a mesh of shape {tuple(shape)} has {len(shape)} axes, and axis_names has "
                f"{len(axis_names)}: {', '.join(axis_names)}"
            )
        target = math.prod(shape)
        if target > self.size:
            raise ShardingError(
                f"a mesh of shape {tuple(shape)} has {target} devices, and {self.name} has "
                f"{self.size}: make the mesh smaller, or use a larger machine"
            )
        spans = None if slices is None else tuple(slices.items())
        return _mesh(self, tuple(shape), tuple(axis_names), spans)


@cached(256)
def _mesh(
    machine: Topology,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    slices: tuple[tuple[str, int], ...] | None,
) -> Mesh:
    grid = ordered(machine, shape, names, None if slices is None else dict(slices))
    return Mesh(grid, names, axis_types=(jax.sharding.AxisType.Auto,) * len(names))


def topology(text: str) -> Topology:
    """Describe a machine.

    Args:
        text: chip and grid, e.g. "v5e:16x16", "v5p:8x8x8", "h100:2x8" (hosts x devices of one),
            "cpu:64"; before the grid `N*` slices as in "v5e:2*16x16".

    Returns:
        The machine; the same object for the same text.

    Raises:
        ShardingError: there is no such chip, or it is wired differently.

    Example:
        >>> topology("v5e:2*16x16").size
        512
    """
    match = re.fullmatch(r"(?P<chip>\w+):(?:(?P<slices>\d+)\*)?(?P<grid>\d+(?:x\d+)*)", text)
    if match is None:
        raise ShardingError(
            f"{text!r} is not a topology: write a chip and its grid, such as 'v5e:16x16', "
            "'h100:2x8' (hosts x devices of one) or 'cpu:64', with slices before the grid as in "
            "'v5e:2*16x16'"
        )
    grid = tuple(map(int, match["grid"].split("x")))
    return _described(text, chip(match["chip"]), grid, int(match["slices"] or 1))


@cached(1024)
def _described(text: str, chip: Chip, grid: tuple[int, ...], slices: int) -> Topology:
    return _topology(text, chip, check_grid(chip, grid, slices, text), slices)


@cached(1024)
def _topology(name: str, chip: Chip, shape: tuple[int, ...], slices: int) -> Topology:
    return Topology(name, chip, shape, slices)


def topology_of(mesh: Mesh) -> Topology:
    """The machine of a mesh.

    Args:
        mesh: over attached or described devices.

    Returns:
        The machine. Of virtual CPU devices "cpu:N", with the measured rates of this host (once in
        a process); of an attached TPU or GPU all devices of its client.

    Raises:
        ShardingError: there is no chip for the devices.

    Example:
        >>> topology_of(topology("v5e:4x4").mesh((16,), ("data",))).name
        'v5e:4x4'
    """
    first = mesh.devices.flat[0]
    if isinstance(first, DescribedDevice):
        return first.topology
    return _of_devices(mesh)


@cached(64)
def _of_devices(mesh: Mesh) -> Topology:
    first = mesh.devices.flat[0]
    if first.platform == "cpu":
        return _topology(f"cpu:{mesh.size}", cpu_chip(mesh.size), (mesh.size,), 1)
    chip = chip_of_kind(first.device_kind)
    every = first.client.devices()
    slices = max(1, len({getattr(device, "slice_index", 0) for device in every}))
    if chip.links:
        positions = np.array([device.coords for device in every])
        shape = tuple(int(size) for size in np.ptp(positions, axis=0) + 1)[: chip.links]
        name = f"{slices}*" * (slices > 1) + "x".join(map(str, shape))
        return _topology(f"{chip.name}:{name}", chip, shape, slices)
    hosts = max(slices, -(-len(every) // chip.per_host))
    shape = (hosts, max(1, len(every) // hosts))
    return _topology(f"{chip.name}:{shape[0]}x{shape[1]}", chip, shape, 1)


def device_memory(mesh: Mesh, memory: object = None) -> int:
    """The bytes that one device may use: the caller's, else those of its chip.

    Args:
        mesh: over attached or described devices.
        memory: bytes; None for the chip's.

    Raises:
        ValueError: `memory` is not a number of bytes.

    >>> mesh = topology("v5e:2x4").mesh((8,), ("data",))
    >>> device_memory(mesh), device_memory(mesh, 8 * 10**9)
    (16000000000, 8000000000)
    """
    if memory is None:
        return topology_of(mesh).chip.memory
    if isinstance(memory, bool) or not isinstance(memory, int | float) or not memory > 0:
        raise ValueError(
            f"memory= is the bytes that one device may use, such as 16 * 10**9, not {memory!r}; "
            "None uses the chip's"
        )
    return int(memory)
