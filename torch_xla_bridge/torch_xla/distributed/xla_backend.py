"""torch_xla in torch.distributed: `init_method="xla://"`, and a backend that raises.

In SPMD mode torch_xla's guides make a process group on the CPU, for checkpoints:

    torch.distributed.init_process_group("gloo", init_method="xla://")

That works here, also with a single process. The backend `"xla"`, for replicas with a process per
chip, is known by name and refuses to be made. Importing this module registers both.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, NoReturn

import jax
import torch.distributed as dist

from isoshard.core.kit import optional
from isoshard.torch_bridge.kit import BACKENDS, RENDEZVOUS

_PORT = 12355  # torch_xla's default
_untyped: Any = dist  # its type stubs do not name the stores


class _NoGroupError(RuntimeError, AssertionError):
    """There is no process group `xla`; torch_xla asserts it in SPMD mode."""


def _refuse(*_: Any) -> NoReturn:
    raise _NoGroupError(
        "isoshard has no process group 'xla': an SPMD script is one replica, and XLA moves data "
        "between the chips. For DistributedDataParallel mark the batch with mark_sharding; for "
        "CPU tensors make another group: "
        "torch.distributed.init_process_group('gloo', init_method='xla://')"
    )


def rendezvous_handler(
    url: str, timeout: timedelta | None = None, **_: Any
) -> Iterator[tuple[Any, int, int]]:
    """The rendezvous of a job's processes, for torch.distributed.

    Args:
        url: `"xla://"`.
        timeout: how long to wait for the others.

    Yields:
        A store, the number of this process and the number of all.
    """
    from isoshard.torch_xla_bridge.torch_xla.runtime import get_master_ip

    rank, size = jax.process_index(), jax.process_count()
    if size == 1:
        yield _untyped.HashStore(), rank, size
        return
    port = int(os.environ.get("MASTER_PORT", _PORT))
    wait: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    yield _untyped.TCPStore(get_master_ip(), port, size, rank == 0, **wait), rank, size


def _register() -> None:
    if "xla" not in BACKENDS.resolve():
        dist.Backend.register_backend("xla", _refuse, devices=["xla"])
        RENDEZVOUS.resolve()("xla", rendezvous_handler)


with optional():
    _register()
