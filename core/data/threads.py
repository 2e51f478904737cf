"""Threads that read ahead: with JAX's settings of their maker, and over before JAX ends.

>>> class Reader:
...     def stop(self):
...         print("told to stop")
>>> reader, seen, settings = Reader(), [], settings_here()
>>> def read():
...     with settings():
...         seen.append("read")
>>> threads = [threading.Thread(target=read)]
>>> start(reader, threads)
>>> join(threads)
>>> seen
['read']

A reader is told to stop at the end of the process only if it is still there.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

_AT_EXIT = 5.0
"""Seconds that the end of the process waits for a thread that reads."""


class Stoppable(Protocol):
    """What owns threads."""

    def stop(self) -> None:
        """Let the threads end, without waiting for them."""


def settings_here() -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """Note what JAX keeps for each thread, as it is here.

    Returns:
        A function that makes a context manager, for another thread to enter.
    """
    config: Any = jax.config
    x64, device = config.jax_enable_x64, config.jax_default_device

    @contextlib.contextmanager
    def enter() -> Iterator[None]:
        with jax.enable_x64(x64), jax.default_device(device):
            yield

    return enter


def start(owner: Stoppable, threads: Sequence[threading.Thread]) -> None:
    """Start threads that do not keep the process, and are told to stop when it ends.

    Args:
        owner: is told; it is not kept alive by this.
        threads: not started yet.
    """
    _LIVE[owner] = threads
    for thread in threads:
        thread.daemon = True
        thread.start()


def join(threads: Sequence[threading.Thread]) -> None:
    """Wait until threads have ended, this one excepted.

    Args:
        threads: some; they have been told to stop.
    """
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()


_LIVE: weakref.WeakKeyDictionary[Stoppable, Sequence[threading.Thread]]
_LIVE = weakref.WeakKeyDictionary()


@atexit.register
def _end_all() -> None:
    """End the threads before JAX ends its devices."""
    live = list(_LIVE.items())
    for owner, _ in live:
        owner.stop()
    for _, threads in live:
        for thread in threads:
            thread.join(_AT_EXIT)
