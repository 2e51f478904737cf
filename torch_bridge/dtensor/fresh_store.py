"""torchrun's store after a restart: it still has what the ranks of before have left in it.

torchrun keeps one store for all its restarts, and torch (2.13) puts the addresses of every new group
of ranks under the same keys: a rank that reads before another writes gets the address of a process
that has died. No variable tells the ranks which restart this is: TORCHELASTIC_RESTART_COUNT counts
what failed on one machine. So they begin with a handshake that nothing old can take part in:

1. each rank says a new word of its own,
2. rank 0 answers it with that word and a name for this start,
3. a rank that hears its own word has the name, and says so.

All that follows goes below that name.
"""  # noqa: E501

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from isoshard.core.errors import DistributedError
from isoshard.core.processes.launchers import agent_keeps_store
from isoshard.torch_bridge.common.argument_types import Opaque

_c10d: Any = dist  # type checkers take this name of it for private
_ROOM = "isoshard/start"
_PAUSE, _LONGEST = 0.02, 0.5  # seconds between two looks, at first and at last


def fresh_store(store: Opaque, rank: int, size: int, timeout: float) -> Any:
    """A part of torchrun's store in which no earlier start has left anything.

    Args:
        store: where torchrun's variables led to.
        rank: number of this process.
        size: number of processes.
        timeout: seconds within which all must have come.

    Returns:
        `store` itself if it is not torchrun's own, and so is new.

    Raises:
        DistributedError: not all came in time; rank 0 names those that did not.
    """
    if not agent_keeps_store():
        return store
    end = time.monotonic() + timeout
    name = _name_all(store, size, end, timeout) if rank == 0 else _be_named(store, rank, end)
    if name is None:
        raise DistributedError(
            f"rank {rank} of {size} heard nothing of rank 0 within {timeout:g} s, with which all "
            "begin; has that rank failed, and does MASTER_ADDR lead to torchrun's first machine?"
        )
    return _c10d.PrefixStore(f"{_ROOM}/{name}", store)


def _name_all(store: Any, size: int, end: float, timeout: float) -> str:
    name, pause = uuid.uuid4().hex, _PAUSE
    waiting = {*range(1, size)}
    answered: dict[int, str] = {}
    while waiting:
        for rank in sorted(waiting):
            said = _said(store, f"word/{rank}")
            if said is not None and said != answered.get(rank):
                answered[rank] = said
                store.set(f"{_ROOM}/answer/{rank}", f"{said} {name}")
            if _said(store, f"heard/{rank}") == name:
                waiting.remove(rank)
        if waiting and time.monotonic() > end:
            raise DistributedError(_missing(sorted(waiting), size, timeout))
        time.sleep(pause)
        pause = min(pause * 1.2, _LONGEST)
    return name


def _be_named(store: Any, rank: int, end: float) -> str | None:
    word, pause = uuid.uuid4().hex, _PAUSE
    store.set(f"{_ROOM}/word/{rank}", word)
    while time.monotonic() < end:
        mine, _, name = (_said(store, f"answer/{rank}") or "").partition(" ")
        if mine == word:
            store.set(f"{_ROOM}/heard/{rank}", name)
            return name
        time.sleep(pause)
        pause = min(pause * 1.2, _LONGEST)
    return None


def _said(store: Any, key: str) -> str | None:
    key = f"{_ROOM}/{key}"
    return store.get(key).decode() if store.check([key]) else None


def _missing(ranks: Sequence[int], size: int, timeout: float) -> str:
    named = ", ".join(map(str, ranks))
    return (
        f"of {size} ranks these have not come within {timeout:g} s: {named}. Does torchrun run on "
        "every machine, with the same --nnodes and --nproc-per-node?"
    )
