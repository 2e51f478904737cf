"""Ranks that must say the same say it to each other, before they run into a collective.

A rank that has another mesh, or another shape, compiles another program; its collectives then wait
for partners that never come. So whoever lays something out over several processes has them compare
notes first, once per new layout:

    agree("the layout of w", (shape, dtype, str(placements)), ranks=(0, 1))

The lowest of the ranks collects what the others say and tells them the verdict, so a rank speaks
and listens once, whatever their number. Each set of ranks numbers its own agreements: ranks that
have nothing to do with each other need no common order, ranks of one set do. What is compared is
`repr`, with the subject; of a list of strings those that differ are told.

Ranks that mean different sets, as those that lay out over different meshes do, would wait for each
other (`wait_for_graph`), and one that has nothing to compare does not come (`passed_calls`). Who
has waited for `_PATIENCE` looks for both, and ends the agreements for all that wait in them.

A process that is alone agrees with itself:

>>> agree("the mesh", (2, 4))
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from isoshard.core.errors import DistributedError

from . import coordination, passed_calls
from .passed_calls import Call
from .wait_for_graph import Wait, cycle_through, room_of

_LONGEST = 2000
_MOST_LINES = 8
_PATIENCE = 0.4
_rounds: dict[tuple[int, ...], int] = {}
_lock = threading.Lock()


def agree(
    subject: str, value: Any, ranks: Sequence[int] | None = None, *, timeout: float = 60.0
) -> None:
    """Compare `value` between processes; all of `ranks` must call this, in the same order.

    Args:
        subject: what it is about, for the message, e.g. "the mesh of w".
        value: anything whose `repr` says all that must be the same.
        ranks: JAX process numbers that take part; None: all.
        timeout: seconds to wait for the others.

    Raises:
        DistributedError: in every rank: who said what, if they differ; who said nothing, if a rank
            did not come in time (the late one is told when it comes).
    """
    me, size = coordination.rank_and_size()
    team = tuple(sorted({*ranks})) if ranks is not None else tuple(range(size))
    if me not in team:
        raise DistributedError(f"rank {me} asks for an agreement of other ranks, {_list(team)}")
    if team[-1] >= size:
        raise DistributedError(f"there are {size} ranks; an agreement of {_list(team)} has others")
    if len(team) == 1:
        return
    _raise_what_came_of_it()
    call = passed_calls.come(subject, None)
    with _lock:
        number = _rounds.get(team, 0)
        _rounds[team] = number + 1
    _Round(team, number, me, subject, value, call, time.monotonic() + timeout, timeout).hold()


def pass_by(subject: str, words: Callable[[], str] | None) -> None:
    """Say that a call asks no other rank, where other arguments would have it `agree`.

    Args:
        subject: as for `agree`.
        words: what this rank was given, called if others wait for it; None if that is its own
            business, such as arrays on its own devices.

    Raises:
        DistributedError: others have waited for this rank at an earlier call: who was given what.
    """
    if coordination.rank_and_size()[1] > 1:
        _raise_what_came_of_it()
        passed_calls.come(subject, words)


def _raise_what_came_of_it() -> None:
    ended = passed_calls.verdict()
    if ended is not None:
        raise DistributedError(_EndedError(ended, coordination.rank_and_size()[0]).verdict)


@dataclasses.dataclass
class _Round:
    """One agreement, as one of its ranks takes part in it."""

    team: tuple[int, ...]
    number: int
    me: int
    subject: str
    value: Any
    call: Call
    deadline: float
    timeout: float
    wait: Wait | None = None

    @property
    def room(self) -> str:
        return room_of(self.team, self.number)

    @property
    def said(self) -> str:
        return f"{self.subject}: {_short(_text(self.value))}"

    def hold(self) -> None:
        """Speak, and raise the verdict if it is none of agreement."""
        coordination.put(f"{self.room}/{self.me}", self.said)
        try:
            verdict = self._collect() if self.me == self.team[0] else self._listen()
        except _EndedError as ended:
            verdict = ended.verdict
            if self.me == self.team[0]:
                coordination.put(f"{self.room}/verdict", verdict)
        finally:
            if self.wait is not None:
                self.wait.forget()
        if verdict:
            raise DistributedError(verdict)

    def _collect(self) -> str:
        """Hear the others and tell them what is wrong between the ranks; empty if nothing is."""
        said: dict[int, str | None] = {self.team[0]: self.said}
        for rank in self.team[1:]:
            said[rank] = self._awaited(f"{self.room}/{rank}", rank)
        missing = [rank for rank in self.team if said[rank] is None]
        if missing:
            verdict = _silent(missing, self.subject, self.timeout)
        elif len({*said.values()}) == 1:
            verdict = ""
        elif _is_lines(self.value):
            return self._differences(said)
        else:
            verdict = _told({rank: str(words) for rank, words in said.items()})
        coordination.put(f"{self.room}/verdict", verdict or "agreed")
        if not verdict and self.number:
            coordination.forget(room_of(self.team, self.number - 1))  # all have left it
        return verdict

    def _listen(self) -> str:
        """The verdict of the first rank; empty if all agree."""
        key, first = f"{self.room}/verdict", self.team[0]
        self.deadline += 1.0
        verdict = self._awaited(key, first)
        if verdict is None and coordination.look(f"{self.room}/{first}") is not None:
            self.deadline = time.monotonic() + self.timeout + 1.0  # it came late, and waits
            verdict = self._awaited(key, first)
        if verdict == _DIFFER:
            coordination.put(f"{self.room}/lines/{self.me}", json.dumps(_lines(self.value)))
            verdict = coordination.take(f"{self.room}/told", self.timeout + 1.0)
        if verdict is None:
            return _silent([first], self.subject, self.timeout)
        return "" if verdict == "agreed" else verdict

    def _differences(self, said: dict[int, str | None]) -> str:
        """Who said which lines that not all said; the others send theirs whole for it."""
        coordination.put(f"{self.room}/verdict", _DIFFER)
        lines: dict[int, list[str]] = {self.me: _lines(self.value)}
        for rank in self.team[1:]:
            found = coordination.take(f"{self.room}/lines/{rank}", 10.0)
            lines[rank] = ["it said no more"] if found is None else json.loads(found)
        common = set.intersection(*map(set, lines.values()))
        own = {
            rank: f"{str(said[rank]).partition(':')[0]}: {_shown(all_, common)}"
            for rank, all_ in lines.items()
        }
        verdict = _told(own)
        coordination.put(f"{self.room}/told", verdict)
        return verdict

    def _awaited(self, key: str, whom: int) -> str | None:
        """The words under a key, which a rank puts there; None if they do not come in time."""
        while True:
            left = self.deadline - time.monotonic()
            found = coordination.take(key, max(0.0, min(left, _PATIENCE)))
            if found is not None or left <= _PATIENCE:
                return found
            self._look_why(whom)

    def _look_why(self, whom: int) -> None:
        """Say for whom this rank waits, and end what it waits in if that can never come."""
        wait = Wait(self.me, whom, self.team, self.number, self.said)
        if self.wait != wait:
            self.wait = wait
            wait.tell()
        ended = coordination.look(f"{self.room}/crossed")
        if ended is None:
            ended = self._circle(wait) or self._passed(whom)
        if ended is not None:
            raise _EndedError(ended, self.me)

    def _circle(self, wait: Wait) -> str | None:
        """Whether ranks wait for each other, in words; ended for all of them."""
        circle = {one.rank: one for one in cycle_through(wait)}
        words = {
            who: f"{circle[who].said} (of {_list(circle[who].team)})" for who in sorted(circle)
        }
        return self._end(words, [(one.team, one.number) for one in circle.values()])

    def _passed(self, whom: int) -> str | None:
        """Whether the rank has passed by this call; likewise."""
        if coordination.look(f"{self.room}/{whom}") is not None:
            return None  # it has come, and waits itself
        given = passed_calls.answer_of(whom, self.call, self.room)
        if given is None:
            return None
        came = {who: coordination.look(f"{self.room}/{who}") for who in self.team}
        words = {who: said for who, said in came.items() if said is not None}
        return self._end({**words, whom: given}, [(self.team, self.number)])

    def _end(self, words: dict[int, str], rounds: Sequence[tuple[Any, int]]) -> str | None:
        if not words:
            return None
        ended = json.dumps({"told": _told(words), "rounds": rounds})
        for one in rounds:
            coordination.put_if_free(f"{room_of(*one)}/crossed", ended)
        return coordination.take(f"{self.room}/crossed", 1.0) or ended


class _EndedError(Exception):
    """An agreement cannot come about; this rank leaves it, and those that others wait for it in."""

    def __init__(self, ended: str, me: int):
        super().__init__()
        found = json.loads(ended)
        self.verdict = str(found["told"])
        for team, number in found["rounds"]:
            if me in team:
                with _lock:
                    _rounds[tuple(team)] = max(_rounds.get(tuple(team), 0), number + 1)


_DIFFER = "say all"


def _told(words: dict[int, str]) -> str:
    """The verdict, where not all have said the same."""
    speakers: dict[str, list[int]] = {}
    for rank, said in words.items():
        speakers.setdefault(said, []).append(rank)
    lines = "".join(f"\n  {_list(who)}: {what}" for what, who in speakers.items())
    return (
        f"the ranks do not agree:{lines}\n"
        "All of them must lay out the same arrays, over the same mesh, in the same order"
    )


def _text(value: Any) -> str:
    return "; ".join(value) if _is_lines(value) else repr(value)


def _lines(value: Any) -> list[str]:
    return value if _is_lines(value) else [repr(value)]


def _is_lines(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(line, str) for line in value)


def _shown(lines: Sequence[str], common: set[str]) -> str:
    """What of its lines a rank alone said, or those in their order if all said the same ones."""
    found = [line for line in lines if line not in common] or [*lines]
    more = f"; and {len(found) - _MOST_LINES} more" if len(found) > _MOST_LINES else ""
    return "; ".join(map(_short, found[:_MOST_LINES])) + more


def _silent(missing: Sequence[int], subject: str, timeout: float) -> str:
    return (
        f"{_list(missing)} said nothing about {subject} within {timeout:g} s, while the others "
        "wait. A rank that is missing has failed, hangs, or has taken another path: all ranks "
        "must lay out the same arrays in the same order"
    )


def _short(text: str) -> str:
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}.. (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _list(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


T = TypeVar("T")


def prepare_alike(
    subject: str,
    prepare: Callable[[], T],
    lines: Callable[[T], list[str]],
    ranks: Sequence[int] | None = None,
) -> T:
    """Prepare something in every rank, and compare it before anything is done with it.

    Args:
        subject: what it is, for the message.
        prepare: makes it, and asks no other rank. What it raises the others are told.
        lines: what of it all ranks must have alike.
        ranks: as for `agree`.

    Returns:
        What `prepare` made.

    Raises:
        DistributedError: in every rank: who has what. What `prepare` raised, if all say the same.

    Example:
        >>> prepare_alike("the batch", lambda: [1, 2], lambda made: [f"{len(made)} rows"])
        [1, 2]
    """
    try:
        made = prepare()
        said = lines(made)
    except Exception as error:
        agree(subject, fault_lines(error), ranks)
        raise
    agree(subject, without_addresses(said), ranks)
    return made


def tell_fault(subject: str, error: Exception, ranks: Sequence[int] | None = None) -> None:
    """Tell ranks that are about to agree on something that this one cannot, for it has failed.

    They are not waited for long, as they may know already what they would have agreed on; what they
    were told is noted in the error, which the caller raises.

    Args:
        subject: what the others agree on.
        error: what this rank is about to raise.
        ranks: as for `agree`.
    """
    try:
        agree(subject, fault_lines(error), ranks, timeout=1.5)
    except DistributedError as told:
        error.add_note(str(told))


def fault_lines(error: Exception) -> list[str]:
    """What a rank says that has failed.

    Example:
        >>> fault_lines(ValueError("no rows"))
        ['ValueError: no rows']
    """
    return without_addresses([f"{type(error).__name__}: {' '.join(str(error).split())}"])


def without_addresses(lines: Sequence[str]) -> list[str]:
    """The same without addresses in memory, which differ between processes.

    Example:
        >>> without_addresses(["<function f at 0x7f12ab>"])
        ['<function f at 0x..>']
    """
    return [re.sub(r"\b0x[0-9a-f]+", "0x..", line) for line in lines]
