"""Virtual devices, which share the threads of one CPU, run one program at a time.

The collectives of several programs in flight wait for each other's threads there; with few cores
none gets on, and XLA ends the process. Whoever starts programs in a loop calls `wait` before each
and `note` after it, or does both in `turn`, which also keeps threads apart; recording, tracing and
loading go on meanwhile, so nothing is lost.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> wait()
>>> total = jnp.sum(shard(jnp.ones((8, 4)), make_mesh((8,), ("x",)), ("x",)))
>>> note([total])
>>> wait()
>>> total.is_ready()
True
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import jax

from isoshard.core.runtime._jax_internals.tracers import Tracer

_RUNNING: list[weakref.ref[jax.Array]] = []


def note(results: Sequence[jax.Array]) -> None:
    """Remember the results of the program started last; under a trace there are none."""
    ends = (*results[:1], *results[-1:])
    _RUNNING[:] = [weakref.ref(array) for array in ends if not isinstance(array, Tracer)]


def wait() -> None:
    """Let that program finish, if it runs on several virtual devices."""
    for running in _RUNNING:
        array = running()
        if array is None or array.is_deleted():
            continue
        devices = array.sharding.device_set
        if len(devices) > 1 and next(iter(devices)).platform == "cpu":
            array.block_until_ready()


class _Turn:
    """Context in which this thread alone starts a program."""

    def __init__(self):
        self._starting = threading.RLock()

    def __enter__(self) -> Callable[[Sequence[jax.Array]], None]:
        """Wait for the program started last; returns what the results are to be given to."""
        self._starting.acquire()
        try:
            wait()
        except BaseException:
            self._starting.release()
            raise
        return note

    def __exit__(self, *exc: object) -> None:
        """Let other threads start theirs."""
        self._starting.release()


turn = _Turn()
"""Context in which this thread alone starts a program; gives `note`."""
