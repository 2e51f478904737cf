"""Which plans are checked as the step is written: those that seem fastest, as long as they may fit.

A plan is looked at with equal layers as a loop. With layers written out it may need up to a third
more memory, and XLA's partitioner may find other memory and seconds again. Those checks are few.
Plans of one idea on one mesh change alike, so after one of them was checked the others count with
its changes: those that would not fit are passed over, and the next idea has its turn. If nothing
that may fit is left, what is leanest is checked all the same, of each idea the leanest first.
What was found of several ideas, the least of it, is expected of the others, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from .close_look import SeenPlan

FITTING = 4
"""So many plans that fit are checked at most at once, until the best one was."""
CHECKED = 6
"""So many plans are checked at most at once, those that do not fit, too."""
SLOWED, GROWN = 2, 4
"""After checks of so many ideas the others are expected to be slower, and to grow, as the least."""
DOUBT = 1.1
"""What is expected to need more than this times a device's memory is not checked."""


class PlanChecks:
    """What the checks of a search have found.

    Args:
        written: checks the memory of a plan with layers written out.
        last: what has the last word on a plan that fits so; by default nothing has.
    """

    def __init__(
        self,
        written: Callable[[SeenPlan], SeenPlan],
        last: Callable[[SeenPlan], SeenPlan] | None = None,
    ) -> None:
        """Nothing is checked yet."""
        self._written = written
        self._last = last
        self._done: dict[object, SeenPlan] = {}
        self._grown: dict[object, float] = {}
        self._slowed: dict[object, float] = {}

    def told(self, one: SeenPlan) -> SeenPlan:
        """A plan as it was checked, or with the changes that are expected after other checks.

        Args:
            one: a plan that was looked at.
        """
        if one.candidate.key in self._done:
            return self._done[one.candidate.key]
        idea = _idea(one)
        if one.cost.depth == "kinds":
            return one
        memory = int(one.cost.memory * _expected(self._grown, idea, GROWN))
        seconds = one.cost.seconds * _expected(self._slowed, idea, SLOWED)
        return dataclasses.replace(
            one, cost=dataclasses.replace(one.cost, memory=memory, seconds=seconds)
        )

    def settled(self, found: Sequence[SeenPlan], wanted: int, leanest: bool) -> list[SeenPlan]:
        """Check plans until so many fit to which no other one is preferred.

        Args:
            found: all plans that were looked at.
            wanted: how many, each the best of its idea.
            leanest: whether what is not expected to fit is checked, too, if nothing else fits.

        Returns:
            All plans, best first; those that were not looked at closely last. If none that was
            checked fits, one that does not fit is the first.
        """
        before, fitted = len(self._done), 0
        while len(self._done) < before + CHECKED and fitted < FITTING:
            best = self._next(found, wanted, leanest)
            if best is None:
                break
            checked = self._written(best)
            if self._last and checked.cost.fits:
                checked = self._last(checked)
            self._learn(best, checked)
            fitted += checked.cost.fits
        fitting = sorted(self._fitting(found), key=_order)[:wanted]
        first = {one.candidate.key for one in fitting}
        others = [self.told(one) for one in found if one.candidate.key not in first]

        def order(one: SeenPlan) -> tuple[object, ...]:
            """What only may fit does not come first."""
            return not fitting and one.candidate.key not in self._done, _order(one)

        return [*fitting, *sorted(others, key=order)]

    def _learn(self, seen: SeenPlan, checked: SeenPlan) -> None:
        idea = _idea(seen)
        self._done[seen.candidate.key] = checked
        grown = checked.cost.memory / seen.cost.memory
        self._grown[idea] = min(grown, self._grown.get(idea, grown))
        if checked.cost.fits:
            slowed = checked.cost.seconds / seen.cost.seconds
            self._slowed[idea] = min(slowed, self._slowed.get(idea, slowed))

    def _next(self, found: Sequence[SeenPlan], wanted: int, leanest: bool) -> SeenPlan | None:
        """The plan to check next; None: it is settled."""
        left = {
            one.candidate.key: one
            for one in found
            if one.candidate.key not in self._done and one.cost.depth != "kinds" and one.cost.fits
        }
        fitting = self._fitting(found)
        told = [self.told(one) for one in left.values()]
        hopeful = [one for one in told if one.cost.fits and not _follows(one, fitting)]
        if hopeful:
            best = min(hopeful, key=_order)
            ahead = sum(_order(one) <= _order(best) for one in fitting)
            return left[best.candidate.key] if ahead < wanted else None
        doubtful = [one for one in told if one.cost.memory <= DOUBT * one.cost.capacity]
        if doubtful and leanest and not fitting:
            best = min(doubtful, key=lambda one: (_idea(one) in self._grown, one.cost.memory))
            return left[best.candidate.key]
        return None

    def _fitting(self, found: Sequence[SeenPlan]) -> list[SeenPlan]:
        """What was checked and fits."""
        done = (self._done[key] for one in found if (key := one.candidate.key) in self._done)
        return [one for one in done if one.cost.fits]


def _expected(changes: Mapping[object, float], idea: object, several: int) -> float:
    """How a plan of an idea changes: as others of it, or at least as those of several ideas.

    What made a plan of one idea better may make all better: so that none is passed over.
    """
    least = min(changes.values(), default=1.0)
    return changes.get(idea, least if len(changes) >= several else min(1.0, least))


def _idea(one: SeenPlan) -> object:
    return one.candidate.mesh, one.candidate.kind


def _follows(one: SeenPlan, others: Sequence[SeenPlan]) -> bool:
    """Whether another plan of its idea is preferred to it."""
    return any(_idea(other) == _idea(one) and _order(other) <= _order(one) for other in others)


def _order(one: SeenPlan) -> tuple[object, ...]:
    return one.cost.depth == "kinds", *one.order
