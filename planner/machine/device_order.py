"""The order of a machine's devices in a mesh: as `jax.experimental.mesh_utils` would choose it.

Axes of a mesh are mapped to axes of the torus, or to products of them, from the last to the first,
since the last ones talk most; where no whole axes fit, an axis is split. Slices go to the first
axes that can take them, unless they are told.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from isoshard.core.kit import ShardingError, meshes

from .slice_grids import wraps

if TYPE_CHECKING:
    from .described_devices import DescribedDevice
    from .topologies import Topology


def ordered(
    machine: Topology,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    slices: Mapping[str, int] | None,
) -> np.ndarray[Any, Any]:
    """Arrange devices as a grid.

    Args:
        machine: whose devices.
        shape: of the mesh; at most as many devices as there are.
        names: of its axes, for messages.
        slices: how many slices each axis spans, by name; None to find it.

    Raises:
        ShardingError: no block of the machine has so many devices, or the axes do not span the
            slices.
    """
    target, per_slice = math.prod(shape), math.prod(machine.shape)
    if not machine.chip.links:
        if slices:
            raise ShardingError(
                f"{machine.name} has no slices to lay along {', '.join(slices)}: leave them out"
            )
        return np.array(machine.devices[:target], object).reshape(shape)
    count = -(-target // per_slice)
    if count == 1 and not (slices and math.prod(slices.values()) > 1):
        return meshes.DEVICE_MESH.found()(
            shape, _block(machine, target), allow_split_physical_axes=True
        )
    over = _slices_of_axes(machine, shape, names, slices, count)
    inside = [size // chunk for size, chunk in zip(shape, over, strict=True)]
    devices = machine.devices[: math.prod(over) * per_slice]
    return meshes.HYBRID_MESH.found()(inside, over, devices, allow_split_physical_axes=True)


def _slices_of_axes(
    machine: Topology,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    slices: Mapping[str, int] | None,
    count: int,
) -> list[int]:
    """How many slices each axis spans."""
    per_slice = math.prod(machine.shape)
    if slices is not None:
        over = [slices.get(name, 1) for name in names]
        join = ", ".join(f"{name} {size}" for name, size in slices.items())
        unknown = sorted(set(slices) - set(names))
        if unknown:
            raise ShardingError(
                f"slices are told for {', '.join(unknown)}; the axes are {', '.join(names)}"
            )
        uneven = any(size % chunk for size, chunk in zip(shape, over, strict=True))
        if uneven or math.prod(over) * per_slice != math.prod(shape):
            raise ShardingError(
                f"a mesh of shape {shape} does not span slices so: {join}. Each axis must be a "
                f"multiple of its slices, and their product {math.prod(shape) / per_slice:g}, as "
                f"a slice of {machine.name} has {per_slice} devices"
            )
        return over
    over, left = [], count
    for size in shape:
        over.append(math.gcd(size, left))
        left //= over[-1]
    if left > 1 or math.prod(shape) != count * per_slice:
        raise ShardingError(
            f"a mesh of shape {shape} does not fill whole slices: one of {machine.name} has "
            f"{per_slice} devices. Make it a multiple of them, or at most so many"
        )
    return over


def _block(machine: Topology, target: int) -> Sequence[DescribedDevice]:
    """The devices of a block of the grid: all of a slice, or the least stretched part of it."""
    grid = machine.shape
    if target == math.prod(grid):
        return machine.devices[:target]
    choices = [
        sizes
        for sizes in itertools.product(
            *([n for n in range(1, size + 1) if target % n == 0] for size in grid)
        )
        if math.prod(sizes) == target
    ]
    if not choices:
        raise ShardingError(
            f"no block of {machine.name} has {target} devices: take a divisor of "
            f"{math.prod(grid)} that is a product of at most "
            f"{' x '.join(map(str, grid))}"
        )

    def stretched(sizes: tuple[int, ...]) -> tuple[Any, ...]:
        closed = wraps(machine.chip, grid)
        stretched = sum(
            one and size == full for one, size, full in zip(closed, sizes, grid, strict=True)
        )
        return (sum(sizes) - stretched, sizes)

    best = min(choices, key=stretched)
    return [
        device
        for device in machine.devices[: math.prod(grid)]
        if all(at < size for at, size in zip(device.coords, best, strict=False))
    ]
