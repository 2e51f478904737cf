"""Ranks that must say the same say it to each other, before they run into a collective.

A rank that has another mesh, or another shape, compiles another program; its collectives then wait
for partners that never come. So whoever lays something out over several processes has them compare
notes first, once per new layout:

    agree("the layout of w", (shape, dtype, str(placements)), ranks=(0, 1))

What is compared is `repr`, with the subject; of a list of strings those that differ are told. How,
and that it costs a rank the same whatever their number, is in `coordination`. Each set of ranks
numbers its own agreements: ranks that have nothing to do with each other need no common order,
ranks of one set do.

Ranks that mean different sets, as those that lay out over different meshes do, would wait for each
other (`wait_for_graph`), and one that has nothing to compare does not come (`passed_calls`). Who
has waited for some time leaves a word in the room; the rank that came first says which ranks this
room waits for, looks for both, and ends what can never come about.

A process that is alone agrees with itself:

>>> agree("the mesh", (2, 4))
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from isoshard.core.errors import DistributedError

from . import coordination, passed_calls
from .coordination import Barrier, Lines
from .passed_calls import Call
from .wait_for_graph import Room, circle_through

_LONGEST = 2000
_MOST_LINES = 8
_MOST = 16  # ranks, or groups of them, that are named one by one
_WAITING = "waits"  # below it, a word for each room in which ranks wait
_ENDED = "ended "
_numbers: dict[tuple[int, ...], int] = {}
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
    me, team = _team(ranks)
    if len(team) > 1:
        _hold(subject, value, team, me, timeout)


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
    """Raise what was made of an answer of this rank's."""
    for room in passed_calls.answered():
        told = coordination.get(f"{room}/verdict", 1.0) or ""
        if told.startswith(_ENDED):
            raise DistributedError(_left(told, coordination.rank_and_size()[0]))


def _team(ranks: Sequence[int] | None) -> tuple[int, tuple[int, ...]]:
    """This rank, and those that take part."""
    me, size = coordination.rank_and_size()
    team = tuple(sorted({*ranks})) if ranks is not None else tuple(range(size))
    if me not in team:
        raise DistributedError(f"rank {me} asks for an agreement of other ranks, {_list(team)}")
    if team[-1] >= size:
        raise DistributedError(f"there are {size} ranks; an agreement of {_list(team)} has others")
    return me, team


def _hold(
    subject: str,
    value: Any,
    team: tuple[int, ...],
    me: int,
    timeout: float,
    *,
    stay: bool = True,
) -> None:
    _raise_what_came_of_it()
    call = passed_calls.come(subject, None)
    with _lock:
        number = _numbers.get(team, 0)
        _numbers[team] = number + 1
    agreement = _Agreement(subject, value, team, number, me, timeout, call)
    try:
        told = agreement.wait(to_the_end=stay)
    finally:
        agreement.leave()
    if told.startswith(_ENDED):
        told = _left(told, me)
    if told:
        raise DistributedError(told)
    if agreement.all_came and number:
        coordination.delete(_room(team, number - 1))  # all have left it


