"""Values of equal role along a new leading axis: what loops read and give.

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

Origin = Literal["input", "made", "carried", "batched", "sliced", "literals", "gathered"]
"""Where an array comes from: it is an input of the program; a loop made its values, or read them as
what it carries; a batched equation made them; they are slices of one value; literals; or values
from elsewhere that are copied together."""


@dataclasses.dataclass(frozen=True, eq=False)
class StackedArray:
    """Values as one array, in the order of its leading axis.

    Attributes:
        members: the values; literals below 0.
        origin: where it comes from.
        owner: the number of the loop or of the batched equation.
        number: of "made" the value of an iteration, of "carried" the slot, of "batched" the result.
    """

    members: tuple[int, ...]
    origin: Origin
    owner: int = -1
    number: int = -1

    @functools.cached_property
    def index(self) -> dict[int, int]:
        """Where each value lies."""
        return {value: index for index, value in enumerate(self.members)}


class StackedValues:
    """All arrays of a program, by their members and by each of them."""

    def __init__(self) -> None:
        """Without arrays at first."""
        self._arrays: dict[tuple[int, ...], StackedArray] = {}
        self._homes: dict[int, list[StackedArray]] = {}
        self.inputs: list[StackedArray] = []

    def add(self, array: StackedArray) -> StackedArray:
        """Add an array; if one with the same members is there, that one is returned."""
        existing = self._arrays.setdefault(array.members, array)
        if existing is array:
            for value in dict.fromkeys(array.members):
                self._homes.setdefault(value, []).append(array)
            if array.origin == "input":
                self.inputs.append(array)
        return existing

    def exactly(self, members: tuple[int, ...]) -> StackedArray | None:
        """The array of these values in this order."""
        return self._arrays.get(members)

    def homes(self, value: int) -> Sequence[StackedArray]:
        """The arrays that a value lies in."""
        return self._homes.get(value, ())

    def find(self, members: tuple[int, ...]) -> tuple[StackedArray, tuple[int, ...]] | None:
        """An array that has these values, in any order, and where.

        Args:
            members: values.
        """
        exact = self._arrays.get(members)
        if exact is not None:
            return exact, tuple(range(len(members)))
        for array in self.homes(members[0]):
            if all(member in array.index for member in members):
                return array, tuple([array.index[member] for member in members])
        return None
