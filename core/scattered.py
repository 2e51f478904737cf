"""Numbers that lie scattered in memory, read or written at once.

A thousand numbers, each in a place of its own, cost Python 100 us or more to go through; from their
addresses C takes a tenth of that.

>>> import torch
>>> counts = [torch.tensor(3.0), torch.tensor(4.0)]
>>> numbers = Scattered([one.data_ptr() for one in counts], np.float32)
>>> numbers.write([8.0, 9.0])
>>> numbers.read(), counts[1]
(array([8., 9.], dtype=float32), tensor(9.))
"""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


class Scattered:
    """Numbers of one dtype.

    Nothing here knows whose memory it is: the caller keeps the owners alive and in place, and asks
    nothing of numbers that are gone.

    Args:
        addresses: of the numbers, aligned to their size.
        dtype: of all.
    """

    def __init__(self, addresses: Sequence[int], dtype: DTypeLike):
        """See the class; nothing is read yet."""
        kind = np.dtype(dtype)
        first = int(min(addresses, default=0))
        self._places = [(int(address) - first) // kind.itemsize for address in addresses]
        self._index = np.array(self._places, np.intp)
        size = (max(self._places, default=-1) + 1) * kind.itemsize
        # All memory from the first number to the last, of which only they are touched. NumPy must
        # not write to it: an index that lies in between lets it copy the whole, and write it back.
        span: Any = (ctypes.c_char * size).from_address(first) if size else bytearray()
        whole: Any = memoryview(span).cast("B")
        self._span = whole.cast(kind.char)
        self._numbers = np.frombuffer(self._span, kind)
        self._numbers.flags.writeable = False

    def read(self) -> np.ndarray:
        """The present numbers, in order."""
        return self._numbers.take(self._index)

    def write(self, numbers: Iterable[float]) -> None:
        """Replace each; the new ones are of the dtype already."""
        collections.deque(map(self._span.__setitem__, self._places, numbers), maxlen=0)
