"""Threads ahead of a consumer: one reads an iterator, others may prepare what it gave.

>>> feed = Feed(iter("ab"), OrderedQueue(1))
>>> feed.take(), feed.take(), feed.take() is END
('a', 'b', True)

With `prepare` there are two stages, and threads that prepare what waits in `read`:

>>> feed = Feed(iter("ab"), OrderedQueue(2), read=OrderedQueue(2), prepare=str.upper, threads=3)
>>> feed.take(), feed.take(), feed.take() is END
('A', 'B', True)

An error of the iterator or of the preparation comes out of `take`, in the place of the item that it
spoiled and with the traceback of its thread. The threads know the feed and not its consumer, so a
consumer that is dropped can end them: see `stop`. They have JAX's settings of their maker, and are
over before JAX ends.
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

_AT_EXIT = 5.0
"""Seconds that the end of the process waits for a thread that reads."""


@dataclasses.dataclass
class Failed:
    """What stands for an item that could not be read or prepared."""

    error: BaseException


class Feed:
    """Reads and prepares items in threads, ahead of `take`.

    Args:
        source: read by one thread, and dropped there.
        ready: where items wait to be taken. An item is not read before there is room for it.
        read: where items wait to be prepared. There the next one is read while it waits for room.
        prepare: makes of each item what `take` returns; None takes it as it is.
        threads: how many prepare.
        name: of the threads; of two stages, what each does is added.
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
            BaseException: what the source or the preparation raised for this item. The threads
                end then.
            RuntimeError: `close` was called with a reason.
        """
        if self._finished:
            return END
        got = self._ready.get()
        if got is END:
            if self._why:
                raise RuntimeError(self._why)
            self._finished = True
            return END
        _, item = got
        if isinstance(item, Failed):
            self._finished = True
            self.stop()
            raise item.error
        return item

    def stop(self) -> None:
        """Drop what is ready and let the threads end, without waiting for them."""
        self._read.close()
        self._ready.close()

    def close(self, why: str = "") -> None:
        """End the threads, and wait until they have; a read in progress is finished first.

        Args:
            why: what `take` raises from now on, unless the source was at its end; if empty, `take`
                returns `END`.
        """
        self._why = why
        self.stop()
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join()

    @contextlib.contextmanager
    def _settings(self) -> Iterator[None]:
        """What JAX keeps for each thread, as it was where the feed was made."""
        with jax.enable_x64(self._x64), jax.default_device(self._device):
            yield

    def _run_reader(self, source: Iterator[Any], beyond: bool) -> None:
        number = 0
        try:
            with self._settings():
                while self._read.room(number - beyond):
                    item = next(source, END)
                    if item is END or not self._read.put(number, item):
                        return
                    number += 1
                    del item  # or it would be kept for as long as the next one is read
        except BaseException as error:
            if self._read.put(number, Failed(error)):
                number += 1
        finally:
            self._read.end(number)

    def _run_preparer(self, prepare: Callable[[Any], Any]) -> None:
        with self._settings():
            while (got := self._read.get()) is not END:
                number, item = got
                if not isinstance(item, Failed):
                    try:
                        item = prepare(item)
                    except BaseException as error:
                        item = Failed(error)
                if not self._ready.put(number, item):
                    return
                del got, item  # or a batch would be kept for as long as the next one is waited for
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
            thread.join(_AT_EXIT)
