"""Programs of machines with several slices: the devices of the mesh that their ids refer to.

XLA's partitioner writes one program for all devices, with ids in the mesh's order. libtpu writes
the program of one slice, with ids of its devices in the mesh's order; data for other slices are
transfers by the host (`hlo_slice_transfers`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from isoshard.core.kit import Groups, HloModule, slice_ids, transfer

_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")


class SlicesTalking(NamedTuple):
    """The slices of one transfer.

    Attributes:
        axes: the mesh axes between them.
        slices: how many exchange data with each other.
    """

    axes: tuple[str, ...]
    slices: int


class SlicedProgram:
    """A program, and the slices of its mesh.

    Args:
        module: the program of one device.
        mesh: over all devices, in their order.
        slices: how many slices they are in, for devices without a slice index.
    """

    def __init__(self, module: HloModule, mesh: Mesh, slices: int | None = None):
        """See the class."""
        self.mesh = mesh
        self.slice_ids = slice_ids(mesh, slices)
        flat = self.slice_ids.ravel()
        match = _PARTITIONS.search(module.header)
        self.first: list[int] | None = None
        if match and flat.min() != flat.max() and int(match[1]) < mesh.size:
            self.first = np.flatnonzero(flat == flat[0]).tolist()

    def of_mesh(self, groups: Groups | None) -> Groups | None:
        """Groups of a program's device ids as indices in the mesh; of one slice for all."""
        if self.first is None:
            return groups
        if not groups:
            return (tuple(self.first),)
        return tuple(tuple(self.first[device] for device in group) for group in groups)

    def talking(self, instruction: str) -> SlicesTalking:
        """The slices of a transfer by the host; no axes and 0 slices for other instructions."""
        result = transfer(instruction)
        if result is None:
            return SlicesTalking((), 0)
        corners = [
            np.argwhere(self.slice_ids == slice_id).min(axis=0)
            for slice_id in np.unique(self.slice_ids)
        ]
        talking: set[int] = set()
        for group in result.slices:
            positions = np.stack([corners[device] for device in group])
            talking |= set(np.flatnonzero(np.ptp(positions, axis=0)).tolist())
        axes = tuple(self.mesh.axis_names[axis] for axis in sorted(talking))
        return SlicesTalking(axes, max(map(len, result.slices)))

    def slice_count(self, groups: Groups | None, *, exact: bool) -> int:
        """In how many slices the devices of a group are; 0 if it is not known.

        Args:
            groups: as indices in the mesh; None or () are all.
            exact: whether the mesh is the planned one. One that is smaller along an axis decides
                only whether they are in one slice.
        """
        flat = self.slice_ids.ravel()
        if flat.min() == flat.max() or not groups:
            return 0
        most = max(len(set(flat[list(group)].tolist())) for group in groups)
        return most if exact or most == 1 else 0
