"""Grids of chips: those that vendors offer, their hosts and wrap-around links, and meshes on them.

A torus slice of v5e or v6e is one of a list of flat grids, and only an axis of 16 has wrap-around
links (https://docs.cloud.google.com/tpu/docs/v5e). v4 and v5p consist of cubes of 4 x 4 x 4 joined
by optical switches: full cubes wrap around in all three axes, less than a cube in none
(https://jax-ml.github.io/scaling-book/tpus). Twisted tori are described as plain ones. GPUs are a
number of hosts and of GPUs in each; where one switch joins several hosts (GB200: 18 trays of four
are a rack of 72), the number of racks comes first.

The order of devices in a mesh is that of `jax.experimental.mesh_utils`: axes of a mesh are mapped
to axes of the torus, or to products of them, from the last to the first, since the last ones
communicate most; where no full axes fit, an axis is split. Slices are along the first axes that
can have them, unless the caller decides.

>>> from .chips import chip
>>> wraps(chip("v5e"), (8, 16)), wraps(chip("v5p"), (4, 4, 8)), wraps(chip("v5p"), (2, 4, 4))
((False, True), (True, True, True), (False, False, False))
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from isoshard.core.kit import ShardingError, meshes

from .chips import Chip

if TYPE_CHECKING:
    from .topologies import DescribedDevice, Topology


def wraps(chip: Chip, grid: tuple[int, ...]) -> tuple[bool, ...]:
    """Which axes of a torus have wrap-around links."""
    if not chip.links or not chip.wrap:
        return (False,) * len(grid)
    closed = tuple(size % chip.wrap == 0 for size in grid)
    return closed if chip.links < 3 else (all(closed),) * len(grid)


def host_grid(chip: Chip, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The block of a torus of one host.

    Eight chips of v5e or v6e in one slice are one host's; of larger slices each host, a VM, has
    four, as in libtpu's description.
    """
    if not chip.host or len(chip.host) != len(grid):
        return (1,) * (len(grid) - 1) + (min(grid[-1], chip.per_host),)
    if chip.links == 2 and grid == (2, 4):
        return grid
    return tuple(math.gcd(host_size, size) for host_size, size in zip(chip.host, grid, strict=True))


def check_grid(chip: Chip, grid: tuple[int, ...], slices: int, text: str) -> tuple[int, ...]:
    """Check that there is such a machine.

    Returns:
        The grid; GPUs of one host get that host as a first axis.

    Raises:
        ShardingError: the chips are wired differently, or the vendor offers no such slice.
    """
    if 0 in grid or slices == 0:
        raise ShardingError(f"{text!r} has no devices: every size is at least 1")
    if chip.platform == "cpu":
        return _check_cpu(grid, slices, text)
    if chip.links:
        _check_torus(chip, grid, text)
        return grid
    return _check_hosts(chip, grid, slices, text)


def _check_cpu(grid: tuple[int, ...], slices: int, text: str) -> tuple[int, ...]:
    if len(grid) > 1 or slices > 1:
        raise ShardingError(
            f"{text!r}: devices of a CPU have no grid, only a count: write "
            f"'cpu:{slices * math.prod(grid)}'"
        )
    return grid


def _check_torus(chip: Chip, grid: tuple[int, ...], text: str) -> None:
    if len(grid) != chip.links:
        raise ShardingError(
            f"{text!r}: {chip.name} is wired as a torus of {chip.links} axes, and "
            f"{_written(grid)} has {len(grid)}; write one such as {chip.name}:{_example(chip)}"
        )
    cube = chip.links == 3 and chip.wrap and all(size % chip.wrap == 0 for size in grid)
    largest = chip.largest or math.prod(grid)
    if not chip.shapes or grid in chip.shapes or (cube and math.prod(grid) <= largest):
        return
    offered = ", ".join(map(_written, chip.shapes))
    if chip.links == 3:
        offered += (
            f", and whole cubes: three multiples of {chip.wrap} with at most {chip.largest} chips"
        )
    turned = tuple(sorted(grid))
    hint = f" Did you mean {chip.name}:{_written(turned)}?" if turned in chip.shapes else ""
    more = math.prod(grid) > largest
    hint += (
        f" {math.prod(grid)} chips are more than one slice has: join slices, as in "
        f"'{chip.name}:2*{_example(chip)}'."
        if more
        else ""
    )
    raise ShardingError(
        f"{text!r}: there is no slice of {_written(grid)} {chip.name}; there are {offered}.{hint}"
    )


