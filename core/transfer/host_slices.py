"""Host slices: the shard of a host array for each device of this process.

The host array may be the global array, or this process's local data (see `process_local`).

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.layout.spec import named_sharding
>>> rows = named_sharding(("x", None), make_mesh((8,), ("x",)), 2)
>>> [(row.position, row.start) for row in host_slices(rows, (16, 3))][:3]
[(0, (0, 0)), (1, (2, 0)), (2, (4, 0))]
"""

from __future__ import annotations

import dataclasses

from jax.sharding import NamedSharding, Sharding

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.virtual_devices import Device
from isoshard.core.runtime.caches import cached


@dataclasses.dataclass(frozen=True, eq=False)
class HostSlice:
    """One device's slice of a host array.

    Attributes:
        device: of this process.
        position: its position in the flattened mesh.
        start: the start of the slice in the global array.
        index: the slice of the host array.
    """

    device: Device
    position: int
    start: tuple[int, ...]
    index: tuple[slice, ...]


@cached(4096)
def host_slices(sharding: Sharding, shape: tuple[int, ...]) -> tuple[HostSlice, ...]:
    """The slices of a host array with the global shape."""
    mesh_positions = positions(sharding)
    return tuple(
        HostSlice(device, mesh_positions[device], start_of(index), index or ())
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    )


def positions(sharding: Sharding) -> dict[Device, int]:
    """Each device's position in the flattened mesh; without a mesh, its id."""
    if isinstance(sharding, NamedSharding):
        return {device: at for at, device in enumerate(mesh_of(sharding).devices.flat)}
    return {device: device.id for device in sharding.device_set}


def start_of(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    """The start of a device's slice, by axis.

    Example:
        >>> start_of((slice(4, 8), slice(None)))
        (4, 0)
    """
    return tuple(range_.start or 0 for range_ in index or ())
