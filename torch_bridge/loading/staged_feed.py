"""Two stages of threads ahead of a consumer: one reads an iterator, others prepare what it gave.

>>> ahead, ready = OrderedQueue(2), OrderedQueue(2)
>>> feed = Feed(iter(range(3)), lambda number: number * 10, ahead, ready, threads=2)
>>> feed.take(), feed.take(), feed.take(), feed.take() is END
(0, 10, 20, True)
>>> feed.close()

An error of the iterator or of the preparation comes out where the item would have, with the
traceback of the thread in which it happened. No thread refers to the consumer, so a consumer that
is dropped can end them: see `stop`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from isoshard.core.data.threads import join, settings_here, start
from isoshard.torch_bridge.engine.compiling import program

from .ordered_queue import END, OrderedQueue

_NAME = "isoshard loader"


@dataclasses.dataclass
class Failed:
    """What stands for an item that could not be read or prepared."""

    error: BaseException


class Feed:
    """Reads and prepares items in threads, ahead of `take`.

    Args:
        source: read by one thread, and dropped there.
        prepare: makes of each item what `take` returns.
        read: where items wait to be prepared.
        ready: where prepared items wait to be taken.
        threads: how many prepare.
    """

    def __init__(
        self,
        source: Iterator[Any],
        prepare: Callable[[Any], Any],
        read: OrderedQueue,
        ready: OrderedQueue,
        *,
        threads: int,
    ):
        """See the class; the threads run from now on."""
        self._prepare = prepare
        self._read = read
        self._ready = ready
        self._stopped = False
        self._finished = False
        self._why = ""
        self._settings = settings_here()
        self.threads = [
            threading.Thread(target=self._run_reader, args=(source,), name=f"{_NAME}: read"),
            *(
                threading.Thread(target=self._run_preparer, name=f"{_NAME}: upload")
                for _ in range(threads)
            ),
        ]
        start(self, self.threads)

    def take(self) -> Any:
        """The next prepared item, in the order of the source; `END` after the last one.

        Raises:
            BaseException: what the source or the preparation raised for this item. The threads
                end then.
            RuntimeError: `close` was called with a reason.
        """
        if self._finished:
            return END
        got = self._ready.get()
        if got is END:
            if self._stopped and self._why:
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
        """Let the threads end, without waiting for them."""
        self._stopped = True
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
        join(self.threads)

    def _run_reader(self, source: Iterator[Any]) -> None:
        number = 0
        try:
            with self._settings():
                while not self._stopped:
                    with jax.profiler.TraceAnnotation("isoshard.loading.read"):
                        item = next(source, END)
                    program.sync()  # a source may compute on the device; the tape is this thread's
                    if item is END or not self._read.put(number, item):
                        return
                    number += 1
                    del item  # or it would be kept for as long as the next one is read
        except BaseException as error:
            if self._read.put(number, Failed(error)):
                number += 1
        finally:
            self._read.end(number)

    def _run_preparer(self) -> None:
        with self._settings():
            while (got := self._read.get()) is not END:
                number, item = got
                if not isinstance(item, Failed):
                    try:
                        with jax.profiler.TraceAnnotation("isoshard.loading.upload"):
                            item = self._prepare(item)
                    except BaseException as error:
                        item = Failed(error)
                if not self._ready.put(number, item):
                    return
                del got, item  # or a batch would be kept for as long as the next one is waited for
        if self._read.length is not None:
            self._ready.end(self._read.length)
