"""The processes that save one checkpoint together; mostly this one alone.

Where `torch.distributed` has several processes, each does its part, and all go on only if all
could: what one raises, every one raises.

>>> Ranks(None).each(lambda: "done")
['done']
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from isoshard.core.errors import CheckpointError

T = TypeVar("T")


class Ranks:
    """The processes of a group.

    Args:
        group: a `torch.distributed` process group that can send objects (gloo); None for this
            process alone.

    Attributes:
        rank: the number of this process.
        count: how many there are.
    """

    def __init__(self, group: Any):
        """See the class."""
        self._group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.count = dist.get_world_size(group) if group is not None else 1

    def each(self, work: Callable[[], T]) -> list[T]:
        """Do something in every process.

        Args:
            work: this process's part.

        Returns:
            The results of all, by rank.

        Raises:
            CheckpointError: another process raised an error. An error of this one is raised itself.
        """
        if self.count == 1:
            return [work()]
        result: Any = None
        error: BaseException | None = None
        try:
            result = work()
        except BaseException as raised:
            error = raised
        outcomes: list[Any] = [None] * self.count
        told = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(outcomes, (told, result), group=self._group)
        if error is not None:
            raise error
        failed = [f"rank {rank}: {told}" for rank, (told, _) in enumerate(outcomes) if told]
        if failed:
            raise CheckpointError(f"other processes failed: {'; '.join(failed)}")
        return [result for _, result in outcomes]

    def first(self, work: Callable[[], T]) -> T:
        """Do something in the first process, and tell the others its result.

        Args:
            work: what only the first does.
        """
        results: list[Any] = self.each(lambda: work() if self.rank == 0 else None)
        return results[0]


def groups_of(given: Any) -> tuple[Any, Any]:
    """Two process groups: one for the thread that saves, one for that which trains.

    Args:
        given: a group for the saves, or None.

    Returns:
        `(None, None)` where there is one process.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(given) == 1:
        return None, None
    members = dist.get_process_group_ranks(given or dist.group.WORLD)

    def another() -> Any:
        return dist.new_group(members, backend="gloo", use_local_synchronization=True)

    return given or another(), another()
