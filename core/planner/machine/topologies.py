"""Machines by a short text, and meshes over them.

>>> machine = topology("v5e:16x16")
>>> machine.size, machine.chip.memory
(256, 16000000000)
>>> mesh = machine.mesh((16, 16), ("data", "model"))
>>> mesh.shape["model"], topology_of(mesh) is machine
(16, True)
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError

from .chips import Chip, chip
from .described_devices import DescribedDevice, is_described


@dataclasses.dataclass(frozen=True)
class Topology:
    """A described machine.

    Attributes:
        name: its text, e.g. "v5e:16x16".
        chip: what its devices are.
        shape: of a torus, its grid; of hosts joined by a network, (hosts, devices of one).
        slices: how many such machines are joined by the data centre's network.
    """

    name: str
    chip: Chip
    shape: tuple[int, ...]
    slices: int = 1

    @property
    def size(self) -> int:
        """How many devices there are."""
        return self.slices * math.prod(self.shape)

    @functools.cached_property
    def devices(self) -> tuple[DescribedDevice, ...]:
        """The devices in the order of their numbers."""
        per_slice = math.prod(self.shape)
        return tuple(
            DescribedDevice(
                number,
                tuple(int(at) for at in np.unravel_index(number % per_slice, self.shape)),
                number // self.chip.per_host,
                number // per_slice,
                self,
            )
            for number in range(self.size)
        )

    def mesh(self, shape: Sequence[int], axis_names: Sequence[str]) -> Mesh:
        """Make a mesh with Auto axes over the machine.

        Args:
            shape: sizes of the axes; their product is at most the number of devices.
            axis_names: a name for each.

        Raises:
            ShardingError: the machine has fewer devices.
        """
        wanted = math.prod(shape)
        if wanted > self.size:
            raise ShardingError(
                f"a mesh of shape {tuple(shape)} has {wanted} devices, and {self.name} has "
                f"{self.size}"
            )
        devices = np.array(self.devices[:wanted], object).reshape(tuple(shape))
        auto = (jax.sharding.AxisType.Auto,) * len(axis_names)
        return Mesh(devices, tuple(axis_names), axis_types=auto)


@functools.cache
def topology(text: str) -> Topology:
    """Describe a machine.

    Args:
        text: chip and grid, e.g. "v5e:16x16", "v5p:8x8x8", "h100:2x8" (hosts x devices of one),
            "cpu:64"; before the grid `Nx` slices as in "v5e:2*16x16".

    Returns:
        The machine; the same object for the same text.

    Raises:
        ShardingError: there is no such chip, or it is not wired so.
    """
    found = re.fullmatch(r"(?P<chip>\w+):(?:(?P<slices>\d+)\*)?(?P<grid>\d+(?:x\d+)*)", text)
    if found is None:
        raise ShardingError(
            f"{text!r} is no topology: write a chip and its grid, such as 'v5e:16x16', "
            "'h100:2x8' (hosts x devices of one) or 'cpu:64'"
        )
    grid = tuple(map(int, found["grid"].split("x")))
    return Topology(text, chip(found["chip"]), grid, int(found["slices"] or 1))


def topology_of(mesh: Mesh) -> Topology:
    """The machine that a mesh is over.

    Args:
        mesh: over described devices, or over devices that are here.

    Returns:
        The machine. Of virtual CPU devices "cpu:N".
    """
    if is_described(mesh):
        return mesh.devices.flat[0].topology
    return topology(f"cpu:{mesh.size}")
