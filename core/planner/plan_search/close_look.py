"""The best choices, looked at closely: as plans, with and without a word on activations.

The cost by kinds stands on each value lying as the choice says. The partitioner spreads layouts
from parameters and batch alone, and may follow another one. So a plan is evaluated as it is, then
with layouts of the outputs of blocks, then of all modules; what says less counts unless more is
faster.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.plan import Plan

from ..axes.factor_layouts import ArrayLayout
from ..traced.traced_step import TracedStep
from .analytic_cost import AnalyticCost, Choice
from .beam_search import EACH_RULE, Scored
from .fixed_rules import fixed_layouts, joined
from .found_rules import activation_rules_of, input_rules_of, rules_of
from .plan_cost import PlanCost, SearchDepth, by_kinds, cost_of


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A choice that may be the best.

    Attributes:
        scored: it, with its cost by kinds.
        cost: the cost function of its mesh.
    """

    scored: Scored
    cost: AnalyticCost

    @property
    def mesh(self) -> Mesh:
        """That the choice is over."""
        return self.cost.mesh

    @property
    def choice(self) -> Choice:
        """What is split."""
        return self.scored.choice


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
    def order(self) -> tuple[bool, float]:
        """Less is better: what fits, then what is fast and short."""
        said = len(self.plan.rules) + len(self.plan.activations)
        said += len(self.candidate.mesh.axis_names)
        return not self.cost.fits, self.cost.seconds * (1 + EACH_RULE * said)


def seen(
    step: TracedStep,
    candidate: Candidate,
    fixed: Plan | None,
    capacity: int,
    depth: SearchDepth,
) -> SeenPlan:
    """Write a candidate as a plan, and evaluate it.

    Args:
        step: the step.
        candidate: a choice.
        fixed: the user's own rules.
        capacity: bytes of one device.
        depth: how closely.
    """
    every = _outputs(candidate)
    blocks = {name: one for name, one in every.items() if _is_block(name, every)}
    if depth == "kinds":
        cost = by_kinds(candidate.scored.cost, candidate.mesh, capacity)
        return SeenPlan(candidate, plan_of(step, candidate, fixed, blocks), cost, blocks)
    layouts = layouts_of_choice(step, candidate.cost, candidate.choice)
    found = []
    for outputs in ({}, blocks, every):
        if found and (not outputs or outputs == found[-1].outputs):
            continue
        plan = plan_of(step, candidate, fixed, outputs)
        cost = cost_of(step, layouts, candidate.mesh, capacity, outputs=outputs, depth="trace")
        found.append(SeenPlan(candidate, plan, cost, outputs))
        if cost.fits and cost.seconds < 1.02 * candidate.scored.cost.seconds:
            break
    return min(found, key=lambda one: one.order)


def under_plan(step: TracedStep, one: SeenPlan) -> SeenPlan:
    """The same plan with the cost of a step that was traced under it.

    What a plan says of a module's output holds for its gradient, too; a program that was traced
    without the plan has no mark for that.

    Args:
        step: traced under the plan.
        one: a plan that was evaluated.
    """
    layouts = {each.name: each.sharding for each in step.inputs}
    return dataclasses.replace(one, cost=cost_of(step, layouts, step.mesh, one.cost.capacity))


def partitioned(step: TracedStep, one: SeenPlan) -> SeenPlan:
    """The same plan with the cost that XLA's partitioner finds.

    Args:
        step: the step.
        one: a plan that was evaluated.
    """
    mesh = one.candidate.mesh
    layouts = layouts_of_choice(step, one.candidate.cost, one.candidate.choice)
    cost = cost_of(
        step, layouts, mesh, one.cost.capacity, outputs=one.outputs, depth="partition"
    )  # fmt: skip
    return dataclasses.replace(one, cost=cost)


def layouts_of_choice(
    step: TracedStep, cost: AnalyticCost, choice: Choice
) -> dict[str, NamedSharding]:
    """The layout of each parameter, buffer and array of the batch.

    Args:
        step: the step.
        cost: of the mesh.
        choice: over it.
    """
    of_group = {
        name: _spec(cost.group_layout(number, choice), cost.mesh)
        for number, group in enumerate(cost.program.dimensions.groups)
        for name in group.names
    }
    return {
        one.name: NamedSharding(cost.mesh, of_group[one.name])
        for one in step.inputs
        if one.name in of_group
    }


def plan_of(
    step: TracedStep, candidate: Candidate, fixed: Plan | None, outputs: dict[str, NamedSharding]
) -> Plan:
    """The plan that says what a candidate chose.

    Args:
        step: the step.
        candidate: it.
        fixed: the user's own rules, which stay.
        outputs: layouts of outputs of modules to ask for.
    """
    layouts = layouts_of_choice(step, candidate.cost, candidate.choice)
    decided = {} if fixed is None or fixed.product else fixed_layouts(fixed, step, candidate.mesh)
    model: dict[str, PartitionSpec] = {}
    batch: dict[str, PartitionSpec] = {}
    for one in step.inputs:
        if one.name in layouts and not one.name.startswith("closed_over."):
            if one.role == "input":
                batch[one.name] = layouts[one.name].spec
            elif one.name not in decided:
                model[one.name] = layouts[one.name].spec
    more: dict[str, Any] = {"inputs": input_rules_of(batch)} if batch else {}
    if outputs:
        every = _every_output(candidate)
        more["activations"] = activation_rules_of(
            {name: one.spec for name, one in every.items() if name in outputs or not one.spec}
        )
    return joined(fixed, Plan(rules_of(model), **more))


def _outputs(candidate: Candidate) -> dict[str, NamedSharding]:
    return {name: one for name, one in _every_output(candidate).items() if len(one.spec)}


def _every_output(candidate: Candidate) -> dict[str, NamedSharding]:
    return {
        name: NamedSharding(
            candidate.mesh,
            _spec(candidate.cost.output_layout(name, candidate.choice), candidate.mesh),
        )
        for name in candidate.cost.program.modules
        if name  # the whole model's output is that of its last module
    }


def _is_block(name: str, names: dict[str, NamedSharding]) -> bool:
    """Whether no other module that is marked holds this one."""
    words = name.split(".")
    return not any(".".join(words[:count]) in names for count in range(1, len(words)))


def _spec(layout: ArrayLayout, mesh: Mesh) -> PartitionSpec:
    entries: list[Any] = []
    for split in layout:
        names = tuple(mesh.axis_names[one] for one in split)
        entries.append(None if not names else names[0] if len(names) == 1 else names)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)
