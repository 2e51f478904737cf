"""Plans that are to split a model and leave most of its bytes whole: said once, with the leaves.

What a plan keeps whole on purpose counts for nothing: leaves by a rule that is None or P(), and all
of a plan that splits no parameter, such as `Plan.data_parallel`. What counts is decided by no rule
(the default of `Plan.from_hf_tp_plan`, leaves below `replicate_below`), or by the `min_bytes` of
`Plan.fsdp`.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> plan = Plan.from_hf_tp_plan({"head": "colwise"}, "x")
>>> shapes = {"head.weight": (64, 64), "experts.up": (8, 512, 512), "norm.weight": (7,)}
>>> print(whole_by_chance(plan, plan.resolve(shapes, make_mesh((8,), ("x",)))))
the plan leaves 100 % of the parameters' bytes whole on every device, 8.0 MiB of 8.0 MiB:
  experts.up: shape (8, 512, 512), 8.0 MiB, no rule
Give them rules before those of the plan, Plan({"*experts*": P("x")}).otherwise(plan), or P() to replicate on purpose; Plan.expert_parallel and Plan.tensor_parallel split stacked experts, and Plan.fsdp everything.
"""  # noqa: E501

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from isoshard.core.errors import ReplicationWarning
from isoshard.core.layout.spec import axis_names
from isoshard.core.runtime.caches import Bounded
from isoshard.core.runtime.formatting import human_bytes
from isoshard.core.runtime.user_warnings import warn_user

from .hf_plan import HfStyle
from .resolved import BY_DEFAULT, BY_SIZE, ResolvedLeaf, ResolvedPlan
from .rule_patterns import label
from .size_rules import Largest
from .unused_rules import names_of_axes

if TYPE_CHECKING:
    from .plan import Plan

_SHOWN = 3
_told: Bounded[Any, bool] = Bounded(1024, "plan: warnings of replicated bytes")


def warn_whole(plan: Any, resolved: ResolvedPlan) -> None:
    """Warn once of a plan that leaves most bytes of a model whole by chance.

    Args:
        plan: a Plan; anything else is passed over.
        resolved: what it makes of the model.
    """
    message = whole_by_chance(plan, resolved) if hasattr(plan, "factors") else None
    if message is not None and (plan, message) not in _told:
        _told[plan, message] = True
        warn_user(message, ReplicationWarning)


def whole_by_chance(plan: Plan, resolved: ResolvedPlan) -> str | None:
    """What is to be said of a plan that leaves more than half of the bytes whole, or None."""
    chances = _chances(plan)
    whole = [leaf for leaf in resolved.leaves if _is_by_chance(leaf, chances)]
    if not whole:
        return None
    axes = {axis: n for axis, n in resolved.mesh.shape.items() if n > 1 and axis in _axes(plan)}
    whole = [leaf for leaf in whole if any(n % of == 0 for n in leaf.shape for of in axes.values())]
    total, lost = (sum(map(_bytes, leaves)) for leaves in (resolved.leaves, whole))
    if not whole or lost <= max(total / 2, plan.replicate_below):
        return None
    largest = sorted(whole, key=_bytes, reverse=True)
    lines = [
        f"  {leaf.name}: shape {leaf.shape}, {human_bytes(_bytes(leaf))}, {_why(leaf)}"
        for leaf in largest[:_SHOWN]
    ]
    lines += [f"  and {len(largest) - _SHOWN} more"] if len(largest) > _SHOWN else []
    example = largest[0].name.split(".")
    named = next((part for part in reversed(example[:-1]) if not part.isdigit()), example[-1])
    return "\n".join(
        [
            f"the plan leaves {round(100 * lost / total)} % of the parameters' bytes whole on "
            f"every device, {human_bytes(lost)} of {human_bytes(total)}:",
            *lines,
            f'Give them rules before those of the plan, Plan({{"*{named}*": P("{min(axes)}")}})'
            ".otherwise(plan), or P() to replicate on purpose; Plan.expert_parallel and "
            "Plan.tensor_parallel split stacked experts, and Plan.fsdp everything.",
        ]
    )


def _axes(plan: Plan) -> set[str]:
    """The mesh axes and logical names over which rules split, and what tables map names to."""
    found = {
        axis for factor in plan.factors for _, spec in factor.rules for axis in names_of_axes(spec)
    }
    for factor in plan.factors:
        found |= {axis for _, to in factor.axes.pairs for axis in axis_names(to)}
    return found


def _is_by_chance(leaf: ResolvedLeaf, chances: set[str]) -> bool:
    """Whether a leaf is whole, and no rule keeps it so."""
    return not any(leaf.sharding.spec) and set(leaf.rule.split(" * ")) <= chances


def _chances(plan: Plan) -> set[str]:
    """What decides, in a plan's table, for leaves that no rule keeps whole on purpose."""
    found = {BY_SIZE}
    for factor in plan.factors:
        found |= {label(p) for p, spec in factor.rules if isinstance(spec, Largest)}
        if factor.default is None and any(isinstance(spec, HfStyle) for _, spec in factor.rules):
            found.add(BY_DEFAULT)
    return found


def _bytes(leaf: ResolvedLeaf) -> int:
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape))
    return leaf.bytes_per_device * (math.prod(leaf.shape) // max(shard, 1))


def _why(leaf: ResolvedLeaf) -> str:
    if leaf.rule == BY_SIZE:
        return "no rule, and small"
    return "no rule" if leaf.rule == BY_DEFAULT else f"below the min_bytes of rule {leaf.rule!r}"
