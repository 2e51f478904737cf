"""A bounded queue between threads that returns items in the order of their indices.

Several threads may prepare items at once and finish in any order; the reader gets them in the order
in which they began.

>>> queue = OrderedQueue(4)
>>> queue.put(1, "second"), queue.put(0, "first"), queue.end(2)
(True, True, None)
>>> queue.get(), queue.get(), queue.get() is END
((0, 'first'), (1, 'second'), True)
"""

from __future__ import annotations

import threading
from typing import Any

END: Any = object()
"""The result of `get` after the last item."""


class OrderedQueue:
    """A bounded queue of indexed items.

    Args:
        size: how far ahead of the reader items may be put.

    Attributes:
        length: the total number of items; None while unknown.
        waits: how often `get` had to wait.
    """

    def __init__(self, size: int):
        """See the class."""
        self.size = size
        self.length: int | None = None
        self.waits = 0
        self._items: dict[int, Any] = {}
        self._next = 0
        self._closed = False
        # Reentrant, since `close` may run in a garbage collection inside the other methods.
        self._changed = threading.Condition(threading.RLock())

    def wait_for_room(self, index: int) -> bool:
        """Wait until an index is less than `size` ahead of the reader; False if closed."""
        with self._changed:
            while not self._closed and index >= self._next + self.size:
                self._changed.wait()
            return not self._closed

    def put(self, index: int, item: Any) -> bool:
        """Add an item, once there is room for it.

        Args:
            index: its place; every number from 0 on is put once.
            item: anything.

        Returns:
            False if the line was closed; the item is dropped then.
        """
        with self._changed:
            if not self.wait_for_room(index):
                return False
            self._items[index] = item
            self._changed.notify_all()
            return True

    def get(self) -> Any:
        """Take the next item, waiting for it.

        Returns:
            Its index and the item, or `END` after the last one and after `close`.
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
        """Set the total number of items."""
        with self._changed:
            self.length = length
            self._changed.notify_all()

    def close(self) -> None:
        """Drop all items and wake all waiting threads; later calls return at once."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()
