"""The best choices evaluated as plans, with and without rules for activations.

The cost by kinds assumes that each value is sharded as the choice says. The partitioner propagates
shardings from parameters and batch alone, and may choose another one. So a plan is evaluated as it
is, then with layouts of the outputs of blocks, then of all modules; what says less counts unless
more is faster.

Those that seem fastest are checked as the step is written, as long as they may fit.

A plan is evaluated with equal layers as a loop. With layers written out it may need up to a third
more memory, and XLA's partitioner may find other memory and seconds again. Those checks are few.
Plans of one idea on one mesh change alike, so after one of them was checked the others count with
its changes: those that would not fit are passed over, and the next idea has its turn. If nothing
that may fit is left, what is leanest is checked all the same, of each idea the leanest first.
What was found of several ideas, the least of it, is expected of the others, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.kit import Plan, TracedStep

from ..propagation.factors import ArraySharding
from .analytic_cost import AnalyticCost, Choice
from .beam_search import EACH_RULE, BeamSearch, Scored
from .plan_cost import PlanCost, SearchDepth, by_kinds
from .plan_rules import activation_rules_of, fixed_layouts, input_rules_of, joined, rules_of
from .searched_step import SearchedStep, with_loops


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice that may be the best.

    Attributes:
        scored: it, with its cost by kinds.
        beam: the search over its mesh.
    """

    scored: Scored
    beam: BeamSearch

    @property
    def cost(self) -> AnalyticCost:
        """The cost function of its mesh."""
        return self.beam.cost

    @property
    def kind(self) -> object:
        """What mesh axes split, the same for all that are variants of one idea."""
        return self.beam.kind(self.choice)

    @property
    def mesh(self) -> Mesh:
        """That the choice is over."""
        return self.cost.mesh

    @property
    def choice(self) -> Choice:
        """What is split."""
        return self.scored.choice

    @property
    def key(self) -> tuple[Mesh, Choice]:
        """Equal for equal choices over equal meshes."""
        return self.mesh, self.choice


@dataclasses.dataclass(frozen=True)
class SeenPlan:
    """A candidate as a plan, with its cost.

    Attributes:
        candidate: the choice.
        plan: what says it.
        cost: at the depth that was asked for.
        outputs: layouts of modules' outputs that the plan asks for.
    """

    candidate: Candidate
    plan: Plan
    cost: PlanCost
    outputs: dict[str, NamedSharding]

    @property
    def idea(self) -> str:
        """What each mesh axis splits, in words."""
        return self.candidate.beam.idea(self.candidate.choice)

    @property
    def order(self) -> tuple[bool, float]:
        """Less is better: what fits, then what is fast and short."""
        order = len(self.plan.rules) + len(self.plan.activations)
        order += len(self.candidate.mesh.axis_names)
        return not self.cost.fits, self.cost.seconds * (1 + EACH_RULE * order)


def seen(
    step: SearchedStep,
    candidate: Candidate,
    fixed: Plan | None,
    capacity: int,
    depth: SearchDepth,
) -> SeenPlan:
    """Write a candidate as a plan, and evaluate it."""
    every = {name: one for name, one in _every_output(step, candidate).items() if len(one.spec)}
    blocks = {name: device for name, device in every.items() if _is_block(name, every)}
    if depth == "kinds":
        cost = by_kinds(candidate.scored.cost, candidate.mesh, capacity)
        return SeenPlan(candidate, plan_of(step, candidate, fixed, blocks), cost, blocks)
    layouts = layouts_of_choice(step.written, candidate.cost, candidate.choice)
    result = []
    for outputs in ({}, blocks, every):
        if result and (not outputs or outputs == result[-1].outputs):
            continue
        plan = plan_of(step, candidate, fixed, outputs)
        cost = step.cost(layouts, candidate.mesh, capacity, outputs)
        result.append(SeenPlan(candidate, plan, cost, outputs))
        if cost.fits and cost.seconds < 1.02 * candidate.scored.cost.seconds:
            break
    return min(result, key=lambda one: one.order)


