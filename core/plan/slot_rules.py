"""Rules for the slots of an optimizer, such as moments sharded while parameters are replicated.

A slot (`0.mu.dense.kernel` of optax, `state.dense.weight.exp_avg` of torch) is sharded as its
parameter, unless a rule is for slots: one that matches no parameter, with any prefix and suffix of
the parameter's name. Of those, the first that matches the slot decides, wherever it is in the plan.

>>> from jax.sharding import PartitionSpec as P
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> plan = Plan({"*": None, "*.mu.*": P("data")})                     # ZeRO-1, of one moment
>>> owner = ModelLeaf("w", (8, 4))
>>> slots = {ModelLeaf("0.mu.w", (8, 4)): owner, ModelLeaf("0.nu.w", (8, 4)): owner}
>>> found = slot_layouts(plan, slots, [owner], make_mesh((8,), ("data",)))
>>> {name: layout.spec for name, layout in found.items()}
{'0.mu.w': P('data',)}

Source: Rajbhandari et al., ZeRO (arXiv:1910.02054), section 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import NamedSharding

from isoshard.core.layout.axis_types import AnyMesh

from .model_leaves import ModelLeaf
from .resolving import decision_of, resolve_leaves
from .rule_patterns import deciding_rule, label, slot_rules
from .size_rules import Largest

if TYPE_CHECKING:
    from .plan import Plan


def slot_layouts(
    plan: Plan,
    slots: Mapping[ModelLeaf, ModelLeaf | None],
    parameters: Sequence[ModelLeaf],
    mesh: AnyMesh,
) -> dict[str, NamedSharding]:
    """The shardings of the slots that have a rule of their own.

    Args:
        plan: the plan. In a product, factors without a rule for a slot split it as its parameter.
        slots: those with axes, each with its parameter if there is one of its shape.
        parameters: all of the model.
        mesh: the mesh, or an abstract one.

    Returns:
        By name; slots without a rule of their own are left out.

    Raises:
        PlanError: a rule does not fit a slot.
    """
    names = [leaf.name for leaf in parameters]
    rules = [slot_rules(factor, names) for factor in plan.factors]
    decided = {
        slot: slot_decisions
        for slot in slots
        if any(slot_decisions := [deciding_rule(of_factor, slot.name) for of_factor in rules])
    }
    if not decided:
        return {}
    factors = []
    for index, factor in enumerate(plan.factors):
        exact = {}
        for slot, slot_decisions in decided.items():
            rule = slot_decisions[index] or _parameter_rule(factor, slots[slot], mesh)
            if rule is not None:
                rule_label = label(rule[0]).replace(")", "]")
                exact[f"re:(?#{rule_label}){re.escape(slot.name)}"] = rule[1]
        factors.append(type(plan)(exact, axes=factor.axes))
    slot_plan = factors[0] if len(factors) == 1 else type(plan)(product=tuple(factors))
    return resolve_leaves(slot_plan, list(decided), mesh).shardings


def _parameter_rule(
    factor: Plan, parameter: ModelLeaf | None, mesh: AnyMesh
) -> tuple[str, Any] | None:
    decision = None if parameter is None else decision_of(factor, parameter, mesh)
    if parameter is None or decision is None:
        return None
    spec = decision.spec
    return decision.rule, spec.settled(parameter.size) if isinstance(spec, Largest) else spec
