"""Programs whose tensors and results lie in any layout: what the partitioner has to get right.

Each program has one mesh, of one to three axes, its devices in any order. Marks split an axis of a
tensor over several mesh axes, in any order of these, and sizes do not always divide. Not only
inputs are marked but also results, views among them: a layout in the middle of a program is a
constraint to XLA's partitioner, and a wrong answer there is silent.

Run them: `python -m tests.fuzz --layouts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .builder import Builder

MESHES = ((2, 2, 2), (2, 4), (8,), (4, 2), (2, 2), (4,), (3, 2), (2, 1, 4), (6,))
EXTENTS = (8, 4, 1, 2, 8, 3, 6, 4, 5)
DEVICES = 8


class LayoutBuilder(Builder):
    """Writes a program on a mesh of its own; see the module.

    Args:
        draw: as for `Builder`.
        **given: likewise; the mesh is drawn.
    """

    def __init__(self, draw: Any, **given: Any):
        """See the class."""
        super().__init__(draw, **given)
        self.mesh = self.one(MESHES)
        self._order = self._some_order() if self.chance(50) else None

    def _some_order(self) -> tuple[int, ...]:
        return self._shuffled(range(DEVICES))[: math.prod(self.mesh)]

    def shape(self) -> tuple[int, ...]:
        """Rank 1 to 3, with sizes that seldom fit every mesh axis."""
        return tuple(self.one(EXTENTS) for _ in range(self.one((2, 2, 3, 1))))

    def after(self) -> None:
        """Mark a tensor, often what the step made."""
        if self.chance(60):
            names = self.tensors()
            name = names[-1] if names and self.chance(70) else self.tensor()
            self.add(self._marked(name, tuple(self.scope[name].shape)))

    def _marked(self, made: str, shape: tuple[int, ...]) -> str:
        entries: list[list[str]] = [[] for _ in shape]
        for number in self._shuffled(range(len(self.mesh))):
            if not shape or not self.chance(80):
                continue
            size = self.mesh[number]
            fits = [axis for axis, extent in enumerate(shape) if extent % size == 0]
            axis = self.one(fits) if fits and self.chance(80) else self.one(range(len(shape)))
            entries[axis].append("xyz"[number])
        spec = tuple(tuple(e) if len(e) > 1 else e[0] if e else None for e in entries)
        order = "" if self._order is None else f", order={self._order}"
        return f"mark({made}, {self.mesh}, {spec}{order})"

    def _shuffled(self, items: Sequence[int]) -> tuple[int, ...]:
        left = list(items)
        return tuple(left.pop(self.integer(0, len(left) - 1)) for _ in items)