def checked(step: SearchedStep, visited: SeenPlan) -> SeenPlan:
    """The same plan with memory for the step as it is written, too."""
    candidate = visited.candidate
    layouts = layouts_of_choice(step.written, candidate.cost, candidate.choice)
    return dataclasses.replace(
        visited, cost=step.as_written(visited.cost, layouts, candidate.mesh, visited.outputs)
    )


def under_plan(step: SearchedStep, sharding: TracedStep, visited: SeenPlan) -> SeenPlan:
    """The same plan with the cost, and the memory as written, of a step that was traced under it.

    What a plan says of a module's output holds for its gradient, too; a program that was traced
    without the plan has no mark for that.
    """
    loops = step.looped is not step.written
    again = SearchedStep(sharding, with_loops(sharding) if loops else sharding, step.program)
    cost = again.cost({}, sharding.mesh, visited.cost.capacity)
    return dataclasses.replace(visited, cost=again.as_written(cost, {}, sharding.mesh))


def partitioned(step: SearchedStep, visited: SeenPlan) -> SeenPlan:
    """The same plan with the seconds of XLA's partitioner, and no less memory than before."""
    mesh = visited.candidate.mesh
    layouts = layouts_of_choice(step.written, visited.candidate.cost, visited.candidate.choice)
    cost = step.cost(layouts, mesh, visited.cost.capacity, visited.outputs, "partition")
    memory = max(cost.memory, visited.cost.memory)
    return dataclasses.replace(visited, cost=dataclasses.replace(cost, memory=memory))


def layouts_of_choice(
    step: TracedStep, cost: AnalyticCost, choice: Choice
) -> dict[str, NamedSharding]:
    """The layout of each parameter, buffer and array of the batch."""
    of_group = {
        name: _spec(cost.group_layout(index, choice), cost.mesh)
        for index, group in enumerate(cost.program.dimensions.groups)
        for name in group.names
    }
    return {
        leaf.name: NamedSharding(cost.mesh, of_group[leaf.name])
        for leaf in step.inputs
        if leaf.name in of_group
    }


def plan_of(
    step: SearchedStep, candidate: Candidate, fixed: Plan | None, outputs: dict[str, NamedSharding]
) -> Plan:
    """The plan that says what a candidate chose."""
    written, mesh = step.written, candidate.mesh
    layouts = layouts_of_choice(written, candidate.cost, candidate.choice)
    decided = {} if fixed is None or fixed.product else fixed_layouts(fixed, written, mesh)
    model: dict[str, PartitionSpec] = {}
    batch: dict[str, PartitionSpec] = {}
    for leaf in written.inputs:
        if leaf.name in layouts and not leaf.name.startswith("closed_over."):
            if leaf.role == "input":
                batch[leaf.name] = layouts[leaf.name].spec
            elif leaf.name not in decided:
                model[leaf.name] = layouts[leaf.name].spec
    more: dict[str, Any] = {"inputs": input_rules_of(batch)} if batch else {}
    if outputs:
        every = _every_output(step, candidate)
        more["activations"] = activation_rules_of(
            {name: leaf.spec for name, leaf in every.items() if name in outputs or not leaf.spec}
        )
    return joined(fixed, Plan(rules_of(model), **more))


def _every_output(step: SearchedStep, candidate: Candidate) -> dict[str, NamedSharding]:
    mesh = candidate.mesh
    layouts = {
        module: candidate.cost.output_layout(module, candidate.choice)
        for module in dict.fromkeys(step.modules.values())
    }
    return {
        name: NamedSharding(mesh, _spec(layout, mesh))
        for name, module in step.modules.items()
        if (layout := layouts[module]) is not None
    }


def _is_block(name: str, names: dict[str, NamedSharding]) -> bool:
    """Whether no other module that is marked holds this one."""
    is_block = name.split(".")
    return not any(".".join(is_block[:count]) in names for count in range(1, len(is_block)))


