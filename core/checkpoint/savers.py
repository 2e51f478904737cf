"""The processes that save one checkpoint together; mostly this one alone.

Where JAX has several processes, each does its part, and all go on only if all could: what one
raises, every one raises. They talk over JAX's coordination service and not by collectives of the
devices, so a save may go on beside a training step. A process makes one request for what the first
does and three for what each does, whatever their number.

>>> Team.gathered().first(lambda: "done")
'done'
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from isoshard.core.errors import CheckpointError
from isoshard.core.processes import coordination
from isoshard.core.processes.rounds import Round, Words
from isoshard.core.runtime.formatting import listed

T = TypeVar("T")

TIMEOUT = 3600.0
"""Seconds that a process waits for the others."""

_MOST = 16  # processes whose faults are told
_numbers = itertools.count()
_rounds_of: dict[str, itertools.count[int]] = {}


class Team:
    """The processes of one save.

    Attributes:
        rank: the number of this process.
        size: how many there are.
    """

    def __init__(self, rank: int, size: int, room: str):
        """Use `room`, a name that no other team has; see `gathered`."""
        self.rank, self.size = rank, size
        self._room = room
        self._round = 0

    @classmethod
    def gathered(cls) -> Team:
        """All processes. Each must call this as often as the others, in the same order."""
        rank, size = coordination.rank_and_size()
        return cls(rank, size, f"checkpoint/{next(_numbers)}")

    @classmethod
    def of(cls, ranks: Sequence[int]) -> Team:
        """Some processes; their numbers in the team are their places.

        Args:
            ranks: ascending, this one among them. Each must call this as often as the others.
        """
        me, _ = coordination.rank_and_size()
        key = hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]
        number = _rounds_of.setdefault(key, itertools.count())
        return cls(ranks.index(me), len(ranks), f"checkpoint/{key}/{next(number)}")

    def each(self, work: Callable[[], T]) -> T:
        """Do something in every process.

        Args:
            work: this process's part.

        Returns:
            The result of this process.

        Raises:
            CheckpointError: another process raised an error, or is silent. An error of this one is
                raised itself.
        """
        if self.size == 1:
            return work()
        result, error = _tried(work)
        self._meet(self._next_room(), error)
        return result

    def to_first(self, work: Callable[[], T]) -> list[T]:
        """Do something in every process, and bring the results to the first.

        Args:
            work: this process's part; its result can be written as JSON.

        Returns:
            In the first process the results, by process; nothing in the others.

        Raises:
            CheckpointError: as for `each`.
        """
        if self.size == 1:
            return [work()]
        room = self._next_room()
        result, error = _tried(work)
        coordination.put(f"{room}/of/{self.rank}", json.dumps(result))
        self._meet(room, error)
        if self.rank:
            return []
        found = coordination.all_below(f"{room}/of")
        coordination.forget(f"{room}/of")
        return [json.loads(found[str(rank)]) for rank in range(self.size)]

    def first(self, work: Callable[[], T]) -> T:
        """Do something in the first process, and tell the others its result.

        Args:
            work: what only the first does; its result can be written as JSON.

        Returns:
            The result of the first.

        Raises:
            CheckpointError: as for `each`.
        """
        if self.size == 1:
            return work()
        room = self._next_room()
        if self.rank == 0:
            result, error = _tried(work)
            fault = "" if error is None else _fault(error)
            coordination.put(room, json.dumps([fault, result]))
            if error is not None:
                raise error
            return result
        text = coordination.take(room, TIMEOUT)
        said: list[Any] = json.loads(text) if text else [f"silent for {TIMEOUT:g} s", None]
        fault, told = said
        if fault:
            raise CheckpointError(f"other processes failed: process 0: {fault}")
        return told

    def _meet(self, room: str, error: BaseException | None) -> None:
        lines = [] if error is None else [_fault(error)]
        told = _Outcome(room, range(self.size), self.rank, lines, TIMEOUT).hold()
        if error is not None:
            raise error
        if told:
            raise CheckpointError(f"other processes failed: {told}")

    def _next_room(self) -> str:
        self._round += 1
        return f"{self._room}/{self._round}"


class _Outcome(Round):
    """What each process says of its part: a fault, or nothing."""

    def judge(self, words: Words) -> str:
        """The faults."""
        told = [
            f"process {rank}: {' '.join(lines) if lines else f'silent for {TIMEOUT:g} s'}"
            for rank, lines in words.items()
            if lines is None or lines
        ]
        return listed(told, _MOST, "; ")


def _tried(work: Callable[[], T]) -> tuple[T, None] | tuple[Any, BaseException]:
    try:
        return work(), None
    except BaseException as error:
        return None, error


def _fault(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
