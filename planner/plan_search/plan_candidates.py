"""The best choices evaluated as plans, with and without rules for activations.

The cost by kinds assumes that each value is sharded as in the choice. The partitioner propagates
shardings from parameters and batch alone, and may choose another one. So a plan is evaluated
without activation rules, then with rules for the outputs of blocks, then of all modules; the
shorter plan wins unless a longer one is faster.

A plan is evaluated with equal layers as a loop. With layers written out it may need up to a third
more memory, and XLA's partitioner may report other memory and seconds again. So the plans that
seem fastest are checked as the step is written. Those checks are few: plans of one idea on one
mesh change by similar factors, so after one of them was checked the others are corrected by its
factors. Plans that then would not fit are skipped, and the next idea is checked. If none may fit,
the plans with least memory are checked anyway, one of each idea first. The least factors of
several ideas correct the plans of all others.
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
        scored: the choice, with its cost by kinds.
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
        """What mesh axes split, the same for all variants of one idea."""
        return self.beam.kind(self.choice)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the choice."""
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
class EvaluatedPlan:
    """A candidate as a plan, with its cost.

    Attributes:
        candidate: the choice.
        plan: the choice as rules.
        cost: at the requested depth.
        outputs: shardings of modules' outputs by the plan's activation rules.
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
        """The order of plans, the best first: those that fit, then fast and short ones."""
        order = len(self.plan.rules) + len(self.plan.activations)
        order += len(self.candidate.mesh.axis_names)
        return not self.cost.fits, self.cost.seconds * (1 + EACH_RULE * order)


def evaluate(
    step: SearchedStep,
    candidate: Candidate,
    fixed: Plan | None,
    capacity: int,
    depth: SearchDepth,
) -> EvaluatedPlan:
    """Express a candidate as a plan, and evaluate it."""
    every = {
        name: layout for name, layout in _every_output(step, candidate).items() if len(layout.spec)
    }
    blocks = {name: layout for name, layout in every.items() if _is_block(name, every)}
    if depth == "kinds":
        cost = by_kinds(candidate.scored.cost, candidate.mesh, capacity)
        return EvaluatedPlan(candidate, plan_of(step, candidate, fixed, blocks), cost, blocks)
    layouts = layouts_of_choice(step.written, candidate.cost, candidate.choice)
    variants = []
    for outputs in ({}, blocks, every):
        if variants and (not outputs or outputs == variants[-1].outputs):
            continue
        plan = plan_of(step, candidate, fixed, outputs)
        cost = step.cost(layouts, candidate.mesh, capacity, outputs)
        variants.append(EvaluatedPlan(candidate, plan, cost, outputs))
        if cost.fits and cost.seconds < 1.02 * candidate.scored.cost.seconds:
            break
    return min(variants, key=lambda variant: variant.order)


def checked(step: SearchedStep, evaluated: EvaluatedPlan) -> EvaluatedPlan:
    """The plan with its memory for the step as it is written, too."""
    candidate = evaluated.candidate
    layouts = layouts_of_choice(step.written, candidate.cost, candidate.choice)
    return dataclasses.replace(
        evaluated, cost=step.as_written(evaluated.cost, layouts, candidate.mesh, evaluated.outputs)
    )


def under_plan(step: SearchedStep, planned: TracedStep, evaluated: EvaluatedPlan) -> EvaluatedPlan:
    """The plan with the cost, and the memory as written, of a step that was traced under it.

    A plan's rule for a module's output applies to its gradient, too; a program that was traced
    without the plan has no mark for that.
    """
    loops = step.looped is not step.written
    again = SearchedStep(planned, with_loops(planned) if loops else planned, step.program)
    cost = again.cost({}, planned.mesh, evaluated.cost.capacity)
    return dataclasses.replace(evaluated, cost=again.as_written(cost, {}, planned.mesh))


def partitioned(step: SearchedStep, evaluated: EvaluatedPlan) -> EvaluatedPlan:
    """The plan with the seconds of XLA's partitioner, and no less memory than before."""
    mesh = evaluated.candidate.mesh
    layouts = layouts_of_choice(step.written, evaluated.candidate.cost, evaluated.candidate.choice)
    cost = step.cost(layouts, mesh, evaluated.cost.capacity, evaluated.outputs, "partition")
    memory = max(cost.memory, evaluated.cost.memory)
    return dataclasses.replace(evaluated, cost=dataclasses.replace(cost, memory=memory))


def layouts_of_choice(
    step: TracedStep, cost: AnalyticCost, choice: Choice
) -> dict[str, NamedSharding]:
    """The sharding of each parameter, buffer and array of the batch."""
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
    """A candidate's choice as the rules of a plan."""
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
    """Whether a module is inside of no other marked module."""
    segments = name.split(".")
    return not any(".".join(segments[:count]) in names for count in range(1, len(segments)))


def _spec(layout: ArraySharding, mesh: Mesh) -> PartitionSpec:
    entries: list[Any] = []
    for split in layout:
        names = tuple(mesh.axis_names[axis] for axis in split)
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


FITTING = 4
"""At most so many plans that fit are checked in one round."""
CHECKED = 6
"""At most so many plans are checked in one round, fitting or not."""
SLOWED, GROWN = 2, 4
"""After checks of so many ideas, their least factor of seconds, and of memory, corrects all."""
DOUBT = 1.1
"""A plan that is expected to need more than this times a device's memory is not checked."""


