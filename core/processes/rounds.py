"""A round: some ranks each say some lines, and all of them learn whether all said the same.

While they do, nobody reads what another one says. A rank counts itself under a digest of its lines,
then among those that have come; the last to come sees by the two numbers whether all have said the
same, and leaves the verdict that the others wait for:

    agree/1f0c../7/said/9b1e..    4      ranks that said this
    agree/1f0c../7/came           4      ranks that came
    agree/1f0c../7/verdict        alike

So a rank makes three requests, the last one four or five, of some hundred bytes, however many ranks
there are and however much they compare. If they differ, or one does not come in time, all say their
lines whole; the rank that has found it, the last one or the first to lose patience, reads them and
leaves its words for all.
"""

from __future__ import annotations

import abc
import hashlib
import json
import time
from collections.abc import Mapping, Sequence

from . import coordination

PATIENCE = 0.4
"""Seconds after which a rank that waits says where."""

_ALIKE, _SAY_ALL = "alike", "say all"
_SAYING = 10.0  # seconds for a rank that is there to say its lines; it does nothing else
_SAYING_LATE = 1.0  # the same where nobody knows who is there

Words = Mapping[int, Sequence[str] | None]
"""What each rank said; None: nothing."""


class Round(abc.ABC):
    """One round, as one of its ranks takes part in it.

    Args:
        room: a name that all of these ranks know, and that no other round has.
        team: the ranks, ascending.
        me: this one.
        lines: what it says.
        timeout: seconds to wait for the others.
    """

    def __init__(
        self, room: str, team: Sequence[int], me: int, lines: Sequence[str], timeout: float
    ):
        """See the class."""
        self.room, self.team, self.me = room, team, me
        self.lines, self.timeout = lines, timeout
        self.all_came = False  # as far as this rank knows

    @abc.abstractmethod
    def judge(self, words: Words) -> str:
        """What all are told of words that differ, or are missing; one rank is asked."""

    def waits(self) -> None:  # noqa: B027 - it may be left out
        """Called once, when the others have not come for `PATIENCE`."""

    def look(self) -> None:  # noqa: B027 - likewise
        """Called by the rank that came first, as often as `PATIENCE` has passed."""

    def hold(self, *, stay: bool = True) -> str:
        """Take part.

        Args:
            stay: False leaves when the time is over, instead of ending the round for all; the
                others will know what this rank said.

        Returns:
            Nothing if all said the same; else what `judge` made of it, or what was left under
            "verdict" meanwhile.
        """
        number, verdict = self._came(), f"{self.room}/verdict"
        self.all_came = number == len(self.team)
        if not self.all_came:
            found = self._wait(verdict, first=number == 1)
            if found is not None:
                return self._follow(found)
            if not stay:
                self._say()
                return f"of {len(self.team)} ranks not all came within {self.timeout:g} s"
        alike = self.all_came and self._alike()
        if not coordination.put_first(verdict, _ALIKE if alike else _SAY_ALL):
            return self._follow(coordination.take(verdict, 1.0))
        return "" if alike else self._ask()

    def _came(self) -> int:
        """Count this rank; how many have come by now."""
        said = json.dumps([*self.lines]).encode()
        self._same = f"{self.room}/said/{hashlib.sha256(said).hexdigest()[:32]}"
        self._like_me = coordination.count(self._same)
        return coordination.count(f"{self.room}/came")

    def _alike(self) -> bool:
        """Whether all said the same; all have come, each counted under its lines before that."""
        size = len(self.team)
        return self._like_me == size or coordination.count(self._same, 0) == size

    def _wait(self, verdict: str, *, first: bool) -> str | None:
        """The verdict; None if nobody left one in time."""
        end = time.monotonic() + self.timeout
        found = coordination.take(verdict, min(PATIENCE, self.timeout))
        if found is None:
            self.waits()
        while found is None and (left := end - time.monotonic()) > 0:
            if first:
                self.look()
            found = coordination.take(verdict, min(PATIENCE, left) if first else left)
        return found

    def _follow(self, verdict: str | None) -> str:
        if verdict == _ALIKE:
            return ""
        if verdict != _SAY_ALL:
            return verdict or f"what the ranks said in {self.room} has been taken away meanwhile"
        self._say()
        told = coordination.take(f"{self.room}/told", 2 * _SAYING)
        if told is None:
            return "the ranks do not agree, and the one that was to say why has ended"
        return "" if told == _ALIKE else told

    def _ask(self) -> str:
        """Have all say their lines, and tell them what is made of that."""
        self._say()
        end = time.monotonic() + (_SAYING if self.all_came else _SAYING_LATE)
        words: dict[int, Sequence[str] | None] = {}
        for rank in self.team:
            key, left = f"{self.room}/lines/{rank}", end - time.monotonic()
            found = coordination.take(key, left if left > 0 else None)
            words[rank] = None if found is None else json.loads(found)
        told = self.judge(words)  # nothing, if the last one came just as the time was over
        coordination.put(f"{self.room}/told", told or _ALIKE)
        return told

    def _say(self) -> None:
        coordination.put(f"{self.room}/lines/{self.me}", json.dumps([*self.lines]))
