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
    found = []
    for mesh in meshes:
        for name, plan in _ideas(step, tuple(mesh.axis_names), dict(own or {})).items():
            try:
                layouts = fixed_layouts(plan, step, mesh)
            except ShardingError:
                continue
            if _missing(step, layouts):
                continue
            found.append(HandPlan(name, mesh, plan, layouts))
    return found


def _ideas(step: TracedStep, axes: tuple[str, ...], own: dict[str, Plan]) -> dict[str, Plan]:
    whole = Plan({"*": None})
    if axes == ("data",):
        ideas = {"data": whole, "FSDP": Plan.fsdp("data").otherwise(whole)}
        return {name: _laid(step, plan, ("data",)) for name, plan in ideas.items()}
    if axes != ("data", "model"):
        return {}
    tensor = own.pop("tensor", Plan.tensor_parallel("model"))
    experts = Plan.expert_parallel("model")
    ideas = {
        "tensor": tensor.otherwise(whole),
        "FSDP x tensor": Plan.fsdp("data") * tensor.otherwise(whole),
        "sequence": Plan.fsdp(("data", "model")),
        "expert": Plan.fsdp("data") * experts.otherwise(whole),
        "expert x FSDP": experts.otherwise(whole).otherwise(Plan.fsdp(("data", "model"))),
    }
    if not any("experts" in one.name for one in step.inputs):
        del ideas["expert"], ideas["expert x FSDP"]
    ideas |= own
    both = {"expert x FSDP": (("data", "model"),), "sequence": ("data", "model")}
    return {name: _laid(step, plan, both.get(name, ("data",))) for name, plan in ideas.items()}


def _laid(step: TracedStep, plan: Plan, spec: tuple[object, ...]) -> Plan:
    """The same plan with a spec for the batch, as far as the rank of each array goes."""
    inputs = {one.name: spec[: len(one.shape)] for one in step.inputs if one.role == "input"}
    if plan.product:
        return Plan({}, default=None, inputs=inputs) * _without_inputs(plan)
    return dataclasses.replace(plan, inputs=inputs)


def _without_inputs(plan: Plan) -> Plan:
    unsaid = Plan().inputs
    factors = tuple(dataclasses.replace(one, inputs=unsaid) for one in plan.product)
    return dataclasses.replace(plan, product=factors)


def _missing(step: TracedStep, layouts: Mapping[str, NamedSharding]) -> bool:
    large = 1 << 20
    return any(
        one.role == "parameter" and one.name not in layouts and one.bytes > large
        for one in step.inputs
    )