class PlanChecks:
    """The checks of a search: plans evaluated again, more exactly.

    Args:
        written: checks the memory of a plan with layers written out.
        last: evaluates a plan that fits so once more; by default nothing does.
    """

    def __init__(
        self,
        written: Callable[[EvaluatedPlan], EvaluatedPlan],
        last: Callable[[EvaluatedPlan], EvaluatedPlan] | None = None,
    ) -> None:
        """Nothing is checked yet."""
        self._written = written
        self._final = last
        self._checked: dict[object, EvaluatedPlan] = {}
        self._grown: dict[object, float] = {}
        self._slowed: dict[object, float] = {}

    def corrected(self, evaluated: EvaluatedPlan) -> EvaluatedPlan:
        """A plan as it was checked, or corrected by the factors of other checks."""
        if evaluated.candidate.key in self._checked:
            return self._checked[evaluated.candidate.key]
        idea = _idea(evaluated)
        if evaluated.cost.depth == "kinds":
            return evaluated
        memory = int(evaluated.cost.memory * _expected(self._grown, idea, GROWN))
        seconds = evaluated.cost.seconds * _expected(self._slowed, idea, SLOWED)
        return dataclasses.replace(
            evaluated, cost=dataclasses.replace(evaluated.cost, memory=memory, seconds=seconds)
        )

    def settled(
        self, plans: Sequence[EvaluatedPlan], count: int, leanest: bool
    ) -> list[EvaluatedPlan]:
        """Check plans until the best `count` of them are checked and fit.

        Args:
            plans: all plans that were evaluated.
            count: how many to settle, each the best of its idea.
            leanest: whether plans that are not expected to fit are checked, too, if none fits.

        Returns:
            All plans, best first; those evaluated by kinds alone last. If no checked plan fits,
            the first is one that does not.
        """
        before, fitted = len(self._checked), 0
        while len(self._checked) < before + CHECKED and fitted < FITTING:
            best = self._next(plans, count, leanest)
            if best is None:
                break
            checked = self._written(best)
            if self._final and checked.cost.fits:
                checked = self._final(checked)
            self._learn(best, checked)
            fitted += checked.cost.fits
        fitting = sorted(self._fitting(plans), key=_order)[:count]
        first = {plan.candidate.key for plan in fitting}
        others = [self.corrected(plan) for plan in plans if plan.candidate.key not in first]

        def order(evaluated: EvaluatedPlan) -> tuple[object, ...]:
            """Without a plan that is checked and fits, unchecked ones do not come first."""
            return not fitting and evaluated.candidate.key not in self._checked, _order(evaluated)

        return [*fitting, *sorted(others, key=order)]

    def _learn(self, evaluated: EvaluatedPlan, checked: EvaluatedPlan) -> None:
        idea = _idea(evaluated)
        self._checked[evaluated.candidate.key] = checked
        grown = checked.cost.memory / evaluated.cost.memory
        self._grown[idea] = min(grown, self._grown.get(idea, grown))
        if checked.cost.fits:
            slowed = checked.cost.seconds / evaluated.cost.seconds
            self._slowed[idea] = min(slowed, self._slowed.get(idea, slowed))

    def _next(
        self, plans: Sequence[EvaluatedPlan], count: int, leanest: bool
    ) -> EvaluatedPlan | None:
        """The plan to check next; None: all are settled."""
        unchecked = {
            plan.candidate.key: plan
            for plan in plans
            if plan.candidate.key not in self._checked
            and plan.cost.depth != "kinds"
            and plan.cost.fits
        }
        fitting = self._fitting(plans)
        expected = [self.corrected(plan) for plan in unchecked.values()]
        hopeful = [plan for plan in expected if plan.cost.fits and not _follows(plan, fitting)]
        if hopeful:
            best = min(hopeful, key=_order)
            ahead = sum(_order(plan) <= _order(best) for plan in fitting)
            return unchecked[best.candidate.key] if ahead < count else None
        doubtful = [plan for plan in expected if plan.cost.memory <= DOUBT * plan.cost.capacity]
        if doubtful and leanest and not fitting:
            best = min(doubtful, key=lambda plan: (_idea(plan) in self._grown, plan.cost.memory))
            return unchecked[best.candidate.key]
        return None

    def _fitting(self, plans: Sequence[EvaluatedPlan]) -> list[EvaluatedPlan]:
        """The plans that were checked and fit."""
        done = (
            self._checked[key] for plan in plans if (key := plan.candidate.key) in self._checked
        )
        return [plan for plan in done if plan.cost.fits]


def _expected(changes: Mapping[object, float], idea: object, several: int) -> float:
    """The factor by which a plan of an idea is corrected: that of its idea, or the least.

    A factor below 1 is expected of every idea, so that no plan is skipped.
    """
    least = min(changes.values(), default=1.0)
    return changes.get(idea, least if len(changes) >= several else min(1.0, least))


def _idea(evaluated: EvaluatedPlan) -> object:
    return evaluated.candidate.mesh, evaluated.candidate.kind


def _follows(evaluated: EvaluatedPlan, others: Sequence[EvaluatedPlan]) -> bool:
    """Whether another plan of its idea comes before it."""
    return any(
        _idea(other) == _idea(evaluated) and _order(other) <= _order(evaluated) for other in others
    )


def _order(evaluated: EvaluatedPlan) -> tuple[object, ...]:
    return evaluated.cost.depth == "kinds", *evaluated.order
