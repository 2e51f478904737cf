"""A process group of torch as a `ProcessGroup` of core: results are exchanged as pickles."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from isoshard.core.processes.coordination import ProcessGroup, failures_of


class TorchTransport:
    """A `torch.distributed` group that can send objects (gloo)."""

    def __init__(self, group: Any):
        """Use `group`."""
        self._group = group

    def barrier(self, error: str) -> str:
        """See `Transport`."""
        return self.gather(error, None, everywhere=True)[0]

    def gather(self, error: str, value: Any, everywhere: bool) -> tuple[str, list[Any]]:
        """See `Transport`; each process has the values."""
        ranks = dist.get_process_group_ranks(self._group)
        outcomes: list[Any] = [None] * len(ranks)
        dist.all_gather_object(outcomes, (error, value), group=self._group)
        errors = {rank: error for rank, (error, _) in zip(ranks, outcomes, strict=True)}
        return failures_of(errors), [value for _, value in outcomes]

    def broadcast(self, error: str, value: Any) -> tuple[str, Any]:
        """See `Transport`."""
        failures, values = self.gather(error, value, everywhere=True)
        return failures, values[0]


def process_groups(group: Any) -> tuple[ProcessGroup, ProcessGroup]:
    """Two process groups: one for the thread that saves, one for that which trains.

    Args:
        group: torch's, for the saves; None takes a new one of all processes.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return ProcessGroup(), ProcessGroup()
    members = dist.get_process_group_ranks(group or dist.group.WORLD)

    def another() -> Any:
        return dist.new_group(members, backend="gloo", use_local_synchronization=True)

    return _group(group or another()), _group(another())


def _group(group: Any) -> ProcessGroup:
    return ProcessGroup(dist.get_rank(group), dist.get_world_size(group), TorchTransport(group))
