"""The processes that save one checkpoint together; mostly this one alone.

Where JAX has several processes, each does its part, and all go on only if all could: what one
raises, every one raises. They talk over JAX's coordination service and not by collectives of the
devices, so a save may go on beside a training step.

>>> Team.gathered().first(lambda: "done")
'done'
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

from isoshard.core.errors import CheckpointError
from isoshard.core.processes import coordination

T = TypeVar("T")

TIMEOUT = 3600.0
"""Seconds that a process waits for the others."""

_numbers = itertools.count()


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
        return self._meet(work, told=False)[0]

    def first(self, work: Callable[[], T]) -> T:
        """Do something in the first process, and tell the others its result.

        Args:
            work: what only the first does; its result can be written as JSON.

        Returns:
            The result of the first.
        """
        result, said = self._meet(work if self.rank == 0 else None, told=True)
        return result if self.rank == 0 else said

    def _meet(self, work: Callable[[], T] | None, *, told: bool) -> tuple[Any, Any]:
        result: Any = None
        if self.size == 1:
            return (work() if work else None), None
        error: BaseException | None = None
        try:
            result = work() if work else None
        except BaseException as raised:
            error = raised
        said = self._exchange(result if told else None, error)
        if error is not None:
            raise error
        failed = [f"process {rank}: {fault}" for rank, (fault, _) in enumerate(said) if fault]
        if failed:
            raise CheckpointError(f"other processes failed: {'; '.join(failed)}")
        return result, said[0][1]

    def _exchange(self, result: Any, error: BaseException | None) -> list[tuple[str, Any]]:
        """What each process says: its error in words, and its result."""
        room = f"{self._room}/{self._round}"
        self._round += 1
        fault = "" if error is None else f"{type(error).__name__}: {error}"
        coordination.put(f"{room}/{self.rank}", json.dumps([fault, result]))
        said = []
        for rank in range(self.size):
            text = coordination.take(f"{room}/{rank}", TIMEOUT)
            said.append(json.loads(text) if text else (f"silent for {TIMEOUT:g} s", None))
        return said
