"""Arrays joined and split along an axis: query, key and value as one weight.

>>> import numpy as np
>>> [qkv] = Concat(0).run([np.zeros((4, 8)), np.ones((4, 8))], np)
>>> qkv.shape
(8, 8)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .ops import Entries, Op, OpError, Shape, Sizes, WaitingMemory, complete_sizes


@dataclasses.dataclass(frozen=True)
class Concat(Op):
    """Join the arrays along an axis: q, k and v as one.

    Attributes:
        axis: which.
        sizes: of the arrays along it; not given, they are all equal.
        count: how many; not given, as many as the rule has sources.

    Example:
        >>> Concat(0).shapes([(4, 8), (4, 8), (4, 8)])
        [(12, 8)]
    """

    axis: int
    sizes: tuple[int, ...] | None = None
    count: int | None = None

    @property
    def inverse(self) -> Split:
        """The `Split` into the same arrays."""
        return Split(self.axis, self.sizes, self.count)

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """See `Op`."""
        first, axis = shapes[0], self.axis
        lengths = [shape[axis] if axis < len(shape) else 0 for shape in shapes]
        others = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        expected = list(self.sizes) if self.sizes else [lengths[0]] * (self.count or len(shapes))
        if axis >= len(first) or len(others) > 1 or lengths != expected:
            listed = ", ".join(map(str, shapes))
            raise OpError(
                f"{self} does not fit shapes {listed}: expected {expected} along axis {axis}"
            )
        return [(*first[:axis], sum(lengths), *first[axis + 1 :])]

    def layouts(
        self, layouts: Sequence[Entries], shapes: Sequence[Shape], sizes: Sizes
    ) -> list[Entries]:
        """The common layout, if it does not split the axis."""
        if len(set(layouts)) > 1 or layouts[0][self.axis]:
            raise OpError(f"{self} would move data: {_moves(layouts, self.axis)}")
        return [layouts[0]]

    def run(self, arrays: Sequence[Any], xp: Any) -> list[Any]:
        """See `Op`."""
        return [xp.concatenate(list(arrays), self.axis)]

    def back(self, blocks: Sequence[WaitingMemory], shapes: Sequence[Shape]) -> list[WaitingMemory]:
        """The ranges of each array that a rectangle overlaps."""
        ranges = []
        for block in blocks:
            begin, size, offset = block.start[self.axis], block.view.shape[self.axis], 0
            for which, shape in enumerate(shapes):
                low, high = (
                    max(begin, offset),
                    min(begin + size, offset + shape[self.axis]),
                )
                if low < high:
                    ranges.append(_range(block, which, self.axis, begin, low, high, low - offset))
                offset += shape[self.axis]
        return ranges


@dataclasses.dataclass(frozen=True)
class Split(Op):
    """Split an array along an axis; the inverse of `Concat`.

    Attributes:
        axis: which.
        sizes: of the arrays along it; not given, they are all equal.
        count: how many; not given, as many as the rule has targets.

    Example:
        >>> Split(0, count=3).shapes([(12, 8)])
        [(4, 8), (4, 8), (4, 8)]
    """

    axis: int
    sizes: tuple[int, ...] | None = None
    count: int | None = None

    @property
    def inverse(self) -> Concat:
        """The `Concat` of the same arrays."""
        return Concat(self.axis, self.sizes, self.count)

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """See `Op`."""
        [shape] = shapes
        lengths = self._lengths(shape)
        return [(*shape[: self.axis], length, *shape[self.axis + 1 :]) for length in lengths]

    def layouts(
        self, layouts: Sequence[Entries], shapes: Sequence[Shape], sizes: Sizes
    ) -> list[Entries]:
        """The same layout, if it does not split the axis."""
        if layouts[0][self.axis]:
            raise OpError(f"{self} would move data: {_moves(layouts, self.axis)}")
        return [layouts[0]] * len(self._lengths(shapes[0]))

    def run(self, arrays: Sequence[Any], xp: Any) -> list[Any]:
        """See `Op`."""
        lengths = self._lengths(arrays[0].shape)
        ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
        before = (slice(None),) * self.axis
        pairs = zip(ends, lengths, strict=True)
        return [arrays[0][(*before, slice(end - length, end))] for end, length in pairs]

    def back(self, blocks: Sequence[WaitingMemory], shapes: Sequence[Shape]) -> list[WaitingMemory]:
        """The same rectangles, offset by the arrays before theirs."""
        lengths = self._lengths(shapes[0])
        ranges = []
        for block in blocks:
            start = list(block.start)
            start[self.axis] += sum(lengths[: block.which])
            ranges.append(WaitingMemory(0, tuple(start), block.view))
        return ranges

    def _lengths(self, shape: Shape) -> Shape:
        if self.axis >= len(shape):
            raise OpError(f"{self} does not fit rank {len(shape)}")
        if self.sizes:
            return complete_sizes(self, self.sizes, shape[self.axis], sum)
        count = self.count or 1
        if shape[self.axis] % count:
            raise OpError(f"{self} does not divide axis {self.axis} of {shape}")
        return (shape[self.axis] // count,) * count


def _moves(layouts: Sequence[Entries], axis: int) -> str:
    if len(set(layouts)) > 1:
        return f"the arrays are sharded differently, by {', '.join(map(str, layouts))}"
    return f"axis {axis} is split over {', '.join(map(repr, layouts[0][axis]))}"


def _range(
    block: WaitingMemory, which: int, axis: int, begin: int, low: int, high: int, at: int
) -> WaitingMemory:
    """A block from `low` to `high` along an axis; it begins at `at` in its array."""
    index = (slice(None),) * axis + (slice(low - begin, high - begin),)
    start = (*block.start[:axis], at, *block.start[axis + 1 :])
    return WaitingMemory(which, start, block.view[index])
