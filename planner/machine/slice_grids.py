"""Which grids of chips there are: what vendors offer, which chips share a host, which axes close.

A torus slice of v5e or v6e is one of a list of flat grids, and only an axis of 16 has wrap-around
links (https://docs.cloud.google.com/tpu/docs/v5e). v4 and v5p are made of cubes of 4 x 4 x 4 joined
by optical switches: whole cubes close in all three axes, parts of a cube in none
(https://jax-ml.github.io/scaling-book/tpus). Twisted tori are described as plain ones. GPUs are a
number of hosts and of GPUs in each; where one switch joins several hosts (GB200: 18 trays of four
make a rack of 72), the number of racks comes first.

>>> from .chips import chip
>>> wraps(chip("v5e"), (8, 16)), wraps(chip("v5p"), (4, 4, 8)), wraps(chip("v5p"), (2, 4, 4))
((False, True), (True, True, True), (False, False, False))
"""

from __future__ import annotations

import math

from isoshard.core.kit import ShardingError

from .chips import Chip


def wraps(chip: Chip, grid: tuple[int, ...]) -> tuple[bool, ...]:
    """Which axes of a torus have wrap-around links."""
    if not chip.links or not chip.wrap:
        return (False,) * len(grid)
    closed = tuple(size % chip.wrap == 0 for size in grid)
    return closed if chip.links < 3 else (all(closed),) * len(grid)


def host_grid(chip: Chip, grid: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a torus that one host has.

    Eight chips of v5e or v6e in one slice are one host's; of larger slices each host, a VM, has
    four, which is also how libtpu describes them.
    """
    if not chip.host or len(chip.host) != len(grid):
        return (1,) * (len(grid) - 1) + (min(grid[-1], chip.per_host),)
    if chip.links == 2 and grid == (2, 4):
        return grid
    return tuple(math.gcd(mine, size) for mine, size in zip(chip.host, grid, strict=True))


def check_grid(chip: Chip, grid: tuple[int, ...], slices: int, text: str) -> tuple[int, ...]:
    """See that a machine can be had.

    Returns:
        The grid; GPUs of one host get that host as a first axis.

    Raises:
        ShardingError: the chips are not wired so, or the vendor offers no such slice.
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
            f"{text!r}: devices of a CPU have no grid, only a number: write "
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