def _spec(layout: ArraySharding, mesh: Mesh) -> PartitionSpec:
    entries: list[Any] = []
    for split in layout:
        names = tuple(mesh.axis_names[axis] for axis in split)
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


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

    def told(self, visited: SeenPlan) -> SeenPlan:
        """A plan as it was checked, or with the changes that are expected after other checks."""
        if visited.candidate.key in self._done:
            return self._done[visited.candidate.key]
        idea = _idea(visited)
        if visited.cost.depth == "kinds":
            return visited
        memory = int(visited.cost.memory * _expected(self._grown, idea, GROWN))
        seconds = visited.cost.seconds * _expected(self._slowed, idea, SLOWED)
        return dataclasses.replace(
            visited, cost=dataclasses.replace(visited.cost, memory=memory, seconds=seconds)
        )

    def settled(self, result: Sequence[SeenPlan], target: int, leanest: bool) -> list[SeenPlan]:
        """Check plans until so many fit to which no other one is preferred.

        Args:
            result: all plans that were looked at.
            target: how many, each the best of its idea.
            leanest: whether what is not expected to fit is checked, too, if nothing else fits.

        Returns:
            All plans, best first; those that were not looked at closely last. If none that was
            checked fits, one that does not fit is the first.
        """
        before, fitted = len(self._done), 0
        while len(self._done) < before + CHECKED and fitted < FITTING:
            best = self._next(result, target, leanest)
            if best is None:
                break
            checked = self._written(best)
            if self._last and checked.cost.fits:
                checked = self._last(checked)
            self._learn(best, checked)
            fitted += checked.cost.fits
        fitting = sorted(self._fitting(result), key=_order)[:target]
        first = {one.candidate.key for one in fitting}
        others = [self.told(one) for one in result if one.candidate.key not in first]

        def order(visited: SeenPlan) -> tuple[object, ...]:
            """What only may fit does not come first."""
            return not fitting and visited.candidate.key not in self._done, _order(visited)

        return [*fitting, *sorted(others, key=order)]

    def _learn(self, visited: SeenPlan, checked: SeenPlan) -> None:
        idea = _idea(visited)
        self._done[visited.candidate.key] = checked
        grown = checked.cost.memory / visited.cost.memory
        self._grown[idea] = min(grown, self._grown.get(idea, grown))
        if checked.cost.fits:
            slowed = checked.cost.seconds / visited.cost.seconds
            self._slowed[idea] = min(slowed, self._slowed.get(idea, slowed))

    def _next(self, result: Sequence[SeenPlan], target: int, leanest: bool) -> SeenPlan | None:
        """The plan to check next; None: it is settled."""
        left = {
            one.candidate.key: one
            for one in result
            if one.candidate.key not in self._done and one.cost.depth != "kinds" and one.cost.fits
        }
        fitting = self._fitting(result)
        expected = [self.told(one) for one in left.values()]
        hopeful = [word for word in expected if word.cost.fits and not _follows(word, fitting)]
        if hopeful:
            best = min(hopeful, key=_order)
            ahead = sum(_order(one) <= _order(best) for one in fitting)
            return left[best.candidate.key] if ahead < target else None
        doubtful = [word for word in expected if word.cost.memory <= DOUBT * word.cost.capacity]
        if doubtful and leanest and not fitting:
            best = min(doubtful, key=lambda one: (_idea(one) in self._grown, one.cost.memory))
            return left[best.candidate.key]
        return None

    def _fitting(self, result: Sequence[SeenPlan]) -> list[SeenPlan]:
        """What was checked and fits."""
        done = (self._done[key] for one in result if (key := one.candidate.key) in self._done)
        return [op for op in done if op.cost.fits]


def _expected(changes: Mapping[object, float], idea: object, several: int) -> float:
    """How a plan of an idea changes: as others of it, or at least as those of several ideas.

    What made a plan of one idea better may make all better: so that none is passed over.
    """
    least = min(changes.values(), default=1.0)
    return changes.get(idea, least if len(changes) >= several else min(1.0, least))


def _idea(visited: SeenPlan) -> object:
    return visited.candidate.mesh, visited.candidate.kind


def _follows(visited: SeenPlan, others: Sequence[SeenPlan]) -> bool:
    """Whether another plan of its idea is preferred to it."""
    return any(
        _idea(other) == _idea(visited) and _order(other) <= _order(visited) for other in others
    )


def _order(visited: SeenPlan) -> tuple[object, ...]:
    return visited.cost.depth == "kinds", *visited.order