class _Agreement(Barrier):
    """One agreement, as one of its ranks takes part in it."""

    def __init__(
        self,
        subject: str,
        value: Any,
        team: tuple[int, ...],
        number: int,
        me: int,
        timeout: float,
        call: Call | None = None,
    ):
        lines = value if _is_lines(value) else [repr(value)]
        super().__init__(_room(team, number), team, me, [subject, *lines], timeout)
        self.subject, self.number, self.call = subject, number, call
        self._registered = False

    def explain(self, words: Lines) -> str:
        """Who said which lines that not all said; who said nothing."""
        silent = [rank for rank, lines in words.items() if lines is None]
        said = {rank: lines for rank, lines in words.items() if lines is not None}
        if self.all_came:
            said |= {rank: [self.subject, "it said no more"] for rank in silent}
            silent = []
        common = set.intersection(*(set(lines[1:]) for lines in said.values()))
        own = {rank: f"{lines[0]}: {_shown(lines[1:], common)}" for rank, lines in said.items()}
        differ = len({json.dumps([*lines]) for lines in said.values()}) > 1
        told = [_told(own)] if differ else []
        return "\n".join(told + ([_silent(silent, self.subject, self.timeout)] if silent else []))

    def waits(self) -> None:
        """Leave a word in the room."""
        coordination.put(f"{self.namespace}/here/{self.rank}", _short("; ".join(self._said()), 500))

    def _said(self) -> list[str]:
        return [f"{self.lines[0]}: {self.lines[1] if len(self.lines) > 1 else ''}", *self.lines[2:]]

    def look(self) -> None:
        """Look for ranks that wait for each other, and for some that have passed by."""
        if not self._registered:
            self._registered = True
            mine = {"number": self.number, "team": _spans(self.ranks)}
            coordination.put(f"{_WAITING}/{self.namespace}", json.dumps(mine))
        waiting = coordination.get_below(_WAITING)
        rooms = {name: _waiting_in(name, json.loads(told)) for name, told in waiting.items()}
        circle = circle_through(self.namespace, rooms.values())
        # Who had come into a room stays while it has no verdict: so at one moment all were there.
        if circle and not any(coordination.get(f"{room.name}/verdict") for room, _ in circle):
            told = {rank: f"{room.here[rank]} (of {_list(room.team)})" for room, rank in circle}
            self._end(dict(sorted(told.items())), [room for room, _ in circle])
        elif self.call is not None and self.namespace in rooms:
            self._ask_those_missing(rooms[self.namespace], self.call)

    def _ask_those_missing(self, room: Room, call: Call) -> None:
        """End the round if one of them has passed by."""
        found: dict[int, str] = {}
        for rank in room.missing[:_MOST]:
            given = passed_calls.answer_of(rank, call, self.namespace)
            if given is not None:
                found[rank] = given
        if found:
            self._end({**room.here, **found}, [room])

    def _end(self, words: dict[int, str], rooms: Sequence[Room]) -> None:
        told = {"told": _told(words), "rooms": [[_spans(one.team), one.number] for one in rooms]}
        for one in rooms:
            coordination.put_if_absent(f"{one.name}/verdict", _ENDED + json.dumps(told))

    def leave(self) -> None:
        """Take back what `look` left for others."""
        if self._registered:
            coordination.delete(f"{_WAITING}/{self.namespace}")


def _waiting_in(name: str, told: dict[str, Any]) -> Room:
    here = coordination.get_below(f"{name}/here")
    said = {int(rank): words for rank, words in here.items()}
    return Room(name, _ranks_of(told["team"]), told["number"], said)


def _left(verdict: str, me: int) -> str:
    """Leave the agreements that cannot come about; what is told of them."""
    ended = json.loads(verdict.removeprefix(_ENDED))
    for spans, number in ended["rooms"]:
        team = _ranks_of(spans)
        if me in team:
            with _lock:
                _numbers[team] = max(_numbers.get(team, 0), number + 1)
    return str(ended["told"])


def _room(team: tuple[int, ...], number: int) -> str:
    return f"agree/{hashlib.sha256(repr(team).encode()).hexdigest()[:16]}/{number}"


def _spans(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks, ascending, as first and last of those that follow each other."""
    found: list[list[int]] = []
    for rank in ranks:
        if found and found[-1][1] == rank - 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def _ranks_of(spans: Sequence[Sequence[int]]) -> tuple[int, ...]:
    return tuple(rank for start, end in spans for rank in range(start, end + 1))


def _told(words: dict[int, str]) -> str:
    """The verdict, where not all have said the same."""
    speakers: dict[str, list[int]] = {}
    for rank, said in words.items():
        speakers.setdefault(said, []).append(rank)
    shown = itertools.islice(speakers.items(), _MOST)
    lines = "".join(f"\n  {_list(who)}: {what}" for what, who in shown)
    if len(speakers) > _MOST:
        lines += f"\n  and {len(speakers) - _MOST} groups of ranks say yet other things"
    return (
        f"the ranks do not agree:{lines}\n"
        "All of them must lay out the same arrays, over the same mesh, in the same order"
    )


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


def _short(text: str, longest: int = _LONGEST) -> str:
    if len(text) <= longest:
        return text
    return f"{text[:longest]}.. (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def _list(ranks: Sequence[int]) -> str:
    if len(ranks) <= _MOST:
        return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
    spans = _spans(ranks)
    told = [str(a) if a == b else f"{a} to {b}" for a, b in spans[:_MOST]]
    return f"ranks {', '.join(told)}{', ..' * (len(spans) > _MOST)}"


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
        me, team = _team(ranks)
        if len(team) > 1:
            _hold(subject, fault_lines(error), team, me, 1.5, stay=False)
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
