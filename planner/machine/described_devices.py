"""Devices of a described machine: what a `jax.sharding.Mesh` needs to know, and no buffers.

A mesh over them serves all that reads a mesh: plans, specs, tracing. What needs a device that is
there (placing an array, running a program) fails in JAX; programs are compiled for them by
`isoshard.planner.programs`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from jax.sharding import Mesh

if TYPE_CHECKING:
    from .topologies import Topology


@dataclasses.dataclass(frozen=True, eq=False)
class DescribedDevice:
    """One device of a machine that is not here.

    Attributes:
        id: its number, from 0; devices are numbered by slice, then by `coords`.
        coords: its place: of a torus (x, y, z) within its slice; of GPUs (host, GPU of it), before
            it the rack where racks are described; of a CPU its number.
        process_index: its host.
        slice_index: its slice, joined to others by the data centre's network; of GPUs those that
            one switch joins.
        topology: the machine.
        core_on_chip: as of a TPU's `jax.Device`; a device is a whole chip here.
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
        """As short as of a `jax.Device`."""
        return f"DescribedDevice({self.topology.name}, id={self.id}, coords={self.coords})"


def is_described(mesh: object) -> bool:
    """Whether a mesh is over devices that are not here.

    Args:
        mesh: a mesh, or anything.
    """
    return isinstance(mesh, Mesh) and isinstance(mesh.devices.flat[0], DescribedDevice)
