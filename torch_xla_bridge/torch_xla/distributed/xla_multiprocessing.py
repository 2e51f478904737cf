"""Starting replicas, as far as there is one.

    import torch_xla.distributed.xla_multiprocessing as xmp

>>> spawn(lambda index, what: print(index, what), args=("trains",), nprocs=1)
0 trains
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import torch

from isoshard.torch_bridge.kit import is_spmd


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Run a function as the only replica, in this process.

    Args:
        fn: called with the number of the replica, 0, and then `args`.
        args: its arguments.
        nprocs: 1. None means all that there are: one in SPMD mode, or with one chip.
        join: not used; it has run when this returns.
        daemon: not used.
        start_method: not used.

    Raises:
        ValueError: another number of replicas was requested.
        NotImplementedError: None, with several chips and without SPMD mode, means several.
    """
    if nprocs not in (None, 1):
        raise ValueError(f"{nprocs} replicas were requested. {_ADVICE}")
    if nprocs is None and not is_spmd() and jax.device_count() > 1:
        raise NotImplementedError(
            f"there are {jax.device_count()} chips, and as many replicas would run. {_ADVICE}"
        )
    fn(0, *args)


_ADVICE = (
    "isoshard runs SPMD scripts, which are one replica: call torch_xla.runtime.use_spmd(), mark "
    "the batch (and what else is to be split) with mark_sharding, and call the function once, or "
    "ask for one replica: nprocs=1 of spawn, debug_single_process=True of launch."
)


class MpModelWrapper:
    """Moves one model to the device.

    Args:
        model: a module on the CPU.
    """

    def __init__(self, model: torch.nn.Module):
        """See the class."""
        self._model = model
        self._lock = threading.Lock()

    def to(self, device: str | torch.device) -> torch.nn.Module:
        """The model, on a device.

        Args:
            device: where to.
        """
        with self._lock:
            return self._model.to(device)


class MpSerialExecutor:
    """Runs functions one at a time."""

    def __init__(self):
        """See the class."""
        self._lock = threading.Lock()

    def run(self, fn: Callable[[], Any]) -> Any:
        """The result of a function.

        Args:
            fn: takes no arguments.
        """
        with self._lock:
            return fn()
