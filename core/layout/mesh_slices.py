"""Which devices of a mesh are in one slice, and which axes go from slice to slice.

Slices are joined by the data centre's network (DCN), much slower than what joins the devices
of one. Of GPUs and CPUs in several processes a slice is what shares a host, as far as JAX knows.

>>> from isoshard.core.layout.mesh import hybrid_mesh
>>> mesh = hybrid_mesh((2, 2), (2, 1), ("data", "model"))
>>> slice_numbers(mesh, 2).tolist()             # virtual devices: two equal groups stand for slices
[[0, 0], [0, 0], [1, 1], [1, 1]]
>>> slice_axes(mesh, 2)
{'data': 2}

Devices that know no slices are one, unless a number is given: then they are divided in the order of
their ids into equal groups, as `hybrid_mesh` divides them. A mesh does not remember how it was
made: the same grid may stand for two slices of four devices or for four of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import Mesh

from isoshard.core.errors import ShardingError


def slice_numbers(mesh: Mesh, slices: int | None = None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The slice of each device.

    Args:
        mesh: over devices that are here or described.
        slices: how many there are, if the devices do not know.

    Returns:
        An array of the mesh's shape, int64.

    Raises:
        ShardingError: `slices` is not what the devices say, or does not divide their number.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> slice_numbers(make_mesh((8,), ("x",))).max()
        np.int64(0)
    """
    devices = list(mesh.devices.flat)
    numbers = np.array([_slice_of(device) for device in devices], np.int64)
    known = len(set(numbers.tolist()))
    if slices is not None and known == 1:
        numbers = _in_groups(devices, slices)
    elif slices is not None and slices != known:
        raise ShardingError(
            f"the devices of the mesh are in {known} slices, and slices={slices} is given: leave "
            "it out, it is for devices that know no slices"
        )
    return numbers.reshape(mesh.devices.shape)


def slices_along(mesh: Mesh, axes: Sequence[str], slices: int | None = None) -> int:
    """How many slices devices are in that talk along axes; 1 if they stay in theirs.

    Args:
        mesh: over devices that are here or described.
        axes: names of its axes.
        slices: as for `slice_numbers`.

    Example:
        >>> from isoshard.core.layout.mesh import hybrid_mesh
        >>> mesh = hybrid_mesh((1, 4), (2, 1), ("data", "model"))
        >>> slices_along(mesh, ("model",), 2), slices_along(mesh, ("data", "model"), 2)
        (1, 2)
    """
    numbers = slice_numbers(mesh, slices)
    talking = [mesh.axis_names.index(name) for name in axes]
    if not talking:
        return 1
    last = range(-len(talking), 0)
    size = int(np.prod([numbers.shape[axis] for axis in talking]))
    groups = np.moveaxis(numbers, talking, last).reshape(-1, size)
    return max(len(set(group)) for group in groups.tolist())


def slice_axes(mesh: Mesh, slices: int | None = None) -> dict[str, int]:
    """The axes of a mesh that go from slice to slice, over the slower network.

    Args:
        mesh: over devices that are here or described.
        slices: how many slices there are, for devices that know none (CPUs of one process): they
            are divided in the order of their ids into equal groups, as `iso.hybrid_mesh` does.

    Returns:
        By name, how many slices a line of devices along the axis is in. Axes that stay inside are
        left out.

    Raises:
        ShardingError: `slices` is not what the devices say, or does not divide their number.

    Example:
        >>> from isoshard.core.layout.mesh import hybrid_mesh
        >>> slice_axes(hybrid_mesh((1, 4), (2, 1), ("data", "model")), slices=2)
        {'data': 2}
    """
    found = {name: slices_along(mesh, (name,), slices) for name in mesh.axis_names}
    return {name: count for name, count in found.items() if count > 1}


def _slice_of(device: Any) -> int:
    """As the device says; of GPUs and CPUs that do not, its process."""
    known = getattr(device, "slice_index", None)
    if known is not None:
        return int(known)
    return 0 if device.platform == "tpu" else int(device.process_index)


def _in_groups(devices: Sequence[Any], slices: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    if isinstance(slices, bool) or slices < 1 or len(devices) % slices:
        raise ShardingError(
            f"slices={slices!r} does not divide the {len(devices)} devices of the mesh into equal "
            "groups"
        )
    order = np.argsort([device.id for device in devices])
    numbers = np.empty(len(devices), np.int64)
    numbers[order] = np.arange(len(devices)) // (len(devices) // slices)
    return numbers
