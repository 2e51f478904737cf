"""torch's process group alongside JAX's distributed runtime, with the same ranks.

Core calls this through its registry of frameworks, when `iso.distributed.init_distributed` runs.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from isoshard.core.errors import DistributedError

from .fresh_store import fresh_store

_c10d: Any = dist  # type checkers take some documented names of it for private


def joined() -> tuple[int, int] | None:
    """Rank and size of the default process group, or None if there is none yet."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.get_rank(), dist.get_world_size()


def join(
    rank: int,
    size: int,
    *,
    timeout: float,
    post: Callable[[str | None], str] | None = None,
    host: str = "",
    device: int | None = None,
) -> None:
    """Start the default process group: gloo for CPU tensors, NCCL for CUDA tensors.

    Args:
        rank: number of this process.
        size: number of processes.
        timeout: seconds within which all of them must have joined.
        post: sends rank 0's text to all ranks (the others call it with None); None: the store is
            that of torchrun's environment, or, with a size of 1, of this process.
        host: rank 0's machine, as the others reach it; for `post`.
        device: number of this process's GPU, made torch's current one; None: torch's choice.

    Raises:
        DistributedError: not all joined in time, or this torch has no distributed package.
    """
    if not dist.is_available():
        raise DistributedError("this build of torch has no torch.distributed; install a usual one")
    cuda = torch.cuda.is_available()
    if cuda and device is not None:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            store=_store(rank, size, datetime.timedelta(seconds=timeout), post, host),
            rank=rank,
            world_size=size,
        )
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"rank {rank} of {size} could not start torch's process group, for which it waited up "
            f"to {timeout:g} s: {_first_line(error)}. Do all processes run, does MASTER_ADDR name "
            "rank 0's machine, and can its MASTER_PORT be reached and is used by no other run?"
        ) from error


def broadcast_word(word: str | None) -> str:
    """Send rank 0's word to all ranks; a collective of the default group."""
    objects = [word]
    dist.broadcast_object_list(objects, src=0)
    return str(objects[0])


def leave() -> None:
    """End the default process group, if there is one."""
    if joined() is not None:
        dist.destroy_process_group()


def _store(
    rank: int,
    size: int,
    span: datetime.timedelta,
    post: Callable[[str | None], str] | None,
    host: str,
) -> Any:
    if post is None:
        if size == 1:
            return _c10d.HashStore()
        joined_store = next(_c10d.rendezvous("env://", rank, size, timeout=span))[0]
        return fresh_store(joined_store, rank, size, span.total_seconds())
    if rank == 0:
        store = _c10d.TCPStore(host, 0, size, is_master=True, timeout=span, wait_for_workers=False)
        post(str(store.port))
        return store
    port = int(post(None))
    return _c10d.TCPStore(host, port, size, is_master=False, timeout=span, wait_for_workers=False)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
