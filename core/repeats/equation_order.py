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
    within: Mapping[int, int] | None = None,
) -> tuple[list[Step], set[int]]:
    """Put steps in an order in which each comes after what it reads.

    Args:
        flow: of the program. Equations with effects keep their order.
        blocks: the loops.
        batched_in: of equations that are batched, the number of the batch.
        skipped: equations that do not run.
        within: of batches that run in a loop, the number of the loop.

    Returns:
        The steps; and, if batches wait for each other, the numbers of these (the steps are of no
        use then).
    """
    begins, waits = _waits(flow, _steps(flow, blocks, batched_in, within or {}), skipped)
    followers = _followers(waits)
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


def following(
    flow: EquationFlow,
    blocks: Sequence[RepeatedBlock],
    batched_in: Mapping[int, int],
    skipped: Collection[int],
    step: Step,
) -> set[Step]:
    """The steps that wait for one, or for a step that does.

    Args:
        flow: of the program.
        blocks: the loops.
        batched_in: of equations that are batched, the number of the batch.
        skipped: equations that do not run.
        step: the one.
    """
    _, waits = _waits(flow, _steps(flow, blocks, batched_in, {}), skipped)
    followers = _followers(waits)
    found: set[Step] = set()
    pending = [step]
    while pending:
        new = [one for one in followers.get(pending.pop(), ()) if one not in found]
        found.update(new)
        pending += new
    return found


def _steps(
    flow: EquationFlow,
    blocks: Sequence[RepeatedBlock],
    batched_in: Mapping[int, int],
    within: Mapping[int, int],
) -> list[Step]:
    steps: list[Step] = []
    for time in range(len(flow.equations)):
        batch = batched_in.get(time)
        if batch is None:
            steps.append(("equation", time))
        else:
            steps.append(("loop", within[batch]) if batch in within else ("batch", batch))
    for number, block in enumerate(blocks):
        steps[block.start : block.stop] = [("loop", number)] * (block.stop - block.start)
    return steps


def _waits(
    flow: EquationFlow, step_of: Sequence[Step], skipped: Collection[int]
) -> tuple[dict[Step, int], dict[Step, set[Step]]]:
    """Where each step begins, and which steps it waits for."""
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
    return begins, waits


def _followers(waits: Mapping[Step, set[Step]]) -> dict[Step, list[Step]]:
    found: dict[Step, list[Step]] = {}
    for step, before in waits.items():
        for one in before:
            found.setdefault(one, []).append(step)
    return found


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
