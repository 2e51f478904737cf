"""Programs of machines with several slices: which devices of the mesh their numbers are.

XLA's partitioner writes one program for all devices, and numbers them as the mesh has them. libtpu
writes the program of one slice: it numbers the devices of a slice, in the mesh's order, and what
goes to other slices are transfers by the host (`hlo_slice_transfers`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import Groups, HloModule, slice_ids, transfer

_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")


class SlicesTalking(NamedTuple):
    """Slices in one transfer.

    Attributes:
        axes: of the mesh, along which they talk.
        slices: how many talk with each other.
    """

    axes: tuple[str, ...]
    slices: int


class SlicedProgram:
    """A program, and the slices of its mesh.

    Args:
        module: the program of one device.
        mesh: over all devices, in their order.
        slices: how many slices they are in, if they do not know.
    """

    def __init__(self, module: HloModule, mesh: Mesh, slices: int | None = None):
        """See the class."""
        self.mesh = mesh
        self.numbers = slice_ids(mesh, slices)
        flat = self.numbers.ravel()
        match = _PARTITIONS.search(module.header)
        self.first: list[int] | None = None
        if match and flat.min() != flat.max() and int(match[1]) < mesh.size:
            self.first = np.flatnonzero(flat == flat[0]).tolist()

    def of_mesh(self, groups: Groups | None) -> Groups | None:
        """Groups of a program's device numbers as places in the mesh; of one slice for all."""
        if self.first is None:
            return groups
        if not groups:
            return (tuple(self.first),)
        return tuple(tuple(self.first[device] for device in group) for group in groups)

    def talking(self, instruction: str) -> SlicesTalking:
        """Who talks in a transfer by the host; no axes and no slices of all other instructions."""
        result = transfer(instruction)
        if result is None:
            return SlicesTalking((), 0)
        corners = [np.argwhere(self.numbers == one).min(axis=0) for one in np.unique(self.numbers)]
        talking: set[int] = set()
        for group in result.slices:
            positions = np.stack([corners[device] for device in group])
            talking |= set(np.flatnonzero(np.ptp(positions, axis=0)).tolist())
        axes = tuple(self.mesh.axis_names[axis] for axis in sorted(talking))
        return SlicesTalking(axes, max(map(len, result.slices)))

    def met(self, groups: Groups | None, *, exact: bool) -> int:
        """In how many slices devices are that talk; 0 if it is not known.

        Args:
            groups: as places in the mesh; None or () are all.
            exact: whether the mesh is the one that is asked for. One that is smaller along an axis
                tells only that they stay in one of its slices.
        """
        flat = self.numbers.ravel()
        if flat.min() == flat.max() or not groups:
            return 0
        most = max(len(set(flat[list(group)].tolist())) for group in groups)
        return most if exact or most == 1 else 0
