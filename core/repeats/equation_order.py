"""The order in which loops, batched equations and single ones run.

A batched equation stands for equations all over the program, so the old order no longer fits.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.repeated_block import RepeatedBlock

Step = tuple[str, int]
"""("loop", its number), ("batch", its number) or ("equation", its number)."""


class StepOrder:
    """Which steps wait for which.

    Args:
        flow: of the program. Equations with effects keep their order.
        blocks: the loops.
        batched_in: of equations that are batched, the number of the batch.
        skipped: equations that do not run.
        within: of batches that run in a loop, the number of the loop.
    """

    def __init__(
        self,
        flow: EquationFlow,
        blocks: Sequence[RepeatedBlock],
        batched_in: Mapping[int, int],
        skipped: Collection[int] = (),
        within: Mapping[int, int] | None = None,
    ) -> None:
        """Number each step by its first equation."""
        self._steps: dict[int, Step] = {}
        self._step_of = self._numbered(flow, blocks, batched_in, skipped, within or {})
        self._numbers = {step: number for number, step in self._steps.items()}
        self._waits = _waits(flow, self._step_of, self._steps)
        self._followers: dict[int, list[int]] = {}
        for step, before in self._waits.items():
            for one in before:
                self._followers.setdefault(one, []).append(step)

    def _numbered(
        self,
        flow: EquationFlow,
        blocks: Sequence[RepeatedBlock],
        batched_in: Mapping[int, int],
        skipped: Collection[int],
        within: Mapping[int, int],
    ) -> list[int]:
        """The step of each equation; -1 for one that does not run."""
        found = [*range(len(flow.equations))]
        loops: list[list[int]] = [[] for _ in blocks]
        batches: dict[int, list[int]] = {}
        for number, block in enumerate(blocks):
            loops[number] += range(block.start, block.stop)
        inside = {time for times in loops for time in times}
        for time, batch in batched_in.items():
            if time not in inside:
                there = loops[within[batch]] if batch in within else batches.setdefault(batch, [])
                there.append(time)
        for time in skipped:
            found[time] = -1
        several = [(("loop", number), times) for number, times in enumerate(loops)]
        several += [(("batch", number), times) for number, times in batches.items()]
        for step, times in several:
            run = [time for time in times if found[time] >= 0]
            if run:
                first = min(run)
                self._steps[first] = step
                for time in run:
                    found[time] = first
        for time, number in enumerate(found):
            if time == number:
                self._steps.setdefault(number, ("equation", time))
        return found

    def step_of(self, time: int) -> Step:
        """The step that an equation belongs to.

        Args:
            time: of one that runs.
        """
        return self._steps[self._step_of[time]]

    def ordered(self) -> tuple[list[Step], set[int]]:
        """Put steps in an order in which each comes after what it reads.

        Returns:
            The steps; and, if batches wait for each other, the numbers of these (the steps are of
            no use then).
        """
        left = {step: len(before) for step, before in self._waits.items()}
        ready = [step for step, number in left.items() if not number]
        heapq.heapify(ready)
        order: list[Step] = []
        while ready:
            step = heapq.heappop(ready)
            order.append(self._steps[step])
            del left[step]
            for follower in self._followers.get(step, ()):
                left[follower] -= 1
                if not left[follower]:
                    heapq.heappush(ready, follower)
        return order, self._circle(left) if left else set()

    def following(self, step: Step) -> set[Step]:
        """The steps that wait for one, or for a step that does.

        Args:
            step: the one.
        """
        found: set[int] = set()
        pending = [self._numbers[step]]
        while pending:
            new = [one for one in self._followers.get(pending.pop(), ()) if one not in found]
            found.update(new)
            pending += new
        return {self._steps[one] for one in found}

    def _circle(self, left: Mapping[int, int]) -> set[int]:
        """The batches on one circle of steps that wait for each other."""
        path: list[int] = []
        seen: dict[int, int] = {}
        first = functools.partial(min, key=self._steps.__getitem__)
        step = first(left)
        while step not in seen:
            seen[step] = len(path)
            path.append(step)
            step = first([one for one in self._waits[step] if one in left])
        steps = [self._steps[one] for one in path[seen[step] :]]
        return {number for kind, number in steps if kind == "batch"}


def _waits(flow: EquationFlow, step_of: Sequence[int], steps: Iterable[int]) -> dict[int, set[int]]:
    """Which steps each waits for."""
    found: dict[int, set[int]] = {step: set() for step in sorted(steps)}
    numbers = np.array(step_of, dtype=np.int64)
    later, earlier = (numbers[times] for times in flow.reads)
    several = (later >= 0) & (earlier >= 0) & (later != earlier)
    pairs = np.unique(later[several] * len(step_of) + earlier[several])
    for pair in pairs.tolist():
        found[pair // len(step_of)].add(pair % len(step_of))
    last_effect = -1
    for time, step in enumerate(step_of):
        if step >= 0 and flow.equations[time].effects:
            if last_effect not in (-1, step):
                found[step].add(last_effect)
            last_effect = step
    return found
