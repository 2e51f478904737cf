"""Ranks that wait for each other in different agreements: cycles of the wait-for graph.

A rank that has waited for a while says in which agreement, and for whom. Each waits for one rank at
a time, so whoever follows these notes from rank to rank comes to a rank that does not wait, or back
to where it has been. If that is itself, none of them will ever go on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json

from . import coordination


@dataclasses.dataclass(frozen=True)
class Wait:
    """One rank that waits.

    Attributes:
        rank: who waits.
        whom: for which rank.
        team: the ranks of the agreement.
        number: of the agreement among those of that team.
        said: what the rank has said in it.
    """

    rank: int
    whom: int
    team: tuple[int, ...]
    number: int
    said: str

    @property
    def room(self) -> str:
        """Where the words of the agreement are kept."""
        return room_of(self.team, self.number)

    def tell(self) -> None:
        """Say it to the others, in the place of what was said before."""
        self.forget()
        told = json.dumps(dataclasses.asdict(self))
        coordination.put(f"waits/{self.rank}", told)

    def forget(self) -> None:
        """Take it back: the rank goes on."""
        coordination.forget(f"waits/{self.rank}")

    def is_over(self) -> bool:
        """Whether what the rank waits for has come."""
        awaited = self.whom if self.rank == self.team[0] else "verdict"
        return coordination.look(f"{self.room}/{awaited}") is not None


def room_of(team: tuple[int, ...], number: int) -> str:
    """Where the words of an agreement are kept.

    Args:
        team: its ranks.
        number: of the agreement among theirs.
    """
    return f"agree/{hashlib.sha256(repr(team).encode()).hexdigest()[:16]}/{number}"


def cycle_through(mine: Wait) -> list[Wait]:
    """The ranks that wait for each other in a circle, from this one on; none if there is no circle.

    Args:
        mine: this rank's wait, of which it has told.
    """
    found = [mine]
    while True:
        other = _wait_of(found[-1].whom)
        if other is None:
            return []
        if other.rank == mine.rank:
            break
        if other in found:  # a circle that this rank only leads to; those in it see it
            return []
        found.append(other)
    # A note may be old. But what nobody has left after none had got what it waits for, stays so.
    if any(wait.is_over() for wait in found) or any(_wait_of(one.rank) != one for one in found):
        return []
    return found


def _wait_of(rank: int) -> Wait | None:
    told = coordination.look(f"waits/{rank}")
    if told is None:
        return None
    said = json.loads(told)
    return Wait(**{**said, "team": tuple(said["team"])})
