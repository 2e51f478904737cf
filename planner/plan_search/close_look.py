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
from isoshard.core.traced.traced_step import TracedStep

from ..axes.factor_layouts import ArrayLayout
from .analytic_cost import AnalyticCost, Choice
from .beam_search import EACH_RULE, BeamSearch, Scored
from .fixed_rules import fixed_layouts, joined
from .found_rules import activation_rules_of, input_rules_of, rules_of
from .plan_cost import PlanCost, SearchDepth, by_kinds
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
        said = len(self.plan.rules) + len(self.plan.activations)
        said += len(self.candidate.mesh.axis_names)
        return not self.cost.fits, self.cost.seconds * (1 + EACH_RULE * said)


def seen(
    step: SearchedStep,
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
    every = {name: one for name, one in _every_output(step, candidate).items() if len(one.spec)}
    blocks = {name: one for name, one in every.items() if _is_block(name, every)}
    if depth == "kinds":
        cost = by_kinds(candidate.scored.cost, candidate.mesh, capacity)
        return SeenPlan(candidate, plan_of(step, candidate, fixed, blocks), cost, blocks)
    layouts = layouts_of_choice(step.written, candidate.cost, candidate.choice)
    found = []
    for outputs in ({}, blocks, every):
        if found and (not outputs or outputs == found[-1].outputs):
            continue
        plan = plan_of(step, candidate, fixed, outputs)
        cost = step.cost(layouts, candidate.mesh, capacity, outputs)
        found.append(SeenPlan(candidate, plan, cost, outputs))
        if cost.fits and cost.seconds < 1.02 * candidate.scored.cost.seconds:
            break
    return min(found, key=lambda one: one.order)


def checked(step: SearchedStep, one: SeenPlan) -> SeenPlan:
    """The same plan with memory for the step as it is written, too.

    Args:
        step: the step.
        one: a plan that was evaluated.
    """
    candidate = one.candidate
    layouts = layouts_of_choice(step.written, candidate.cost, candidate.choice)
    return dataclasses.replace(
        one, cost=step.as_written(one.cost, layouts, candidate.mesh, one.outputs)
    )


def under_plan(step: SearchedStep, laid: TracedStep, one: SeenPlan) -> SeenPlan:
    """The same plan with the cost, and the memory as written, of a step that was traced under it.

    What a plan says of a module's output holds for its gradient, too; a program that was traced
    without the plan has no mark for that.

    Args:
        step: the step.
        laid: the same, traced under the plan.
        one: a plan that was evaluated.
    """
    loops = step.looped is not step.written
    again = SearchedStep(laid, with_loops(laid) if loops else laid, step.program)
    cost = again.cost({}, laid.mesh, one.cost.capacity)
    return dataclasses.replace(one, cost=again.as_written(cost, {}, laid.mesh))


def partitioned(step: SearchedStep, one: SeenPlan) -> SeenPlan:
    """The same plan with the seconds that XLA's partitioner finds, and no less memory than before.

    Args:
        step: the step.
        one: a plan that was checked.
    """
    mesh = one.candidate.mesh
    layouts = layouts_of_choice(step.written, one.candidate.cost, one.candidate.choice)
    cost = step.cost(layouts, mesh, one.cost.capacity, one.outputs, "partition")
    memory = max(cost.memory, one.cost.memory)
    return dataclasses.replace(one, cost=dataclasses.replace(cost, memory=memory))


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
    step: SearchedStep, candidate: Candidate, fixed: Plan | None, outputs: dict[str, NamedSharding]
) -> Plan:
    """The plan that says what a candidate chose.

    Args:
        step: the step.
        candidate: it.
        fixed: the user's own rules, which stay.
        outputs: layouts of outputs of modules to ask for.
    """
    written, mesh = step.written, candidate.mesh
    layouts = layouts_of_choice(written, candidate.cost, candidate.choice)
    decided = {} if fixed is None or fixed.product else fixed_layouts(fixed, written, mesh)
    model: dict[str, PartitionSpec] = {}
    batch: dict[str, PartitionSpec] = {}
    for one in written.inputs:
        if one.name in layouts and not one.name.startswith("closed_over."):
            if one.role == "input":
                batch[one.name] = layouts[one.name].spec
            elif one.name not in decided:
                model[one.name] = layouts[one.name].spec
    more: dict[str, Any] = {"inputs": input_rules_of(batch)} if batch else {}
    if outputs:
        every = _every_output(step, candidate)
        more["activations"] = activation_rules_of(
            {name: one.spec for name, one in every.items() if name in outputs or not one.spec}
        )
    return joined(fixed, Plan(rules_of(model), **more))


def _every_output(step: SearchedStep, candidate: Candidate) -> dict[str, NamedSharding]:
    mesh = candidate.mesh
    layouts = {
        one: candidate.cost.output_layout(one, candidate.choice)
        for one in dict.fromkeys(step.modules.values())
    }
    return {
        name: NamedSharding(mesh, _spec(layout, mesh))
        for name, one in step.modules.items()
        if (layout := layouts[one]) is not None
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
