"""The order in which loops, batched equations and single equations run.

A batched equation replaces equations all over the program, so their order changes.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from isoshard.core.repeats.equation_flow import EquationFlow
from isoshard.core.repeats.repeated_block import RepeatedBlock

Step = tuple[str, int]
"""A kind, "loop", "batch" or "equation", with an index of that kind."""


class StepOrder:
    """The dependencies between steps.

    Args:
        flow: of the program. Equations with effects keep their order.
        blocks: the loops.
        batched_in: the batch of each batched equation.
        skipped: equations that do not run.
        within: the loop of each batch that runs in one.
    """

    def __init__(
        self,
        flow: EquationFlow,
        blocks: Sequence[RepeatedBlock],
        batched_in: Mapping[int, int],
        skipped: Collection[int] = (),
        within: Mapping[int, int] | None = None,
    ) -> None:
        """Identify each step by its first equation."""
        self._steps: dict[int, Step] = {}
        self._step_of = self._numbered(flow, blocks, batched_in, skipped, within or {})
        self._numbers = {step: index for index, step in self._steps.items()}
        self._waits = _waits(flow, self._step_of, self._steps)
        self._followers: dict[int, list[int]] = {}
        for step, before in self._waits.items():
            for value in before:
                self._followers.setdefault(value, []).append(step)

    def _numbered(
        self,
        flow: EquationFlow,
        blocks: Sequence[RepeatedBlock],
        batched_in: Mapping[int, int],
        skipped: Collection[int],
        within: Mapping[int, int],
    ) -> list[int]:
        """The step of each equation; -1 for one that does not run."""
        numbered = [*range(len(flow.equations))]
        loops: list[list[int]] = [[] for _ in blocks]
        batches: dict[int, list[int]] = {}
        for index, block in enumerate(blocks):
            loops[index] += range(block.start, block.stop)
        inside = {time for times in loops for time in times}
        for time, batch in batched_in.items():
            if time not in inside:
                times = loops[within[batch]] if batch in within else batches.setdefault(batch, [])
                times.append(time)
        for time in skipped:
            numbered[time] = -1
        several = [(("loop", index), times) for index, times in enumerate(loops)]
        several += [(("batch", index), times) for index, times in batches.items()]
        for step, times in several:
            run = [time for time in times if numbered[time] >= 0]
            if run:
                first = min(run)
                self._steps[first] = step
                for time in run:
                    numbered[time] = first
        for time, index in enumerate(numbered):
            if time == index:
                self._steps.setdefault(index, ("equation", time))
        return numbered

    def step_of(self, time: int) -> Step:
        """The step that an equation belongs to."""
        return self._steps[self._step_of[time]]

    def ordered(self) -> tuple[list[Step], set[int]]:
        """Order the steps topologically.

        Returns:
            The steps; and the batches of a cycle, if there is one (the steps are incomplete then).
        """
        left = {step: len(before) for step, before in self._waits.items()}
        ready = [step for step, index in left.items() if not index]
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
        return order, self._cycle(left) if left else set()

    def following(self, step: Step) -> set[Step]:
        """The steps that depend on a step, directly or not."""
        following: set[int] = set()
        pending = [self._numbers[step]]
        while pending:
            new = [
                value for value in self._followers.get(pending.pop(), ()) if value not in following
            ]
            following.update(new)
            pending += new
        return {self._steps[value] for value in following}

    def _cycle(self, left: Mapping[int, int]) -> set[int]:
        """The batches of a cycle of steps that depend on each other."""
        path: list[int] = []
        visited: dict[int, int] = {}
        first = functools.partial(min, key=self._steps.__getitem__)
        step = first(left)
        while step not in visited:
            visited[step] = len(path)
            path.append(step)
            step = first([value for value in self._waits[step] if value in left])
        steps = [self._steps[value] for value in path[visited[step] :]]
        return {index for kind, index in steps if kind == "batch"}


def _waits(flow: EquationFlow, step_of: Sequence[int], steps: Iterable[int]) -> dict[int, set[int]]:
    """The steps that each step depends on directly."""
    waits: dict[int, set[int]] = {step: set() for step in sorted(steps)}
    indices = np.array(step_of, dtype=np.int64)
    later, earlier = (indices[times] for times in flow.reads)
    several = (later >= 0) & (earlier >= 0) & (later != earlier)
    pairs = np.unique(later[several] * len(step_of) + earlier[several])
    for pair in pairs.tolist():
        waits[pair // len(step_of)].add(pair % len(step_of))
    last_effect = -1
    for time, step in enumerate(step_of):
        if step >= 0 and flow.equations[time].effects:
            if last_effect not in (-1, step):
                waits[step].add(last_effect)
            last_effect = step
    return waits
