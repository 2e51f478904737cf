"""Dictionaries that keep so many entries, and forget the oldest, or those not used for longest.

For what is worked out once for each shape, layout or constant of a program: a program whose shapes
never end must not fill the memory.

>>> squares = Bounded(2)
>>> for n in range(4):
...     squares[n] = n * n
>>> squares
{2: 4, 3: 9}
>>> recent = Recent(4)
>>> for n in range(6):
...     recent[n] = n * n
>>> recent.lookup(0), recent.lookup(2), recent.lookup(5)
(None, 4, 25)
"""

from __future__ import annotations

import threading
import weakref
from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

PROGRAMS = 1024
"""Entries that are, or lead to, a compiled program each."""

CALLS = 4096
"""Calls of one operator, with other shapes or constants, that need no more working out."""


class Bounded(dict[_Key, _Value], Generic[_Key, _Value]):
    """A dictionary of the newest entries; reading one costs what it costs in a `dict`.

    Args:
        most: how many it keeps.
    """

    most: int = PROGRAMS

    def __init__(self, most: int):
        """Start empty."""
        super().__init__()
        self.most = most

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """Keep an entry, and forget the oldest if there are too many."""
        super().__setitem__(key, value)
        while len(self) > self.most:
            try:
                del self[next(iter(self))]
            except (KeyError, RuntimeError):  # another thread was faster
                continue


class Recent(dict[_Key, _Value], Generic[_Key, _Value]):
    """A dictionary of the entries used last.

    They are in two halves. The newer one is this `dict`, so finding an entry with `get` costs what
    it costs there. `again` looks further and brings what it finds to the newer half. When that is
    full it becomes the older one, whose entries go.

    Args:
        most: how many entries both halves hold together.
    """

    def __init__(self, most: int):
        """Start empty."""
        super().__init__()
        self.most = most
        self.half = most // 2
        self.older: dict[_Key, _Value] = {}
        self._turning = threading.RLock()

    def again(self, key: _Key) -> _Value | None:
        """The entry that `get` did not find, if it is kept elsewhere."""
        found = self.older.get(key)
        if found is not None:
            self[key] = found
        return found

    def lookup(self, key: _Key) -> _Value | None:
        """What `get` or else `again` finds."""
        found = self.get(key)
        return self.again(key) if found is None else found

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """Keep an entry, and forget the older half if the newer one is full."""
        dropped = None
        with self._turning:
            if len(self) >= self.half and key not in self:
                dropped, self.older = self.older, dict(self)
                self.clear()
            super().__setitem__(key, value)
        del dropped  # what goes with it goes now, when nothing is locked


class Interned(Recent[_Key, _Value]):
    """Recent entries, and those that are alive because somebody else holds the value.

    As long as a value lives, its key leads to it and to no other.

    Args:
        most: how many entries are kept though nobody else holds them.
    """

    def __init__(self, most: int):
        """Start empty."""
        super().__init__(most)
        self.alive: weakref.WeakValueDictionary[_Key, _Value] = weakref.WeakValueDictionary()

    def again(self, key: _Key) -> _Value | None:
        """As `Recent.again`; also an entry that is forgotten, if its value is alive."""
        found = self.alive.get(key)
        if found is not None:
            super().__setitem__(key, found)
        return found

    def __setitem__(self, key: _Key, value: _Value) -> None:
        """As in `Recent`."""
        self.alive[key] = value
        super().__setitem__(key, value)

    def intern(self, key: _Key, value: _Value) -> _Value:
        """Keep an entry unless another thread was faster; returns what the key leads to."""
        with self._turning:
            found = self.alive.get(key)
            if found is None:
                found = value
                self[key] = value
        return found
