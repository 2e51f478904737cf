"""The plans that people write by hand, to compare a found one with.

Data parallel, FSDP, tensor parallel, both, a split sequence, split experts: as `Plan`'s own
constructors make them for models with usual names, and as a user writes them for others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding

from isoshard.core.errors import ShardingError
from isoshard.core.plan import Plan
from isoshard.core.traced.traced_step import TracedStep
from isoshard.planner.plan_search.plan_rules import fixed_layouts


@dataclasses.dataclass(frozen=True)
class HandPlan:
    """A plan that somebody writes by hand.

    Attributes:
        name: of the idea.
        mesh: that it is for.
        plan: it.
        layouts: what it makes of a step, by name of the input.
    """

    name: str
    mesh: Mesh
    plan: Plan
    layouts: Mapping[str, NamedSharding]


def hand_plans(
    step: TracedStep, meshes: Sequence[Mesh], own: Mapping[str, Plan] | None = None
) -> list[HandPlan]:
    """The hand plans that a step and some meshes allow.

    Args:
        step: the step.
        meshes: with an axis "data", or with "data" and "model".
        own: plans by name for models without usual names, over "model"; of "tensor" it takes the
            place of `Plan.tensor_parallel`.

    Returns:
        Those that resolve; what does not divide is left out.
    """
    plans = []
    for mesh in meshes:
        for name, plan in _ideas(step, tuple(mesh.axis_names), dict(own or {})).items():
            try:
                layouts = fixed_layouts(plan, step, mesh)
            except ShardingError:
                continue
            if _missing(step, layouts):
                continue
            plans.append(HandPlan(name, mesh, plan, layouts))
    return plans


def _ideas(step: TracedStep, axes: tuple[str, ...], own: dict[str, Plan]) -> dict[str, Plan]:
    replicated = Plan({"*": None})
    if axes == ("data",):
        ideas = {"data": replicated, "FSDP": Plan.fsdp("data").otherwise(replicated)}
        return {name: _with_batch_spec(step, plan, ("data",)) for name, plan in ideas.items()}
    if axes != ("data", "model"):
        return {}
    tensor = own.pop("tensor", Plan.tensor_parallel("model"))
    experts = Plan.expert_parallel("model")
    ideas = {
        "tensor": tensor.otherwise(replicated),
        "FSDP x tensor": Plan.fsdp("data") * tensor.otherwise(replicated),
        "sequence": Plan.fsdp(("data", "model")),
        "expert": Plan.fsdp("data") * experts.otherwise(replicated),
        "expert x FSDP": experts.otherwise(replicated).otherwise(Plan.fsdp(("data", "model"))),
    }
    if not any("experts" in input_.name for input_ in step.inputs):
        del ideas["expert"], ideas["expert x FSDP"]
    ideas |= own
    both = {"expert x FSDP": (("data", "model"),), "sequence": ("data", "model")}
    return {
        name: _with_batch_spec(step, plan, both.get(name, ("data",)))
        for name, plan in ideas.items()
    }


def _with_batch_spec(step: TracedStep, plan: Plan, spec: tuple[object, ...]) -> Plan:
    """The same plan with a spec for the batch, as far as the rank of each array goes."""
    inputs = {
        input_.name: spec[: len(input_.shape)] for input_ in step.inputs if input_.role == "input"
    }
    if plan.product:
        return Plan({}, default=None, inputs=inputs) * _without_inputs(plan)
    return dataclasses.replace(plan, inputs=inputs)


def _without_inputs(plan: Plan) -> Plan:
    unsaid = Plan().inputs
    factors = tuple(dataclasses.replace(factor, inputs=unsaid) for factor in plan.product)
    return dataclasses.replace(plan, product=factors)


def _missing(step: TracedStep, layouts: Mapping[str, NamedSharding]) -> bool:
    large = 1 << 20
    return any(
        input_.role == "parameter" and input_.name not in layouts and input_.bytes > large
        for input_ in step.inputs
    )
