"""The slices of a mesh's devices, and the axes that cross slices.

Slices are connected by the data centre's network (DCN), much slower than the interconnect within
one. A slice of GPUs or CPUs is the devices of one process, as far as JAX reports.

>>> from isoshard.core.layout.mesh import hybrid_mesh
>>> mesh = hybrid_mesh((2, 2), (2, 1), ("data", "model"))
>>> slice_ids(mesh, 2).tolist()             # virtual devices: two equal groups as slices
[[0, 0], [0, 0], [1, 1], [1, 1]]
>>> slice_axes(mesh, 2)
{'data': 2}

Devices without a slice index are one slice, unless `slices` is specified: then they are divided in
the order of their ids into equal groups, as by `hybrid_mesh`. A mesh does not record how it was
created: the same grid may be two slices of four devices or four of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError


def slice_ids(mesh: Mesh, slices: int | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The slice of each device.

    Args:
        mesh: over devices that are attached or described.
        slices: how many there are, for devices without a slice index.

    Returns:
        An array of the mesh's shape, int64.

    Raises:
        ShardingError: `slices` is not that of the devices, or does not divide their number.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> slice_ids(make_mesh((8,), ("x",))).max()
        np.int64(0)
    """
    devices = list(mesh.devices.flat)
    ids = np.array([_slice_of(device) for device in devices], np.int64)
    num_slices = len(set(ids.tolist()))
    if slices is not None and num_slices == 1:
        ids = _in_groups(devices, slices)
    elif slices is not None and slices != num_slices:
        raise ShardingError(
            f"the devices of the mesh are in {num_slices} slices, not slices={slices}: leave it "
            "out, it is for devices without a slice index"
        )
    return ids.reshape(mesh.devices.shape)


def slices_over(mesh: Mesh, axes: Sequence[str], slices: int | None = None) -> int:
    """The number of slices that a collective over some axes crosses; 1 within a slice.

    Args:
        mesh: over devices that are attached or described.
        axes: names of its axes.
        slices: as for `slice_ids`.

    Example:
        >>> from isoshard.core.layout.mesh import hybrid_mesh
        >>> mesh = hybrid_mesh((1, 4), (2, 1), ("data", "model"))
        >>> slices_over(mesh, ("model",), 2), slices_over(mesh, ("data", "model"), 2)
        (1, 2)
    """
    ids = slice_ids(mesh, slices)
    positions = [mesh.axis_names.index(name) for name in axes]
    if not positions:
        return 1
    last = range(-len(positions), 0)
    size = int(np.prod([ids.shape[axis] for axis in positions]))
    groups = np.moveaxis(ids, positions, last).reshape(-1, size)
    return max(len(set(group)) for group in groups.tolist())


def slice_axes(mesh: Mesh, slices: int | None = None) -> dict[str, int]:
    """The axes of a mesh that cross slices, over the slower network.

    Args:
        mesh: over devices that are attached or described.
        slices: how many slices there are, for devices without a slice index (CPUs of one process):
            they are divided in the order of their ids into equal groups, as by `iso.hybrid_mesh`.

    Returns:
        By name, the number of slices that a line of devices along the axis crosses. Axes within a
        slice are left out.

    Raises:
        ShardingError: `slices` is not that of the devices, or does not divide their number.

    Example:
        >>> from isoshard.core.layout.mesh import hybrid_mesh
        >>> slice_axes(hybrid_mesh((1, 4), (2, 1), ("data", "model")), slices=2)
        {'data': 2}
    """
    slices_by_axis = {name: slices_over(mesh, (name,), slices) for name in mesh.axis_names}
    return {name: count for name, count in slices_by_axis.items() if count > 1}


def _slice_of(device: Any) -> int:
    """The device's slice index; of GPUs and CPUs without one, its process."""
    index = getattr(device, "slice_index", None)
    if index is not None:
        return int(index)
    return 0 if device.platform == "tpu" else int(device.process_index)


def _in_groups(devices: Sequence[Any], slices: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if isinstance(slices, bool) or slices < 1 or len(devices) % slices:
        raise ShardingError(
            f"slices={slices!r} does not divide the {len(devices)} devices of the mesh into equal "
            "groups"
        )
    order = np.argsort([device.id for device in devices])
    ids = np.empty(len(devices), np.int64)
    ids[order] = np.arange(len(devices)) // (len(devices) // slices)
    return ids
