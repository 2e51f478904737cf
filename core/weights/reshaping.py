"""Axes split and merged: the heads of an attention layer, which torch keeps as one axis.

>>> import numpy as np
>>> [query] = SplitAxis(0, (4, -1)).run([np.ones((32, 16))], np)
>>> query.shape
(4, 8, 16)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from .ops import Entries, Op, OpError, Shape, Sizes, WaitingMemory, complete_sizes


@dataclasses.dataclass(frozen=True)
class SplitAxis(Op):
    """Split one axis of each array into several: the heads of an attention layer.

    Attributes:
        axis: which.
        into: the sizes of the new axes; one may be -1 and follows from the others.

    Example:
        >>> SplitAxis(0, (4, -1)).shapes([(32, 16)])
        [(4, 8, 16)]
        >>> SplitAxis(0, (4, -1)).inverse.shapes([(4, 8, 16)])
        [(32, 16)]
    """

    axis: int
    into: tuple[int, ...]

    @property
    def inverse(self) -> MergeAxes:
        """The axes merged again."""
        return MergeAxes(self.axis, self.into)

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """See `Op`."""
        return [(*s[: self.axis], *self._sizes(s), *s[self.axis + 1 :]) for s in shapes]

    def layouts(
        self, layouts: Sequence[Entries], shapes: Sequence[Shape], sizes: Sizes
    ) -> list[Entries]:
        """Mesh axes split the outer new axis, then, once that is single, the next."""
        return [self._layout(*pair, sizes) for pair in zip(layouts, shapes, strict=True)]

    def _layout(self, layout: Entries, shape: Shape, sizes: Sizes) -> Entries:
        waiting = list(layout[self.axis])
        inner: list[tuple[str, ...]] = []
        for size in self._sizes(shape):
            names = []
            while waiting and size % sizes[waiting[0]] == 0:
                size //= sizes[waiting[0]]
                names.append(waiting.pop(0))
                if size == 1:
                    break
            if size > 1 and waiting:
                raise OpError(f"{self} would split the blocks that {waiting} make of axis {shape}")
            inner.append(tuple(names))
        return (*layout[: self.axis], *inner, *layout[self.axis + 1 :])

    def run(self, arrays: Sequence[Any], xp: Any) -> list[Any]:
        """See `Op`."""
        return [
            xp.reshape(a, s)
            for a, s in zip(arrays, self.shapes([x.shape for x in arrays]), strict=True)
        ]

    def back(self, blocks: Sequence[WaitingMemory], shapes: Sequence[Shape]) -> list[WaitingMemory]:
        """Complete rows of the inner axes as one run, others one by one."""
        return [p for block in blocks for p in self._back(block, shapes[block.which])]

    def _back(self, block: WaitingMemory, shape: Shape) -> list[WaitingMemory]:
        into = self._sizes(shape)
        rank = len(into)
        sizes = block.view.shape[self.axis : self.axis + rank]
        first_full = next((i for i in range(rank) if sizes[i:] == into[i:]), rank)
        for walked in (max(first_full - 1, 0), rank - 1):
            runs = [self._run(block, into, index) for index in np.ndindex(*sizes[:walked])]
            if all(np.may_share_memory(run.view, block.view) for run in runs):
                break  # else the inner axes are no run in memory: `reshape` would copy
        return runs

    def _run(self, block: WaitingMemory, into: Shape, index: Shape) -> WaitingMemory:
        """The run along the merged axis at one index of the axes that are walked."""
        axis, last = self.axis, self.axis + len(into)
        view = block.view[(slice(None),) * axis + index]
        merged = len(into) - len(index)
        size = math.prod(view.shape[axis : axis + merged])
        view = view.reshape(*view.shape[:axis], size, *view.shape[axis + merged :])
        steps = [math.prod(into[i + 1 :]) for i in range(len(into))]
        at = [s + i for s, i in zip(block.start[axis:last], (*index, *(0,) * merged), strict=True)]
        start = sum(s * step for s, step in zip(at, steps, strict=True))
        return WaitingMemory(block.which, (*block.start[:axis], start, *block.start[last:]), view)

    def _sizes(self, shape: Shape) -> Shape:
        if self.axis >= len(shape):
            raise OpError(f"{self} does not fit rank {len(shape)}")
        return complete_sizes(self, self.into, shape[self.axis])


@dataclasses.dataclass(frozen=True)
class MergeAxes(Op):
    """Merge neighbouring axes of each array into one; the inverse of `SplitAxis`.

    Attributes:
        axis: the first of them.
        sizes: their sizes; one may be -1, which takes any.

    Example:
        >>> MergeAxes(0, (4, -1)).shapes([(4, 8, 16)])
        [(32, 16)]
    """

    axis: int
    sizes: tuple[int, ...]

    @property
    def inverse(self) -> SplitAxis:
        """The axis split again."""
        return SplitAxis(self.axis, self.sizes)

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """See `Op`."""
        return [self._shape(shape) for shape in shapes]

    def _shape(self, shape: Shape) -> Shape:
        last = self.axis + len(self.sizes)
        inner = shape[self.axis : last]
        fits = all(want in (-1, size) for want, size in zip(self.sizes, inner, strict=False))
        if len(inner) < len(self.sizes) or not fits:
            raise OpError(f"{self} does not fit {shape}")
        return (*shape[: self.axis], math.prod(inner), *shape[last:])

    def layouts(
        self, layouts: Sequence[Entries], shapes: Sequence[Shape], sizes: Sizes
    ) -> list[Entries]:
        """Mesh axes of an inner axis remain if each device has one index of the axes before it."""
        return [self._layout(*pair, sizes) for pair in zip(layouts, shapes, strict=True)]

    def _layout(self, layout: Entries, shape: Shape, sizes: Sizes) -> Entries:
        last = self.axis + len(self.sizes)
        merged: list[str] = []
        single = True
        for names, size in zip(layout[self.axis : last], shape[self.axis : last], strict=True):
            if names and not single:
                raise OpError(f"{self} puts the blocks of {names} side by side with others")
            merged += names
            single = single and size == math.prod(sizes[name] for name in names)
        return (*layout[: self.axis], tuple(merged), *layout[last:])

    def run(self, arrays: Sequence[Any], xp: Any) -> list[Any]:
        """See `Op`."""
        return [xp.reshape(a, self._shape(a.shape)) for a in arrays]

    def back(self, blocks: Sequence[WaitingMemory], shapes: Sequence[Shape]) -> list[WaitingMemory]:
        """Rectangles of a run along the merged axis, split where an outer axis steps on."""
        return [p for block in blocks for p in self._back(block, shapes[block.which])]

    def _back(self, block: WaitingMemory, shape: Shape) -> list[WaitingMemory]:
        last = self.axis + len(self.sizes)
        inner = shape[self.axis : last]
        at, count = block.start[self.axis], block.view.shape[self.axis]
        boxes = []
        for starts, sizes, offset in _boxes(at, count, inner):
            index = (slice(None),) * self.axis + (slice(offset, offset + math.prod(sizes)),)
            view = block.view[index]
            shaped = (*view.shape[: self.axis], *sizes, *view.shape[self.axis + 1 :])
            start = (*block.start[: self.axis], *starts, *block.start[self.axis + 1 :])
            boxes.append(WaitingMemory(block.which, start, view.reshape(shaped)))
        return boxes


def _boxes(at: int, count: int, inner: Shape) -> list[tuple[Shape, Shape, int]]:
    """Rectangles of shape `inner` that a flat run covers: start, sizes, and offset in the run."""
    if len(inner) == 1:
        return [((at,), (count,), 0)] if count else []
    step = math.prod(inner[1:])
    boxes: list[tuple[Shape, Shape, int]] = []
    offset = 0
    while count:
        row, rest = divmod(at, step)
        if rest == 0 and count >= step:
            rows = count // step
            boxes.append(((row, *(0,) * (len(inner) - 1)), (rows, *inner[1:]), offset))
            taken = rows * step
        else:
            taken = min(step - rest, count)
            for start, sizes, more in _boxes(rest, taken, inner[1:]):
                boxes.append(((row, *start), (1, *sizes), offset + more))
        at, count, offset = at + taken, count - taken, offset + taken
    return boxes
