"""The arrays that a loop reads and outputs.

Loops are planned in the order of the program. The first loop that reads some inputs decides the
order of their stack; a later loop of the opposite direction runs in reverse, so that its outputs
have the same order.
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
        equation: that of the earlier loop's first iteration.
        operands: the values of all iterations, or a single loop-invariant value or literal.
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
        reverse: the last element of arrays is that of the first iteration.
        reads: arrays by the values of their elements, in the order of the leading axis, with the
            rows that have these; None: all, in order.
        sliced: equations of an iteration that do not run, and the array from which their results
            are read: slices of one value at different positions, and outputs of an earlier loop.
        repeated: equations of earlier loops that this one recomputes.
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
    loop: int,
    block: RepeatedBlock,
    stacks: StackedValues,
    label: Callable[[int], Hashable],
) -> LoopPlan:
    """Choose the arrays that a loop reads, and add its arrays to the stacks.

    Args:
        flow: of the program.
        loop: index of the loop.
        block: its iterations.
        stacks: the arrays so far.
        label: of an input; only inputs with equal labels are stacked.
    """
    families = dict.fromkeys(family for family in block.outside.values() if len(set(family)) > 1)
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
        output = flow.outputs[block.start + equation][0] - int(block.firsts[0])
        values = plan.in_order(block.values_of(output))
        plan.sliced[equation] = stacks.add(StackedArray(values, "sliced", loop, equation))
    for output in range(block.output_count):
        stacks.add(StackedArray(plan.in_order(block.values_of(output)), "output", loop, output))
    for slot, (output, first) in enumerate(block.carried):
        values = first, *block.values_of(block.output_count + output)[:-1]
        stacks.add(StackedArray(plan.in_order(values), "carried", loop, slot))
    return plan


def stackable(
    flow: EquationFlow,
    values: tuple[int, ...],
    stacks: StackedValues,
    label: Callable[[int], Hashable],
) -> bool:
    """Whether values are inputs that can be stacked.

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
        and len({label(value) for value in values}) == 1
        and len({(flow.avals[value].shape, flow.avals[value].dtype) for value in values}) == 1
        and not any(
            array.origin == "input" for value in values for array in stacks.containing(value)
        )
    )


def _backwards(families: dict[tuple[int, ...], None], stacks: StackedValues) -> bool:
    """Whether most of the arrays read are in the opposite order."""
    votes = 0
    for family in families:
        find = stacks.find(family)
        if find is not None and find[0].origin != "literals":
            votes += 1 if find[1][0] < find[1][-1] else -1
    return votes < 0


def _sliced(flow: EquationFlow, block: RepeatedBlock) -> list[int]:
    """Equations of an iteration that slice a value from outside at different positions."""
    return [
        block.equation_of[position]
        for position, values in block.outside.items()
        if flow.equations[block.start + block.equation_of[position]].primitive.name == "slice"
        and len(set(values)) == 1
        and len(slice_positions(flow, block, block.equation_of[position])) > 1
    ]


def slice_positions(
    flow: EquationFlow, block: RepeatedBlock, equation: int
) -> set[tuple[int, ...]]:
    """The start indices of a slice in all iterations."""
    times = range(block.start + equation, block.stop, block.period)
    return {tuple(flow.equations[time].params["start_indices"]) for time in times}
