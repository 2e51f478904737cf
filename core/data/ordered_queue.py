"""A bounded queue between threads whose items come out in the order of their numbers.

Several threads may prepare items at once and finish in any order; the reader sees them in the order
in which they began.

>>> line = OrderedQueue(4)
>>> line.put(1, "second"), line.put(0, "first"), line.end(2)
(True, True, None)
>>> line.get(), line.get(), line.get() is END
((0, 'first'), (1, 'second'), True)
"""

from __future__ import annotations

import threading
from typing import Any

END: Any = object()
"""What `get` returns when there is nothing more to come."""


class OrderedQueue:
    """A bounded queue of numbered items.

    Args:
        size: how far ahead of the reader items may be put.

    Attributes:
        length: how many items there are in all; None while nobody knows.
        waits: how often `get` found nothing ready.
    """

    def __init__(self, size: int):
        """See the class."""
        self.size = size
        self.length: int | None = None
        self.waits = 0
        self._items: dict[int, Any] = {}
        self._next = 0
        self._closed = False
        # Its lock can be taken twice by one thread: `close` may run in a garbage collection that
        # begins inside the other methods.
        self._changed = threading.Condition(threading.RLock())

    def room(self, number: int) -> bool:
        """Wait until an item's number is less than `size` ahead of the reader.

        Args:
            number: its place.

        Returns:
            False if the line was closed.
        """
        with self._changed:
            while not self._closed and number >= self._next + self.size:
                self._changed.wait()
            return not self._closed

    def put(self, number: int, item: Any) -> bool:
        """Add an item, once there is room for it.

        Args:
            number: its place; every number from 0 on is put once.
            item: anything.

        Returns:
            False if the line was closed; the item is dropped then.
        """
        with self._changed:
            if not self.room(number):
                return False
            self._items[number] = item
            self._changed.notify_all()
            return True

    def get(self) -> Any:
        """Take the next item, waiting until it is there.

        Returns:
            Its number and the item, or `END` after the last one and after `close`.
        """
        with self._changed:
            waited = False
            while not self._closed:
                item = self._items.pop(self._next, END)
                if item is not END:
                    self._next += 1
                    self._changed.notify_all()
                    return self._next - 1, item
                if self.length is not None and self._next >= self.length:
                    break
                self.waits += not waited
                waited = True
                self._changed.wait()
            return END

    def end(self, length: int) -> None:
        """Say how many items there are in all."""
        with self._changed:
            self.length = length
            self._changed.notify_all()

    def close(self) -> None:
        """Drop what is there; whoever waits goes on, and nothing more is taken or given."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
