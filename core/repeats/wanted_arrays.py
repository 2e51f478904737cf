"""What the loops of a program give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.loop_plans import LoopPlan
from isoshard.core.repeats.side_by_side import SideBySide
from isoshard.core.repeats.stacked_values import StackedArray, StackedValues
from isoshard.core.repeats.updates_in_loops import LoopUpdates


def wanted_arrays(
    flow: EquationFlow,
    plans: Sequence[LoopPlan],
    side: SideBySide,
    stacks: StackedValues,
    results: Sequence[int | StackedArray],
    skipped: set[int],
    within: Mapping[int, LoopUpdates],
) -> set[StackedArray]:
    """Arrays that loops are to give: all that others read of them."""
    arrays = {value for value in results if isinstance(value, StackedArray)}
    values = {value for value in results if isinstance(value, int)}
    inside = {*side.batched_in, *skipped}
    for plan in plans:
        block = plan.block
        inside.update(range(block.start, block.stop))
        arrays.update(array for array, _ in plan.reads.values())
        arrays.update(array for array in plan.sliced.values() if array.origin == "made")
        values.update(first for _, first in block.carried)
        values.update(value[0] for value in block.outside.values() if len(set(value)) == 1)
    loop_of = {batch: loop for loop, value in within.items() for batch in value.batches}
    for index, batch in enumerate(side.batches):
        read = [operand for operand in batch.operands if isinstance(operand, StackedArray)]
        arrays.update(value for value in read if not _stays_in(value, loop_of.get(index), loop_of))
        values.update(operand for operand in batch.operands if isinstance(operand, int))
        if batch.sliced:
            values.update(flow.operands[batch.equations[0]])
    for time, operands in enumerate(flow.operands):
        if time not in inside:
            values.update(operands)
    for array in list(arrays):
        if array.origin == "gathered":
            values.update(array.members)
    lasts = {
        int(plan.block.firsts[-1]) + plan.block.made + carried
        for plan in plans
        for carried, _ in plan.block.carried
    }
    for value in sorted(values - lasts):
        if value < 0 or flow.made_by[value] not in inside:
            continue
        homes = [value for value in stacks.homes(value) if value.origin != "gathered"]
        if homes and not any(value in arrays for value in homes):
            arrays.add(homes[0])
    return arrays


def _stays_in(array: StackedArray, loop: int | None, loop_of: Mapping[int, int]) -> bool:
    """Whether rows of an array are made and read in the same iteration of a loop."""
    if loop is None or array.origin not in ("made", "batched"):
        return False
    return (array.owner if array.origin == "made" else loop_of.get(array.owner)) == loop
