"""Preemption: SIGTERM is recorded, and training continues until it has saved.

The previous handler is called as well. Without one, SIGTERM no longer ends the process while a
`Watch` is started; the grace period of a cluster is for the last checkpoint.

>>> import os, signal
>>> with Watch() as watch:
...     os.kill(os.getpid(), signal.SIGTERM)
...     watch.reached
True
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax

from isoshard.core.errors import DistributedError


class Watch:
    """Records a SIGTERM from `start` until `stop`.

    Attributes:
        reached: whether one arrived.
    """

    def __init__(self) -> None:
        """Not started yet."""
        self.reached = False

    def start(self) -> None:
        """Start watching.

        Raises:
            RuntimeError: this is not the main thread, which alone can handle signals; or the
                previous handler was not set from Python.
        """
        if self in _WATCHING:
            return
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "only the main thread can watch for SIGTERM; make and use the CheckpointManager "
                "there, or pass chkpt_on_preemption=False"
            )
        _install()
        _WATCHING.add(self)

    def stop(self) -> None:
        """Stop watching; the last `Watch` to stop restores the previous handler."""
        _WATCHING.discard(self)
        if not _WATCHING:
            _uninstall()

    def __enter__(self) -> Watch:
        """Start."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop."""
        self.stop()


def activate() -> None:
    """Watch for SIGTERM until `deactivate`, for scripts that call `sync_point_reached`.

    Raises:
        RuntimeError: as `Watch.start`.
    """
    _of_scripts.start()


def deactivate() -> None:
    """Stop watching, and reset whether SIGTERM arrived."""
    _of_scripts.stop()
    _of_scripts.reached = False


def sync_point_reached(step: int) -> bool:
    """Whether SIGTERM arrived since `activate`.

    Args:
        step: of training; ignored.

    Raises:
        DistributedError: several processes run, which have to agree; use
            `CheckpointManager.reached_preemption`.
    """
    if jax.process_count() > 1:
        raise DistributedError(
            "several processes have to agree where they stop, and this reads one of them; call "
            "CheckpointManager.reached_preemption(step) in each"
        )
    return _of_scripts.reached


_WATCHING: weakref.WeakSet[Watch] = weakref.WeakSet()
_of_scripts = Watch()
_Handler = Callable[[int, FrameType | None], Any] | int | None
_before: _Handler = None
_installed = False


def _install() -> None:
    global _before, _installed
    if not _installed:
        if signal.getsignal(signal.SIGTERM) is None:
            raise RuntimeError(
                "SIGTERM has a handler that was not set from Python, and watching would replace "
                "it; pass chkpt_on_preemption=False"
            )
        _before = signal.signal(signal.SIGTERM, _handle)
        _installed = True


def _uninstall() -> None:
    """Restore the previous handler, unless another handler replaced this one."""
    global _installed
    on_top = signal.getsignal(signal.SIGTERM) is _handle
    if _installed and on_top and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL if _before is None else _before)
        _installed = False


def _handle(signal_number: int, frame: FrameType | None) -> None:
    watching = list(_WATCHING)
    for watch in watching:
        watch.reached = True
    if callable(_before):
        _before(signal_number, frame)
    elif not watching and _before == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal_number)
