"""Numbers scattered in memory, read or written at once.

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

import ctypes
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike


class Scattered:
    """Numbers of one dtype.

    The memory is not owned: the caller keeps its owners alive and in place, and does not access
    numbers that are freed.

    Args:
        addresses: of the numbers, aligned to their size.
        dtype: of all.
    """

    def __init__(self, addresses: Sequence[int], dtype: DTypeLike):
        """See the class; nothing is read yet."""
        kind = np.dtype(dtype)
        first = int(min(addresses, default=0))
        offsets = [(int(address) - first) // kind.itemsize for address in addresses]
        size = (max(offsets, default=-1) + 1) * kind.itemsize
        # All memory from the first number to the last, of which only they are touched.
        span: Any = (ctypes.c_char * size).from_address(first) if size else bytearray()
        self._all = np.frombuffer(span, kind)
        self._numbers = self._all.view()
        self._numbers.flags.writeable = False
        self._index = np.array(offsets, np.intp)
        self._span = range(first, first + size)
        self._written: tuple[np.ndarray, np.ndarray] | None = None

    def read(self) -> np.ndarray:
        """The present numbers, in order."""
        return self._numbers.take(self._index)

    def write(self, values: Any) -> None:
        """Replace each.

        Args:
            values: one for each, of the dtype or to be rounded to it.
        """
        if self._written is None:
            self._written = separate(self._index, self._numbers.dtype, self._span)
        index, new = self._written
        new[:] = values
        self._all[index] = new


def separate(index: np.ndarray, dtype: np.dtype, span: range) -> tuple[np.ndarray, np.ndarray]:
    """An index, and a buffer for as many numbers, both outside of a span of memory.

    If one overlapped it, NumPy would copy the entire span and write it back.
    """
    size = index.nbytes + index.size * dtype.itemsize
    inside = []  # kept alive, so that the next is elsewhere
    while True:
        memory = np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)
        if memory.ctypes.data >= span.stop or memory.ctypes.data + memory.size <= span.start:
            break
        inside.append(memory)
    view = memory[: index.nbytes].view(np.intp)
    view[:] = index
    return view, memory[index.nbytes : size].view(dtype)
