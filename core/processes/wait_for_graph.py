"""Ranks that wait for each other in different agreements: circles of the wait-for graph.

Ranks of a room wait for those of its team that are not there. Where one of these waits in another
room, the first room waits for the second. Rooms in a circle will never go on.

>>> rooms = [
...     Room("ab", (0, 1), 0, {0: "the mesh"}),
...     Room("bc", (1, 2), 0, {1: "the mesh"}),
...     Room("ca", (0, 2), 0, {2: "the mesh"}),
... ]
>>> [(room.name, rank) for room, rank in circle_through("ab", rooms)]
[('ab', 0), ('bc', 1), ('ca', 2)]
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping


@dataclasses.dataclass(frozen=True)
class Room:
    """Where ranks wait for others.

    Attributes:
        name: tells rooms apart.
        team: all ranks that are to come.
        number: of the agreement among those of this team.
        here: of the ranks that wait here, what each has said.
    """

    name: str
    team: tuple[int, ...]
    number: int
    here: Mapping[int, str]

    @property
    def missing(self) -> list[int]:
        """The ranks that are not there, or have come just now."""
        return [rank for rank in self.team if rank not in self.here]


def circle_through(name: str, rooms: Iterable[Room]) -> list[tuple[Room, int]]:
    """The shortest circle of rooms that wait for each other.

    Args:
        name: of a room in it.
        rooms: all in which somebody waits.

    Returns:
        The rooms, from that one on, each with a rank which waits there and is missing in the room
        before; none if there is no circle.
    """
    known = {room.name: room for room in rooms}
    start = known.pop(name, None)
    if start is None:
        return []
    paths = deque([[(start, -1)]])
    while paths:
        path = paths.popleft()
        missing = path[-1][0].missing
        back = [rank for rank in missing if rank in start.here]
        if back and len(path) > 1:
            return [(start, back[0]), *path[1:]]
        for room in [*known.values()]:
            found = [rank for rank in missing if rank in room.here]
            if found:
                del known[room.name]
                paths.append([*path, (room, found[0])])
    return []
