"""Operations between two frameworks' weights: each moves elements, changes none, can be undone.

>>> import numpy as np
>>> weight = np.arange(6).reshape(2, 3)                  # torch: (out, in)
>>> [kernel] = Kernel().run([weight], np)                # Flax: (in, out)
>>> kernel.shape, Kernel().inverse.run([kernel], np)[0].shape
((3, 2), (2, 3))

An operation maps a list of arrays to a list of arrays, and likewise their shapes and their
shardings: a transpose permutes the mesh axes too, so no data moves between devices. Where it would
have to (a split through the middle of a device's block), that is an error.

`back` is how files are loaded: a `WaitingMemory` is memory that waits for a rectangle of an output,
and `back` returns the rectangles of the inputs that fill it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from isoshard.core.errors import CodedError

Shape = tuple[int, ...]
Entries = tuple[tuple[str, ...], ...]  # for each axis the mesh axes that split it, outermost first
Sizes = Mapping[str, int]  # of the mesh axes


class OpError(CodedError, code="ISO022"):
    """An operation does not fit a shape or a sharding; callers add the leaf's name."""


@dataclasses.dataclass(frozen=True, eq=False)
class WaitingMemory:
    """Memory that waits for a rectangle of an array.

    Attributes:
        which: of the arrays, by position.
        start: where the rectangle starts in that array.
        view: the memory, of the rectangle's shape and with any strides.
    """

    which: int
    start: Shape
    view: np.ndarray


class Op:
    """One operation on a list of arrays; subclasses are frozen, so equal ones are compiled once.

    Example:
        >>> isinstance(Transpose((2, 0, 1)), Op), Transpose((2, 0, 1)).inverse
        (True, Transpose(axes=(1, 2, 0)))
    """

    @property
    def inverse(self) -> Op:
        """The operation that undoes this one."""
        raise TypeError(f"{type(self).__name__} has no inverse")

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The shapes of the outputs, or OpError if it does not fit."""
        raise TypeError(f"{type(self).__name__} gives no shapes")

    def layouts(
        self, layouts: Sequence[Entries], shapes: Sequence[Shape], sizes: Sizes
    ) -> list[Entries]:
        """The outputs' layouts for which nothing moves, or OpError if there are none."""
        raise TypeError(f"{type(self).__name__} gives no layouts")

    def run(self, arrays: Sequence[Any], xp: Any) -> list[Any]:
        """The outputs, by the functions of `xp`: numpy or jax.numpy."""
        raise TypeError(f"{type(self).__name__} does not run")

    def back(self, blocks: Sequence[WaitingMemory], shapes: Sequence[Shape]) -> list[WaitingMemory]:
        """Blocks of the inputs, by those of the outputs and the shapes of the inputs."""
        raise TypeError(f"{type(self).__name__} cannot load")


@dataclasses.dataclass(frozen=True)
class Transpose(Op):
    """Reorder the axes of each array.

    Attributes:
        axes: as for `numpy.transpose`.

    Example:
        >>> Transpose((2, 0, 1)).shapes([(2, 3, 4)])
        [(4, 2, 3)]
    """

    axes: tuple[int, ...] = (1, 0)

    @property
    def inverse(self) -> Transpose:
        """The axes back in their order."""
        return Transpose(tuple(int(axis) for axis in np.argsort(self.axes)))

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """See `Op`."""
        return [tuple(shape[axis] for axis in self._axes(len(shape))) for shape in shapes]

    def layouts(
        self, layouts: Sequence[Entries], shapes: Sequence[Shape], sizes: Sizes
    ) -> list[Entries]:
        """The mesh axes, permuted like the axes."""
        return [tuple(layout[axis] for axis in self._axes(len(layout))) for layout in layouts]

    def run(self, arrays: Sequence[Any], xp: Any) -> list[Any]:
        """See `Op`."""
        return [xp.transpose(array, self._axes(array.ndim)) for array in arrays]

    def back(self, blocks: Sequence[WaitingMemory], shapes: Sequence[Shape]) -> list[WaitingMemory]:
        """See `Op`."""
        return [self._back(block) for block in blocks]

    def _back(self, block: WaitingMemory) -> WaitingMemory:
        order = np.argsort(self._axes(len(block.start)))
        start = tuple(block.start[axis] for axis in order)
        return WaitingMemory(block.which, start, block.view.transpose(order))

    def _axes(self, rank: int) -> tuple[int, ...]:
        if sorted(self.axes) != list(range(rank)):
            raise OpError(f"{self} does not fit rank {rank}")
        return self.axes


