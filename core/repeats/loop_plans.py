"""What a loop reads from which array, and what it gives.

Loops are planned in the order of the program. The first one that reads some inputs decides the
order of their stack; a later one that goes the other way runs in reverse, so that what it makes
lies in the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.repeated_block import RepeatedBlock
from isoshard.core.repeats.stacked_values import StackedArray, StackedValues


@dataclasses.dataclass(frozen=True)
class RecomputedEquation:
    """An equation of an earlier loop that a later one repeats.

    Values of all iterations are in the order of arrays.

    Attributes:
        equation: the one of the first iteration of the earlier loop.
        operands: the values of all iterations, or one value or literal that does not change.
        results: the values of all iterations of each result.
    """

    equation: int
    operands: tuple[int | tuple[int, ...], ...]
    results: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True, eq=False)
class LoopPlan:
    """A block as a loop.

    Attributes:
        block: its iterations.
        reverse: the last element of arrays is the one of the first iteration.
        reads: arrays by the values of their elements, in the order of the leading axis, and where
            in the array they are; None: all, in order.
        sliced: equations of an iteration that do not run, and the array that their results are
            read from: slices at different positions of one value, and what an earlier loop has.
        repeated: equations of loops before it that it computes again.
    """

    block: RepeatedBlock
    reverse: bool
    reads: dict[tuple[int, ...], tuple[StackedArray, tuple[int, ...] | None]]
    sliced: dict[int, StackedArray]
    repeated: tuple[RecomputedEquation, ...] = ()

    def in_order(self, values: tuple[int, ...]) -> tuple[int, ...]:
        """Values of iterations in the order of arrays."""
        return values[::-1] if self.reverse else values


def planned(
    flow: EquationFlow,
    number: int,
    block: RepeatedBlock,
    stacks: StackedValues,
    label: Callable[[int], Hashable],
) -> LoopPlan:
    """Decide what a loop reads; its arrays are added to the stacks.

    Args:
        flow: of the program.
        number: of the loop.
        block: its iterations.
        stacks: the arrays so far.
        label: of an input; only inputs with equal labels are stacked.
    """
    families = dict.fromkeys(one for one in block.outside.values() if len(set(one)) > 1)
    plan = LoopPlan(block, _backwards(families, stacks), {}, {})
    for family in families:
        values = plan.in_order(family)
        find = stacks.find(values)
        if find is not None:
            everything = find[1] == tuple(range(len(find[0].members)))
            plan.reads[values] = find[0], None if everything else find[1]
            continue
        if max(values) < 0:
            if flow.same_literals(values):
                continue
            array = StackedArray(values, "literals")
        elif stackable(flow, values, stacks, label):
            array = StackedArray(values, "input")
        else:
            array = StackedArray(values, "gathered")
        plan.reads[values] = stacks.add(array), None
    for equation in _sliced(flow, block):
        index = flow.outputs[block.start + equation][0] - int(block.firsts[0])
        values = plan.in_order(block.made_as(index))
        plan.sliced[equation] = stacks.add(StackedArray(values, "sliced", number, equation))
    for index in range(block.made):
        stacks.add(StackedArray(plan.in_order(block.made_as(index)), "made", number, index))
    for slot, ((carried, first), _) in enumerate(block.carried.items()):
        values = first, *block.made_as(block.made + carried)[:-1]
        stacks.add(StackedArray(plan.in_order(values), "carried", number, slot))
    return plan


def stackable(
    flow: EquationFlow,
    values: tuple[int, ...],
    stacks: StackedValues,
    label: Callable[[int], Hashable],
) -> bool:
    """Whether values are inputs that can be one stack.

    Args:
        flow: of the program.
        values: in order.
        stacks: the arrays so far.
        label: of an input.
    """
    return (
        min(values) >= 0
        and max(values) < flow.inputs
        and len(set(values)) == len(values)
        and len({label(one) for one in values}) == 1
        and len({(flow.avals[one].shape, flow.avals[one].dtype) for one in values}) == 1
        and not any(one.origin == "input" for value in values for one in stacks.homes(value))
    )


def _backwards(families: dict[tuple[int, ...], None], stacks: StackedValues) -> bool:
    """Whether most of what is read lies in the opposite order."""
    votes = 0
    for family in families:
        find = stacks.find(family)
        if find is not None and find[0].origin != "literals":
            votes += 1 if find[1][0] < find[1][-1] else -1
    return votes < 0


def _sliced(flow: EquationFlow, block: RepeatedBlock) -> list[int]:
    """Equations of an iteration that slice a value from outside at different positions."""
    return [
        block.places[position]
        for position, values in block.outside.items()
        if flow.equations[block.start + block.places[position]].primitive.name == "slice"
        and len(set(values)) == 1
        and len(slice_positions(flow, block, block.places[position])) > 1
    ]


def slice_positions(
    flow: EquationFlow, block: RepeatedBlock, equation: int
) -> set[tuple[int, ...]]:
    """Where a slice begins, in all iterations."""
    times = range(block.start + equation, block.stop, block.period)
    return {tuple(flow.equations[time].params["start_indices"]) for time in times}
