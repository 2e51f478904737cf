"""Sliding windows over axes: their number, and the elements that they read.

>>> grid = WindowGrid((6,), (3,), (2,), (1,), ((0, 0),), ceil=True)
>>> grid.counts, grid.edges                      # the last one hangs over the end
((3,), ((0, 1),))
>>> grid.lengths(include_pad=False)
array([3, 3, 2])
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax


def window_count(
    size: int, kernel: int, stride: int, dilation: int, pad: tuple[int, int], ceil: bool = False
) -> int:
    """The number of windows along an axis.

    Args:
        size: of the axis.
        kernel: elements of a window.
        stride: from one window to the next.
        dilation: from one element of a window to the next.
        pad: padding before and after.
        ceil: a last window may hang over the end, if it begins in the axis or the padding before.
    """
    slack = size + sum(pad) - (kernel - 1) * dilation - 1
    count = (-(-slack // stride) if ceil else slack // stride) + 1
    return count - (ceil and (count - 1) * stride >= size + pad[0])


def elements_between(
    first: np.ndarray, kernel: int, dilation: int, low: int, high: int
) -> np.ndarray:
    """The number of elements of each window from `low` up to `high`, exclusive.

    >>> elements_between(np.array([-1, 1, 3]), 3, 1, 0, 4)
    array([2, 3, 1])
    """
    below = [np.clip(-((first - bound) // dilation), 0, kernel) for bound in (low, high)]
    return below[1] - below[0]


def window_elements(
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    counts: Sequence[int],
) -> Iterator[jax.Array]:
    """For each offset in a window, that element of all windows over the last axes of an array.

    Args:
        x: padded, `(*lead, *space)`.
        kernel: elements of a window; one per spatial axis, as are the others.
        stride: from one window to the next.
        dilation: from one element of a window to the next.
        counts: windows.

    Yields:
        Arrays `(*lead, *counts)`, as many as the elements of a window; the last axis runs fastest.

    >>> print(*window_elements(np.arange(6), (2,), (2,), (1,), (3,)))
    [0 2 4] [1 3 5]
    """
    lead = x.shape[: x.ndim - len(kernel)]
    start, steps = (0,) * len(lead), (1,) * len(lead)
    for offsets in itertools.product(*(range(k) for k in kernel)):
        first = [k * d for k, d in zip(offsets, dilation, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, counts, stride, strict=True)]
        yield lax.slice(x, (*start, *first), (*lead, *last), (*steps, *stride))


@dataclasses.dataclass(frozen=True)
class WindowGrid:
    """The windows over the last axes of an array.

    Attributes:
        sizes: of these axes, the spatial ones; one per axis, as are the others.
        kernel: elements of a window.
        stride: from one window to the next.
        dilation: from one element of a window to the next.
        padding: before and after.
        ceil: a last window may hang over the end, as in `window_count`.
    """

    sizes: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    ceil: bool = False

    @functools.cached_property
    def counts(self) -> tuple[int, ...]:
        """Windows per axis."""
        return tuple(window_count(*axis, self.ceil) for axis in self._axes)

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The elements that windows read before and after each axis: padding and overhang."""
        edges = []
        for (size, k, s, d, (before, after)), n in zip(self._axes, self.counts, strict=True):
            beyond = (n - 1) * s + (k - 1) * d + 1 - size - before
            edges.append((before, max(beyond, min(after, 0))))
        return tuple(edges)

    def over(self, ndim: int) -> dict[str, Any]:
        """The keyword arguments of `lax.reduce_window` for an array of so many axes."""
        lead = ndim - len(self.sizes)
        return {
            "window_dimensions": (1,) * lead + self.kernel,
            "window_strides": (1,) * lead + self.stride,
            "window_dilation": (1,) * lead + self.dilation,
            "padding": ((0, 0),) * lead + self.edges,
        }

    def lengths(self, *, include_pad: bool) -> np.ndarray:
        """The number of elements of each window, an array of shape `counts`.

        Args:
            include_pad: whether padding counts; the overhang at the end does not.
        """
        lengths = np.ones((), int)
        for (size, k, s, d, (before, after)), n in zip(self._axes, self.counts, strict=True):
            bounds = (-before, size + after) if include_pad else (0, size)
            axis_lengths = elements_between(np.arange(n) * s - before, k, d, *bounds)
            lengths = np.multiply.outer(lengths, axis_lengths)
        return lengths

    def elements(self, x: jax.Array) -> Iterator[jax.Array]:
        """`window_elements` of an array that is padded by the edges."""
        return window_elements(x, self.kernel, self.stride, self.dilation, self.counts)

    @property
    def _axes(self) -> list[tuple[int, int, int, int, tuple[int, int]]]:
        return [
            *zip(self.sizes, self.kernel, self.stride, self.dilation, self.padding, strict=True)
        ]