def _check_hosts(chip: Chip, grid: tuple[int, ...], slices: int, text: str) -> tuple[int, ...]:
    hosts = chip.domain // chip.per_host if chip.domain else 0
    racks = f", or racks x {hosts} x {chip.per_host}" if hosts else ""
    form = f"hosts x GPUs of one (at most {chip.per_host}){racks}"
    if slices > 1:
        raise ShardingError(
            f"{text!r}: slices are of TPUs; GPUs of all hosts are joined by one network: write "
            f"{form}"
        )
    if len(grid) == 1:
        grid = (1, *grid)
    if len(grid) > (3 if hosts else 2):
        raise ShardingError(f"{text!r}: a machine of {chip.name} is {form}")
    if grid[-1] > chip.per_host or chip.per_host % grid[-1]:
        fit = [n for n in range(1, chip.per_host + 1) if chip.per_host % n == 0]
        raise ShardingError(
            f"{text!r}: a host has {chip.per_host} {chip.name}, of which a job takes "
            f"{', '.join(map(str, fit))}, not {grid[-1]}; write {form}"
        )
    if hosts and grid[-2] > hosts:
        count = -(-grid[-2] // hosts)
        raise ShardingError(
            f"{text!r}: one switch joins {hosts} hosts of {chip.name} at most, not {grid[-2]}; "
            f"with more racks write '{chip.name}:{count}x{hosts}x{grid[-1]}'"
        )
    return grid


def _written(grid: tuple[int, ...]) -> str:
    return "x".join(map(str, grid))


def _example(chip: Chip) -> str:
    return "16x16" if chip.links == 2 else "8x8x8" if chip.links == 3 else "8"


def ordered(
    machine: Topology,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    slices: Mapping[str, int] | None,
) -> np.ndarray[Any, Any]:
    """Arrange the devices of a machine for a mesh.

    Args:
        machine: the machine.
        shape: of the mesh; at most as many devices as there are.
        names: of its axes, for messages.
        slices: how many slices each axis spans, by name; None decides it.

    Raises:
        ShardingError: no block of the machine has so many devices, or the axes do not span the
            slices.
    """
    target, per_slice = math.prod(shape), math.prod(machine.shape)
    if not machine.chip.links:
        if slices:
            raise ShardingError(
                f"{machine.name} has no slices for axes {', '.join(slices)}: leave slices= out"
            )
        return np.array(machine.devices[:target], object).reshape(shape)
    count = -(-target // per_slice)
    if count == 1 and not (slices and math.prod(slices.values()) > 1):
        return meshes.DEVICE_MESH.resolve()(
            shape, _block(machine, target), allow_split_physical_axes=True
        )
    over = _slices_of_axes(machine, shape, names, slices, count)
    inside = [size // chunk for size, chunk in zip(shape, over, strict=True)]
    devices = machine.devices[: math.prod(over) * per_slice]
    return meshes.HYBRID_MESH.resolve()(inside, over, devices, allow_split_physical_axes=True)


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
        spans = ", ".join(f"{name} {size}" for name, size in slices.items())
        unknown = sorted(set(slices) - set(names))
        if unknown:
            raise ShardingError(
                f"slices= has {', '.join(unknown)}, and the axes are {', '.join(names)}"
            )
        uneven = any(size % chunk for size, chunk in zip(shape, over, strict=True))
        if uneven or math.prod(over) * per_slice != math.prod(shape):
            raise ShardingError(
                f"a mesh of shape {shape} cannot span slices as {spans}: each axis must be a "
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
            f"a mesh of shape {shape} does not fill slices: one of {machine.name} has "
            f"{per_slice} devices. Make it a multiple of that, or at most that"
        )
    return over


def _block(machine: Topology, target: int) -> Sequence[DescribedDevice]:
    """The devices of a block of the grid: all of a slice, or the most compact block."""
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
        wrapped = sum(
            closes and size == full for closes, size, full in zip(closed, sizes, grid, strict=True)
        )
        return (sum(sizes) - wrapped, sizes)

    best = min(choices, key=stretched)
    return [
        device
        for device in machine.devices[: math.prod(grid)]
        if all(at < size for at, size in zip(device.coords, best, strict=False))
    ]
