"""Slices: which part of a host array each device of this process gets.

A `HostSlice` is one device's slice of a host array. The array may be the whole, or the part of it
that this process has (see `process_local`).

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.layout.spec import named_sharding
>>> rows = named_sharding(("x", None), make_mesh((8,), ("x",)), 2)
>>> [(one.number, one.start) for one in cuts_of(rows, (16, 3))][:3]
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
        number: its position in the flattened mesh.
        start: where the slice starts in the whole array.
        index: its place in the host array.
    """

    device: Device
    number: int
    start: tuple[int, ...]
    index: tuple[slice, ...]


@cached(4096)
def cuts_of(sharding: Sharding, shape: tuple[int, ...]) -> tuple[HostSlice, ...]:
    """The cuts of a host array that is whole.

    Args:
        sharding: the layout.
        shape: of the array.

    Returns:
        One cut per device of this process.
    """
    numbers = positions(sharding)
    return tuple(
        HostSlice(device, numbers[device], start_of(index), index or ())
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    )


def positions(sharding: Sharding) -> dict[Device, int]:
    """Each device's position in the flattened mesh; where there is no mesh, its id."""
    if isinstance(sharding, NamedSharding):
        return {device: at for at, device in enumerate(mesh_of(sharding).devices.flat)}
    return {device: device.id for device in sharding.device_set}


def start_of(index: tuple[slice, ...] | None) -> tuple[int, ...]:
    """Where a device's slice starts, by axis.

    Example:
        >>> start_of((slice(4, 8), slice(None)))
        (4, 0)
    """
    return tuple(part.start or 0 for part in index or ())
