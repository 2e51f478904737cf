"""A thread that runs an iterator ahead of its consumer.

>>> feed = Feed(iter("ab"), ahead=1)
>>> feed.take(), feed.take(), feed.take() is END
('a', 'b', True)

An error of the iterator comes out of `take`, in the place of the item that it spoiled and with the
traceback of the thread. The thread knows the feed and not its consumer, so a consumer that is
dropped can end it: see `stop`.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Iterator
from typing import Any

from .threads import join, settings_here, start

END: Any = object()
"""What `take` returns when there is nothing more to come."""

_NAME = "isoshard data loader"


class Feed:
    """Takes items from an iterator in a thread, at most `ahead` of them before they are asked for.

    Args:
        source: read by the thread only, and closed there if it can be.
        ahead: how many items may wait, at least 1. The next one is not begun before there is room.

    Attributes:
        thread: the thread.
        waits: how often `take` found nothing ready.
    """

    def __init__(self, source: Iterator[Any], ahead: int):
        """See the class; the thread runs from now on."""
        self.waits = 0
        self._ahead = ahead
        self._ready: collections.deque[Any] = collections.deque()
        self._error: BaseException | None = None
        self._done = False
        self._stopped = False
        # Its lock can be taken twice by one thread: `stop` may run in a garbage collection that
        # begins inside the other methods.
        self._changed = threading.Condition(threading.RLock())
        self._settings = settings_here()
        self.thread = threading.Thread(target=self._run, args=(source,), name=_NAME)
        start(self, [self.thread])

    def take(self) -> Any:
        """The next item, or `END` after the last one and after `stop`.

        Raises:
            BaseException: what the iterator raised; `END` follows.
        """
        with self._changed:
            if not (self._ready or self._done or self._stopped):
                self.waits += 1
            while not (self._ready or self._done or self._stopped):
                self._changed.wait()
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
        if error is not None:
            raise error
        return END

    def stop(self) -> None:
        """Drop what is ready and let the thread end, without waiting for it."""
        with self._changed:
            self._stopped = True
            self._error = None
            self._ready.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread, and wait until it has; a read in progress is finished first."""
        self.stop()
        join([self.thread])

    def _run(self, source: Iterator[Any]) -> None:
        try:
            with self._settings():
                try:
                    self._read(source)
                finally:
                    close = getattr(source, "close", None)
                    if close is not None:
                        close()
        except BaseException as error:
            with self._changed:
                self._error = None if self._stopped else error
        finally:
            with self._changed:
                self._done = True
                self._changed.notify_all()

    def _read(self, source: Iterator[Any]) -> None:
        while self._room():
            item = next(source, END)
            if item is END:
                return
            with self._changed:
                if self._stopped:
                    return
                self._ready.append(item)
                self._changed.notify_all()
            del item  # or it would be kept for as long as the next one is read

    def _room(self) -> bool:
        """Wait until another item may be read; False if none is wanted any more."""
        with self._changed:
            while not self._stopped and len(self._ready) >= self._ahead:
                self._changed.wait()
            return not self._stopped
