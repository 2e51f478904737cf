"""A process forked from one in which JAX runs has its memory, but not the threads that do the work.

Whatever it asked of a device would wait for ever. So its recorder refuses: CPU tensors are as ever,
and a tensor on the `jax` device raises, with the way out.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from isoshard.core.processes.coordination import backend_runs
from isoshard.torch_bridge.common import naming

from .recorder import Recorder, wire_new


class Forked(Recorder):
    """Where no operation can go; whatever is asked of it raises."""

    __slots__ = ()
    mark = None  # `torch.manual_seed`, which a DataLoader's worker calls, is no use of the device

    def __init__(self) -> None:
        """Nothing is set: the first look raises."""

    def __getattr__(self, name: str) -> Any:
        """Refuse: an operation looks at what decides about it.

        Raises:
            RuntimeError: always.
        """
        _refuse()

    def record(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        _refuse()

    def check_process(self) -> None:
        """Refuse.

        Raises:
            RuntimeError: always.
        """
        _refuse()

    view = keep_view = refuse = record


def _refuse() -> NoReturn:
    raise RuntimeError(
        f"a tensor on the {naming.current().type} device is used in a process that was forked "
        "after JAX had started, "
        "whose threads it does not have. Keep to CPU tensors here, and move them to the device in "
        "the process that forked (as a DataLoader's user does with each batch); or start processes "
        'anew: DataLoader(.., multiprocessing_context="spawn"), '
        'torch.multiprocessing.get_context("spawn").'
    )


def _in_child() -> None:
    if backend_runs():
        wire_new(Forked)


os.register_at_fork(after_in_child=_in_child)
