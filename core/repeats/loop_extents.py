"""The iterations of repeated blocks that become loops, chosen so that all loops fit together.

If a loop reads another value in each iteration, these values must be in one array: stacked inputs
of the program, or outputs of one earlier loop. So a block whose first iteration reads something
else starts one later; and if the backward of the first layer differs, the forward loop leaves that
layer out too: its parameters are then in no stack.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from isoshard.core.repeats.equation_flow import EquationFlow, nbytes
from isoshard.core.repeats.repeated_block import RepeatedBlock

SMALL = 4096
"""Bytes up to which values are copied into one array if none has them."""

Extent = tuple[int, int]


def small(aval: Any) -> bool:
    """Whether values of a shape and dtype may be copied into one array."""
    return nbytes(aval) <= SMALL


class LoopExtents:
    """Blocks that are shortened until they fit.

    Args:
        flow: of the program.
        at_least: the fewest iterations of a loop.
        label: of an input; only inputs with equal labels are stacked.

    Attributes:
        blocks: in order.
        reasons: why a block was left out or shortened.
    """

    def __init__(self, flow: EquationFlow, at_least: int, label: Callable[[int], Hashable]) -> None:
        """Start without blocks."""
        self._flow = flow
        self._at_least = at_least
        self._label = label
        self.blocks: list[RepeatedBlock] = []
        self.reasons: list[str] = []
        self._iterations: dict[int, tuple[int, int]] | None = None

    def add(self, block: RepeatedBlock) -> None:
        """Add the iterations of a block that fit the blocks before it."""
        self.blocks.append(block)
        self._iterations = None
        while self._fit_each() or self._fit_inputs():
            pass

    def iterations(self) -> dict[int, tuple[int, int]]:
        """The block and iteration of each value that blocks produce, or input that they read.

        Values carried from one iteration to the next belong to both, so they are left out.
        """
        if self._iterations is not None:
            return self._iterations
        iterations: dict[int, tuple[int, int]] = {}
        for index, block in enumerate(self.blocks):
            for members in set(block.outside.values()):
                if len(set(members)) == len(members):
                    for iteration, value in enumerate(members):
                        if 0 <= value < self._flow.inputs:
                            iterations.setdefault(value, (index, iteration))
            handed_on = {block.output_count + slot for slot, _ in block.carried}
            for iteration, first in enumerate(block.firsts.tolist()):
                for output in range(block.output_count):
                    if output not in handed_on:
                        iterations[first + output] = index, iteration
        self._iterations = iterations
        return iterations

    def _fit_each(self) -> bool:
        for index, block in enumerate(self.blocks):
            begin, end, why = 0, block.count, ""
            for position, members in _families(block):
                first, last = self._extent(index, members)
                if (first > begin or last < end) and last - first < block.count:
                    why = self._described(block, position, members)
                begin, end = max(begin, first), min(end, last)
            if self._restrict(index, begin, end, why):
                return True
        return False

    def _restrict(self, index: int, begin: int, end: int, why: str) -> bool:
        block = self.blocks[index]
        if (begin, end) == (0, block.count):
            return False
        remaining = max(0, end - begin)
        subject = f"{block.count} equal parts of {block.period} equations"
        if remaining < self._at_least:
            self.reasons.append(f"{subject} are no loop: {why}")
            del self.blocks[index]
        else:
            self.reasons.append(
                f"{subject}: {block.count - remaining} of them remain outside of the loop: {why}"
            )
            self.blocks[index] = block.restricted(begin, end)
        return True

    def _described(self, block: RepeatedBlock, position: int, members: tuple[int, ...]) -> str:
        equation = self._flow.equations[block.start + block.equation_of[position]]
        aval = self._flow.aval(members[0])
        return (
            f"an operand of `{equation.primitive.name}`, {aval.str_short()}, is another value in "
            "each, and they are neither inputs of one kind nor outputs of one loop"
        )

    def _extent(self, index: int, members: tuple[int, ...]) -> Extent:
        """The longest range of iterations whose values can come from one array."""
        if min(members) < 0 or small(self._flow.aval(members[0])):
            return 0, len(members)
        if max(members) < self._flow.inputs:
            labels = [[self._label(member)] for member in members]
            extent = _longest(labels, lambda old, new: old == new)
            return extent if len(set(members[slice(*extent)])) == extent[1] - extent[0] else (0, 0)
        producers = [list(self._producers(index, member)) for member in members]
        begin, end = _longest(
            producers, lambda old, new: old[:2] == new[:2] and abs(old[2] - new[2]) == 1
        )
        if end - begin < 2:
            return 0, 0
        loop = producers[begin + 1][0][0]
        stretch = [
            {value[2] for value in home if value[0] == loop} for home in producers[begin:end]
        ]
        last = self.blocks[loop].count - 1
        if all(value == {-1} for value in stretch[:1]) and last in stretch[-1]:
            begin += 1
        elif all(value == {-1} for value in stretch[-1:]) and last in stretch[0]:
            end -= 1
        return begin, end

    def _producers(self, index: int, value: int) -> Iterator[tuple[int, int, int]]:
        """Earlier loops that produce a value: the loop, its output, and the iteration.

        The initial value of a carry counts as produced by iteration -1.
        """
        for other, block in enumerate(self.blocks[:index]):
            produced = block.iteration_of(value)
            if produced is not None:
                yield other, produced[1], produced[0]
            for output, first in block.carried:
                if first == value:
                    yield other, block.output_count + output, -1

    def _fit_inputs(self) -> bool:
        """Restrict blocks that read some of the same inputs, so that they read all of the same."""
        families = [
            (index, frozenset(members), members, position)
            for index, block in enumerate(self.blocks)
            for position, members in _families(block)
            if 0 <= min(members) and max(members) < self._flow.inputs
        ]
        readers: dict[int, list[int]] = {}
        for family, (_, names, _, _) in enumerate(families):
            for name in names:
                readers.setdefault(name, []).append(family)
        for index, names, members, position in families:
            others = {family for name in names for family in readers[name]}
            for family in sorted(others):
                other, other_names, _, _ = families[family]
                if other_names == names:
                    continue
                block = self.blocks[index]
                equation = self._flow.equations[block.start + block.equation_of[position]]
                why = (
                    f"an input of `{equation.primitive.name}` is read in another iteration "
                    "elsewhere"
                )
                if other == index:
                    return self._restrict(index, 0, 0, why)
                extent = _longest(
                    [[family in other_names] for family in members], lambda old, new: old and new
                )
                if extent[1] - extent[0] >= self._at_least:
                    if self._restrict(index, *extent, why):
                        return True
                elif block.saved <= self.blocks[other].saved:
                    return self._restrict(index, 0, 0, why)
        return False


def _families(block: RepeatedBlock) -> list[tuple[int, tuple[int, ...]]]:
    """Operands from outside that differ between iterations: the first position, and the values."""
    families: dict[tuple[int, ...], int] = {}
    for position, members in block.outside.items():
        if len(set(members)) > 1:
            families.setdefault(members, position)
    return [(position, members) for members, position in families.items()]


def _longest(labels: Sequence[Sequence[Any]], follows: Callable[[Any, Any], bool]) -> Extent:
    """The longest range in which each element has a label that follows one of the previous."""
    best = begin = 0, 1
    for position, (old, new) in enumerate(itertools.pairwise(labels), 1):
        fits = any(follows(value, two) for value in old for two in new)
        begin = (begin[0], position + 1) if fits else (position, position + 1)
        best = max(best, begin, key=lambda value: value[1] - value[0])
    return best
