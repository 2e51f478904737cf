"""The order in which loops, batched equations and single ones run.

A batched equation stands for equations all over the program, so the old order no longer fits.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.repeated_block import RepeatedBlock

Step = tuple[str, int]
"""("loop", its number), ("batch", its number) or ("equation", its number)."""


def ordered(
    flow: EquationFlow,
    blocks: Sequence[RepeatedBlock],
    batched_in: Mapping[int, int],
    skipped: Collection[int] = (),
) -> tuple[list[Step], set[int]]:
    """Put steps in an order in which each comes after what it reads.

    Args:
        flow: of the program. Equations with effects keep their order.
        blocks: the loops.
        batched_in: of equations that are batched, the number of the batch.
        skipped: equations that do not run.

    Returns:
        The steps; and, if batches wait for each other, the numbers of these (the steps are of no
        use then).
    """
    step_of = _steps(flow, blocks, batched_in)
    begins: dict[Step, int] = {}
    waits: dict[Step, set[Step]] = {}
    last_effect: Step | None = None
    for time, step in enumerate(step_of):
        if time in skipped:
            continue
        begins.setdefault(step, time)
        before = waits.setdefault(step, set())
        for operand in flow.operands[time]:
            if operand >= 0 and flow.made_by[operand] >= 0:
                before.add(step_of[flow.made_by[operand]])
        if flow.equations[time].effects:
            if last_effect is not None:
                before.add(last_effect)
            last_effect = step
        before.discard(step)
    followers: dict[Step, list[Step]] = {}
    for step, before in waits.items():
        for one in before:
            followers.setdefault(one, []).append(step)
    left = {step: len(before) for step, before in waits.items()}
    ready = [(begins[step], step) for step, number in left.items() if not number]
    heapq.heapify(ready)
    order: list[Step] = []
    while ready:
        _, step = heapq.heappop(ready)
        order.append(step)
        del left[step]
        for follower in followers.get(step, ()):
            left[follower] -= 1
            if not left[follower]:
                heapq.heappush(ready, (begins[follower], follower))
    return order, _circle(waits, left) if left else set()


def _steps(
    flow: EquationFlow, blocks: Sequence[RepeatedBlock], batched_in: Mapping[int, int]
) -> list[Step]:
    steps: list[Step] = [
        ("batch", batched_in[time]) if time in batched_in else ("equation", time)
        for time in range(len(flow.equations))
    ]
    for number, block in enumerate(blocks):
        steps[block.start : block.stop] = [("loop", number)] * (block.stop - block.start)
    return steps


def _circle(waits: Mapping[Step, set[Step]], left: Mapping[Step, int]) -> set[int]:
    """The batches on one circle of steps that wait for each other."""
    path: list[Step] = []
    seen: dict[Step, int] = {}
    step = min(left)
    while step not in seen:
        seen[step] = len(path)
        path.append(step)
        step = min(one for one in waits[step] if one in left)
    return {number for kind, number in path[seen[step] :] if kind == "batch"}