@dataclasses.dataclass(frozen=True, repr=False)
class Kernel(Transpose):
    """A torch weight `(out, in, *window)` as a Flax kernel `(*window, in, out)`, of rank 2 to 5.

    Linear layers have no window, so theirs are transposed.

    Attributes:
        axes: not given: it depends on the rank.
        undo: from the kernel to the weight.

    Example:
        >>> Kernel().shapes([(64, 3, 7, 5)])
        [(7, 5, 3, 64)]
    """

    axes: tuple[int, ...] = ()
    undo: bool = False

    @property
    def inverse(self) -> Kernel:
        """The way back."""
        return Kernel(undo=not self.undo)

    def __repr__(self) -> str:
        """The constructor's call."""
        return "Kernel(undo=True)" if self.undo else "Kernel()"

    def _axes(self, rank: int) -> tuple[int, ...]:
        if not 2 <= rank <= 5:
            raise OpError(f"{self} takes rank 2 to 5, not {rank}")
        axes = (*range(2, rank), 1, 0)
        return tuple(int(axis) for axis in np.argsort(axes)) if self.undo else axes


@dataclasses.dataclass(frozen=True, repr=False)
class StandardKernel(Kernel):
    """The `Kernel` of a preset, which takes a `weight` for that of a Linear or Conv by its name.

    Example:
        >>> StandardKernel(), StandardKernel().inverse
        (Kernel(), Kernel(undo=True))
    """

    @property
    def inverse(self) -> StandardKernel:
        """The way back."""
        return StandardKernel(undo=not self.undo)


@dataclasses.dataclass(frozen=True)
class TransposedKernel(Op):
    """The weight of a torch ConvTranspose, `(in, out, *window)`, as a Flax kernel.

    Flax's ConvTranspose slides the window as it is, and torch's backwards: the kernel is
    `(*window, in, out)` with each axis of the window reversed. A Flax layer with
    `transpose_kernel=True` computes as torch does, and its kernel is `Kernel()` of the weight.

    Attributes:
        undo: from the kernel to the weight.

    Example:
        >>> TransposedKernel().shapes([(64, 3, 7, 5)])
        [(7, 5, 64, 3)]
    """

    undo: bool = False

    @property
    def inverse(self) -> TransposedKernel:
        """The way back."""
        return TransposedKernel(undo=not self.undo)

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """See `Op`."""
        return [output for shape in shapes for output in self._order(len(shape)).shapes([shape])]

    def layouts(
        self, layouts: Sequence[Entries], shapes: Sequence[Shape], sizes: Sizes
    ) -> list[Entries]:
        """The mesh axes, permuted like the axes; a split window would move data."""
        for layout in layouts:
            split = [axis for axis in self._window(len(layout)) if layout[axis]]
            if split:
                raise OpError(f"{self} would move data: axis {split[0]} is split")
        return [
            output
            for layout in layouts
            for output in self._order(len(layout)).layouts([layout], [], sizes)
        ]

    def run(self, arrays: Sequence[Any], xp: Any) -> list[Any]:
        """See `Op`."""
        return [
            xp.transpose(xp.flip(array, self._window(array.ndim)), self._order(array.ndim).axes)
            for array in arrays
        ]

    def back(self, blocks: Sequence[WaitingMemory], shapes: Sequence[Shape]) -> list[WaitingMemory]:
        """See `Op`."""
        inputs = []
        for block in blocks:
            shape = shapes[block.which]
            [turned] = self._order(len(shape)).back([block], [])
            start = list(turned.start)
            for axis in self._window(len(shape)):
                start[axis] = shape[axis] - start[axis] - turned.view.shape[axis]
            view = np.flip(turned.view, self._window(len(shape)))
            inputs.append(WaitingMemory(block.which, tuple(start), view))
        return inputs

    def _window(self, rank: int) -> tuple[int, ...]:
        """The axes of the window in the input."""
        return tuple(range(rank - 2)) if self.undo else tuple(range(2, rank))

    def _order(self, rank: int) -> Transpose:
        if not 3 <= rank <= 5:
            raise OpError(f"{self} takes rank 3 to 5, not {rank}")
        order = Transpose((*range(2, rank), 0, 1))
        return order.inverse if self.undo else order


def complete_sizes(op: Op, sizes: Shape, total: int, join: Any = math.prod) -> Shape:
    """`sizes` with the size for which -1 stands; joined they are `total`."""
    positive = [size for size in sizes if size != -1]
    if join is math.prod:
        rest = total // max(math.prod(positive), 1)
    else:
        rest = total - sum(positive)
    completed = tuple(rest if size == -1 else size for size in sizes)
    if join(completed) != total or min(completed, default=0) < 0:
        raise OpError(f"{op} does not divide size {total}")
    return completed
