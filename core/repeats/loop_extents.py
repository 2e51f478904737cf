"""Which iterations of repeated blocks become loops, so that all of them fit together.

A loop that reads another value in each iteration is to find these values in one array: inputs of
the program that are stacked, or what one earlier loop made. So a block of which the first iteration
reads something else starts one later; and if the backward of the first layer differs, the forward
loop leaves that layer out, too: its parameters are then in no stack.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.repeated_block import RepeatedBlock

SMALL = 4096
"""Values up to so many bytes are copied together where no array has them."""

Extent = tuple[int, int]


def small(aval: Any) -> bool:
    """Whether values of a shape and dtype may be copied together."""
    return math.prod(aval.shape) * aval.dtype.itemsize <= SMALL


class LoopExtents:
    """Blocks that are shortened until they fit.

    Args:
        flow: of the program.
        at_least: how many iterations a loop has.
        label: of an input; only inputs with equal labels are stacked.

    Attributes:
        blocks: in order.
        reasons: why a block was left out or shortened.
    """

    def __init__(self, flow: EquationFlow, at_least: int, label: Callable[[int], Hashable]) -> None:
        """Without blocks at first."""
        self._flow = flow
        self._at_least = at_least
        self._label = label
        self.blocks: list[RepeatedBlock] = []
        self.reasons: list[str] = []
        self._iterations: dict[int, tuple[int, int]] | None = None

    def add(self, block: RepeatedBlock) -> None:
        """Add a block behind those before it, as far as it fits them."""
        self.blocks.append(block)
        self._iterations = None
        while self._fit_each() or self._fit_inputs():
            pass

    def iterations(self) -> dict[int, tuple[int, int]]:
        """Of values that blocks make, and inputs that they read, the block and its iteration.

        What one iteration hands on to the next belongs to both, so it is left out.
        """
        if self._iterations is not None:
            return self._iterations
        iterations: dict[int, tuple[int, int]] = {}
        for number, block in enumerate(self.blocks):
            for members in set(block.outside.values()):
                if len(set(members)) == len(members):
                    for iteration, value in enumerate(members):
                        if 0 <= value < self._flow.inputs:
                            iterations.setdefault(value, (number, iteration))
            handed_on = {block.made + slot for slot, _ in block.carried}
            for iteration, first in enumerate(block.firsts.tolist()):
                for made in range(block.made):
                    if made not in handed_on:
                        iterations[first + made] = number, iteration
        self._iterations = iterations
        return iterations

    def _fit_each(self) -> bool:
        for number, block in enumerate(self.blocks):
            begin, end, why = 0, block.count, ""
            for position, members in _families(block):
                first, last = self._extent(number, members)
                if (first > begin or last < end) and last - first < block.count:
                    why = self._described(block, position, members)
                begin, end = max(begin, first), min(end, last)
            if self._restrict(number, begin, end, why):
                return True
        return False

    def _restrict(self, number: int, begin: int, end: int, why: str) -> bool:
        block = self.blocks[number]
        if (begin, end) == (0, block.count):
            return False
        remaining = max(0, end - begin)
        subject = f"{block.count} equal parts of {block.period} equations"
        if remaining < self._at_least:
            self.reasons.append(f"{subject} are no loop: {why}")
            del self.blocks[number]
        else:
            self.reasons.append(
                f"{subject}: {block.count - remaining} of them stay outside of the loop: {why}"
            )
            self.blocks[number] = block.restricted(begin, end)
        return True

    def _described(self, block: RepeatedBlock, position: int, members: tuple[int, ...]) -> str:
        equation = self._flow.equations[block.start + block.places[position]]
        aval = self._flow.aval(members[0])
        return (
            f"an operand of `{equation.primitive.name}`, {aval.str_short()}, is another value in "
            "each, and they are not inputs of one kind nor what one loop makes"
        )

    def _extent(self, number: int, members: tuple[int, ...]) -> Extent:
        """The longest stretch of iterations in which the values can come from one array."""
        if min(members) < 0 or small(self._flow.aval(members[0])):
            return 0, len(members)
        if max(members) < self._flow.inputs:
            labels = [[self._label(member)] for member in members]
            extent = _longest(labels, lambda old, new: old == new)
            return extent if len(set(members[slice(*extent)])) == extent[1] - extent[0] else (0, 0)
        homes = [list(self._homes(number, member)) for member in members]
        begin, end = _longest(
            homes, lambda old, new: old[:2] == new[:2] and abs(old[2] - new[2]) == 1
        )
        if end - begin < 2:
            return 0, 0
        loop = homes[begin + 1][0][0]
        stretch = [{value[2] for value in home if value[0] == loop} for home in homes[begin:end]]
        last = self.blocks[loop].count - 1
        if all(value == {-1} for value in stretch[:1]) and last in stretch[-1]:
            begin += 1
        elif all(value == {-1} for value in stretch[-1:]) and last in stretch[0]:
            end -= 1
        return begin, end

    def _homes(self, number: int, value: int) -> Iterator[tuple[int, int, int]]:
        """Loops before one that make a value: the loop, which value of an iteration, which one.

        What a loop starts from counts as made by the iteration before its first.
        """
        for other, block in enumerate(self.blocks[:number]):
            made = block.iteration_of(value)
            if made is not None:
                yield other, made[1], made[0]
            for carried, first in block.carried:
                if first == value:
                    yield other, block.made + carried, -1

    def _fit_inputs(self) -> bool:
        """Inputs that two blocks read in turn: both read the same of them."""
        families = [
            (number, frozenset(members), members, position)
            for number, block in enumerate(self.blocks)
            for position, members in _families(block)
            if 0 <= min(members) and max(members) < self._flow.inputs
        ]
        readers: dict[int, list[int]] = {}
        for one, (_, names, _, _) in enumerate(families):
            for name in names:
                readers.setdefault(name, []).append(one)
        for number, names, members, position in families:
            others = {one for name in names for one in readers[name]}
            for one in sorted(others):
                other, their, _, _ = families[one]
                if their == names:
                    continue
                block = self.blocks[number]
                equation = self._flow.equations[block.start + block.places[position]]
                why = (
                    f"an input of `{equation.primitive.name}` is read in another iteration "
                    "elsewhere"
                )
                if other == number:
                    return self._restrict(number, 0, 0, why)
                extent = _longest([[one in their] for one in members], lambda old, new: old and new)
                if extent[1] - extent[0] >= self._at_least:
                    if self._restrict(number, *extent, why):
                        return True
                elif block.saved <= self.blocks[other].saved:
                    return self._restrict(number, 0, 0, why)
        return False


def _families(block: RepeatedBlock) -> list[tuple[int, tuple[int, ...]]]:
    """Operands from outside that differ: the first place of each, and its values."""
    families: dict[tuple[int, ...], int] = {}
    for position, members in block.outside.items():
        if len(set(members)) > 1:
            families.setdefault(members, position)
    return [(position, members) for members, position in families.items()]


def _longest(labels: Sequence[Sequence[Any]], follows: Callable[[Any, Any], bool]) -> Extent:
    """The longest stretch in which each element has a label that follows one of the last."""
    best = begin = 0, 1
    for place, (old, new) in enumerate(itertools.pairwise(labels), 1):
        fits = any(follows(value, two) for value in old for two in new)
        begin = (begin[0], place + 1) if fits else (place, place + 1)
        best = max(best, begin, key=lambda value: value[1] - value[0])
    return best
