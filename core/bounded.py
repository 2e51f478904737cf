"""A dictionary that keeps so many entries, and forgets the oldest.

For what is worked out once for each shape, layout or constant of a program: a program whose shapes
never end must not fill the memory.

>>> squares = Bounded(2)
>>> for n in range(4):
...     squares[n] = n * n
>>> squares
{2: 4, 3: 9}
"""

from __future__ import annotations

from typing import Generic, TypeVar

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

PROGRAMS = 1024
"""Entries that are, or lead to, a compiled program each."""


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
