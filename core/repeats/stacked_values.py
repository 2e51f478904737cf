"""Values of equal role, stacked along a new leading axis, as loops read and output them.

>>> stacks = StackedValues()
>>> weights = stacks.add(StackedArray((3, 4, 5), "input"))
>>> stacks.find((5, 4)) == (weights, (2, 1))
True
>>> stacks.find((4, 6)) is None
True
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Literal

Origin = Literal["input", "output", "carried", "batched", "sliced", "literals", "gathered"]
"""Where an array comes from: an input of the program; an output of a loop, or the values of its
carry; a result of a batched equation; slices of one value; literals; or values from elsewhere that
are copied into one array."""


@dataclasses.dataclass(frozen=True, eq=False)
class StackedArray:
    """Values as one array, in the order of its leading axis.

    Attributes:
        members: the values; literals below 0.
        origin: where it comes from.
        owner: the index of the loop or of the batched equation.
        slot: the index of the output, the carry or the result.
    """

    members: tuple[int, ...]
    origin: Origin
    owner: int = -1
    slot: int = -1

    @functools.cached_property
    def index(self) -> dict[int, int]:
        """The row of each value."""
        return {value: index for index, value in enumerate(self.members)}


class StackedValues:
    """All arrays of a program, by their members and by each member."""

    def __init__(self) -> None:
        """Start without arrays."""
        self._arrays: dict[tuple[int, ...], StackedArray] = {}
        self._containing: dict[int, list[StackedArray]] = {}
        self.inputs: list[StackedArray] = []

    def add(self, array: StackedArray) -> StackedArray:
        """Add an array, and return it; or return an existing array with the same members."""
        existing = self._arrays.setdefault(array.members, array)
        if existing is array:
            for value in dict.fromkeys(array.members):
                self._containing.setdefault(value, []).append(array)
            if array.origin == "input":
                self.inputs.append(array)
        return existing

    def exactly(self, members: tuple[int, ...]) -> StackedArray | None:
        """The array of these values in this order, if there is one."""
        return self._arrays.get(members)

    def containing(self, value: int) -> Sequence[StackedArray]:
        """The arrays that contain a value."""
        return self._containing.get(value, ())

    def find(self, members: tuple[int, ...]) -> tuple[StackedArray, tuple[int, ...]] | None:
        """An array that has these values, in any order, with their rows.

        Args:
            members: values.
        """
        exact = self._arrays.get(members)
        if exact is not None:
            return exact, tuple(range(len(members)))
        for array in self.containing(members[0]):
            if all(member in array.index for member in members):
                return array, tuple([array.index[member] for member in members])
        return None
