"""torchrun's store after a restart, which still has the keys of the ranks before it.

torchrun keeps one store for all its restarts, and torch (2.13) puts the addresses of every new
group of ranks under the same keys: a rank that reads before another writes gets the address of a
process that has died. No variable has the number of the restart: TORCHELASTIC_RESTART_COUNT counts
failures of one machine. So the ranks begin with a handshake that ignores old keys:

1. each rank writes a new random word,
2. rank 0 answers with that word and a name for this start,
3. a rank that reads its own word takes the name, and confirms it.

All later keys are below that name.
"""

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
_PREFIX = "isoshard/start"
_PAUSE, _LONGEST = 0.02, 0.5  # seconds between two reads, at first and at most


def fresh_store(store: Opaque, rank: int, size: int, timeout: float) -> Any:
    """A prefix of torchrun's store without keys of an earlier start.

    Args:
        store: of torchrun's environment variables.
        rank: number of this process.
        size: number of processes.
        timeout: seconds within which all must have joined.

    Returns:
        `store` itself if it is not torchrun's own, and so is new.

    Raises:
        DistributedError: not all joined in time; rank 0 names those that did not.
    """
    if not agent_keeps_store():
        return store
    end = time.monotonic() + timeout
    name = _name_all(store, size, end, timeout) if rank == 0 else _be_named(store, rank, end)
    if name is None:
        raise DistributedError(
            f"rank {rank} of {size} got no answer from rank 0 within {timeout:g} s; has that rank "
            "failed, and is MASTER_ADDR torchrun's first machine?"
        )
    return _c10d.PrefixStore(f"{_PREFIX}/{name}", store)


def _name_all(store: Any, size: int, end: float, timeout: float) -> str:
    name, pause = uuid.uuid4().hex, _PAUSE
    waiting = {*range(1, size)}
    answered: dict[int, str] = {}
    while waiting:
        for rank in sorted(waiting):
            word = _read(store, f"word/{rank}")
            if word is not None and word != answered.get(rank):
                answered[rank] = word
                store.set(f"{_PREFIX}/answer/{rank}", f"{word} {name}")
            if _read(store, f"heard/{rank}") == name:
                waiting.remove(rank)
        if waiting and time.monotonic() > end:
            raise DistributedError(_missing(sorted(waiting), size, timeout))
        time.sleep(pause)
        pause = min(pause * 1.2, _LONGEST)
    return name


def _be_named(store: Any, rank: int, end: float) -> str | None:
    word, pause = uuid.uuid4().hex, _PAUSE
    store.set(f"{_PREFIX}/word/{rank}", word)
    while time.monotonic() < end:
        echoed, _, name = (_read(store, f"answer/{rank}") or "").partition(" ")
        if echoed == word:
            store.set(f"{_PREFIX}/heard/{rank}", name)
            return name
        time.sleep(pause)
        pause = min(pause * 1.2, _LONGEST)
    return None


def _read(store: Any, key: str) -> str | None:
    key = f"{_PREFIX}/{key}"
    return store.get(key).decode() if store.check([key]) else None


def _missing(ranks: Sequence[int], size: int, timeout: float) -> str:
    named = ", ".join(map(str, ranks))
    return (
        f"of {size} ranks these have not joined within {timeout:g} s: {named}. Does torchrun run "
        "on every machine, with the same --nnodes and --nproc-per-node?"
    )
