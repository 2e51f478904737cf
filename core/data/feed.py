"""Prefetching threads: one reads an iterator, others may prepare its items.

>>> feed = Feed(iter("ab"), OrderedQueue(1))
>>> feed.take(), feed.take(), feed.take() is END
('a', 'b', True)

With `prepare` there are two stages, and several threads prepare the items queued in `read`:

>>> feed = Feed(iter("ab"), OrderedQueue(2), read=OrderedQueue(2), prepare=str.upper, threads=3)
>>> feed.take(), feed.take(), feed.take() is END
('A', 'B', True)

An error of the iterator or of the preparation is raised by `take`, in place of its item and with
the traceback of its thread. The threads have no reference to the consumer, so a consumer's
finalizer can end them: see `stop`. They inherit JAX's thread-local settings of their creator, and
end before JAX shuts down.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax

from .ordered_queue import END, OrderedQueue

_EXIT_TIMEOUT = 5.0
"""Seconds that process exit waits for a thread that is blocked in a read."""


@dataclasses.dataclass
class Failed:
    """The error of an item that could not be read or prepared, in its place."""

    error: BaseException


class Feed:
    """Reads and prepares items in threads, ahead of `take`.

    Args:
        source: read and released by one thread.
        ready: the queue of `take`. An item is not read before there is room for it.
        read: the queue of `prepare`. Here the next item is read while it waits for room.
        prepare: maps an item to the result of `take`; None is the identity.
        threads: the number of preparing threads.
        name: of the threads; with two stages, a suffix is added.
    """

    def __init__(
        self,
        source: Iterator[Any],
        ready: OrderedQueue,
        *,
        read: OrderedQueue | None = None,
        prepare: Callable[[Any], Any] | None = None,
        threads: int = 1,
        name: str = "isoshard data loader",
    ):
        """See the class; the threads run from now on."""
        self._ready = ready
        self._read = ready if read is None else read
        self._finished = False
        self._why = ""
        config: Any = jax.config
        self._x64, self._device = config.jax_enable_x64, config.jax_default_device
        two = prepare is not None
        read_name = f"{name}: read" if two else name
        reader = threading.Thread(target=self._run_reader, args=(source, two), name=read_name)
        self.threads = [reader] + [
            threading.Thread(target=self._run_preparer, args=(prepare,), name=f"{name}: upload")
            for _ in range(threads if two else 0)
        ]
        _LIVE.add(self)
        for thread in self.threads:
            thread.daemon = True
            thread.start()

    def take(self) -> Any:
        """The next item, in the order of the source; `END` after the last one.

        Raises:
            BaseException: raised by the source or the preparation for this item. The threads end.
            RuntimeError: `close` was called with a reason.
        """
        if self._finished:
            return END
        entry = self._ready.get()
        if entry is END:
            if self._why:
                raise RuntimeError(self._why)
            self._finished = True
            return END
        _, item = entry
        if isinstance(item, Failed):
            self._finished = True
            self.stop()
            raise item.error
        return item

    def stop(self) -> None:
        """Drop ready items and let the threads end, without waiting for them."""
        self._read.close()
        self._ready.close()

    def close(self, why: str = "") -> None:
        """End the threads, and wait until they have; a read in progress is finished first.

        Args:
            why: the message of the error that `take` raises afterwards, unless the source was at
                its end; if empty, `take` returns `END`.
        """
        self._why = why
        self.stop()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """JAX's thread-local settings, as they were where the feed was created."""
        with jax.enable_x64(self._x64), jax.default_device(self._device):
            yield

    def _run_reader(self, source: Iterator[Any], beyond: bool) -> None:
        index = 0
        try:
            with self._settings():
                while self._read.wait_for_room(index - beyond):
                    item = next(source, END)
                    if item is END or not self._read.put(index, item):
                        return
                    index += 1
                    del item  # else it would remain alive during the next read
        except BaseException as error:
            if self._read.put(index, Failed(error)):
                index += 1
        finally:
            self._read.end(index)

    def _run_preparer(self, prepare: Callable[[Any], Any]) -> None:
        with self._settings():
            while (entry := self._read.get()) is not END:
                index, item = entry
                if not isinstance(item, Failed):
                    try:
                        item = prepare(item)
                    except BaseException as error:
                        item = Failed(error)
                if not self._ready.put(index, item):
                    return
                del entry, item  # else a batch would remain alive during the wait for the next
        if self._read.length is not None:
            self._ready.end(self._read.length)


_LIVE: weakref.WeakSet[Feed] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """End the threads before JAX ends its devices."""
    live = list(_LIVE)
    for feed in live:
        feed.stop()
    for feed in live:
        for thread in feed.threads:
            thread.join(_EXIT_TIMEOUT)
