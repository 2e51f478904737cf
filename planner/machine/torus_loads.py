"""How many messages share the busiest link of a torus, when groups are no blocks of its grid.

Each device of a group sends to the next in the group's order, and to the one before it, all groups
at once. Messages take the shortest way, one axis after the other.

>>> line = np.array([[(0, 0, 0), (2, 0, 0)], [(1, 0, 0), (3, 0, 0)]])
>>> busiest(line, np.zeros((2, 2), int), (4, 1), (False, False))
2
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np


def busiest(
    coords: np.ndarray[Any, Any],
    parts: np.ndarray[Any, Any],
    grid: tuple[int, ...],
    closed: tuple[bool, ...],
) -> int:
    """Count the messages on the busiest link in one direction.

    Args:
        coords: (group, device, axis): places in the grid.
        parts: (group, device): slices; those of different slices do not talk here.
        grid: sizes of the torus.
        closed: which axes have wrap-around links.

    Returns:
        At least 1.
    """
    loads: collections.Counter[tuple[int, ...]] = collections.Counter()
    for group, places in zip(coords.tolist(), parts.tolist(), strict=True):
        members: dict[int, list[list[int]]] = {}
        for at, part in zip(group, places, strict=True):
            members.setdefault(part, []).append(at)
        for part, ring in members.items():
            for here, there in zip(ring, [*ring[1:], ring[0]], strict=True):
                if here != there:
                    _count(loads, part, here, there, grid, closed)
                    if len(ring) > 2:
                        _count(loads, part, there, here, grid, closed)
    return max(loads.values(), default=1)


def _count(
    loads: collections.Counter[tuple[int, ...]],
    part: int,
    here: list[int],
    there: list[int],
    grid: tuple[int, ...],
    closed: tuple[bool, ...],
) -> None:
    at = list(here)
    for axis, size in enumerate(grid):
        ahead = there[axis] - at[axis]
        if closed[axis] and abs(ahead) * 2 > size:
            ahead -= size if ahead > 0 else -size
        step = 1 if ahead > 0 else -1
        for _ in range(abs(ahead)):
            loads[(part, axis, step, *at)] += 1
            at[axis] = (at[axis] + step) % size
