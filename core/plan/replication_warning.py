"""A warning, once per plan, when a plan that shards a model replicates most of its bytes.

Replication on purpose does not count: leaves whose rule is None or P(), and plans that split no
parameter, such as `Plan.data_parallel`. Leaves without a rule count (the default of
`Plan.from_hf_tp_plan`, leaves below `replicate_below`), and those below the `min_bytes` of
`Plan.fsdp`.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> plan = Plan.from_hf_tp_plan({"head": "colwise"}, "x")
>>> shapes = {"head.weight": (64, 64), "experts.up": (8, 512, 512), "norm.weight": (7,)}
>>> print(replication_message(plan, plan.resolve(shapes, make_mesh((8,), ("x",)))))
the plan replicates 100 % of the parameters' bytes on every device, 8.0 MiB of 8.0 MiB:
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
_warned: Bounded[Any, bool] = Bounded(1024, "plan: warnings of replicated bytes")


def warn_replicated(plan: Any, resolved: ResolvedPlan) -> None:
    """Warn once of a plan (anything else is ignored) that replicates most bytes unintentionally."""
    message = replication_message(plan, resolved) if hasattr(plan, "factors") else None
    if message is not None and (plan, message) not in _warned:
        _warned[plan, message] = True
        warn_user(message, ReplicationWarning)


def replication_message(plan: Plan, resolved: ResolvedPlan) -> str | None:
    """The warning for a plan that replicates more than half of the bytes, or None."""
    rules = _default_rules(plan)
    replicated = [leaf for leaf in resolved.leaves if _is_replicated_by_default(leaf, rules)]
    if not replicated:
        return None
    axes = {axis: n for axis, n in resolved.mesh.shape.items() if n > 1 and axis in _axes(plan)}
    replicated = [
        leaf for leaf in replicated if any(n % of == 0 for n in leaf.shape for of in axes.values())
    ]
    total, replicated_bytes = (sum(map(_bytes, leaves)) for leaves in (resolved.leaves, replicated))
    if not replicated or replicated_bytes <= max(total / 2, plan.replicate_below):
        return None
    largest = sorted(replicated, key=_bytes, reverse=True)
    lines = [
        f"  {leaf.name}: shape {leaf.shape}, {human_bytes(_bytes(leaf))}, {_why(leaf)}"
        for leaf in largest[:_SHOWN]
    ]
    lines += [f"  and {len(largest) - _SHOWN} more"] if len(largest) > _SHOWN else []
    example = largest[0].name.split(".")
    named = next(
        (segment for segment in reversed(example[:-1]) if not segment.isdigit()), example[-1]
    )
    return "\n".join(
        [
            f"the plan replicates {round(100 * replicated_bytes / total)} % of the parameters' "
            f"bytes on every device, {human_bytes(replicated_bytes)} of {human_bytes(total)}:",
            *lines,
            f'Give them rules before those of the plan, Plan({{"*{named}*": P("{min(axes)}")}})'
            ".otherwise(plan), or P() to replicate on purpose; Plan.expert_parallel and "
            "Plan.tensor_parallel split stacked experts, and Plan.fsdp everything.",
        ]
    )


def _axes(plan: Plan) -> set[str]:
    """The mesh axes and logical names that rules split over, and the targets of axis tables."""
    axes = {
        axis for factor in plan.factors for _, spec in factor.rules for axis in names_of_axes(spec)
    }
    for factor in plan.factors:
        axes |= {axis for _, to in factor.axes.pairs for axis in axis_names(to)}
    return axes


def _is_replicated_by_default(leaf: ResolvedLeaf, rules: set[str]) -> bool:
    """Whether a leaf is replicated, and no rule does so on purpose."""
    return not any(leaf.sharding.spec) and set(leaf.rule.split(" * ")) <= rules


def _default_rules(plan: Plan) -> set[str]:
    """The labels, in a plan's table, that decide for leaves replicated without an explicit rule."""
    rules = {BY_SIZE}
    for factor in plan.factors:
        rules |= {label(p) for p, spec in factor.rules if isinstance(spec, Largest)}
        if factor.default is None and any(isinstance(spec, HfStyle) for _, spec in factor.rules):
            rules.add(BY_DEFAULT)
    return rules


def _bytes(leaf: ResolvedLeaf) -> int:
    shard = math.prod(leaf.sharding.shard_shape(leaf.shape))
    return leaf.bytes_per_device * (math.prod(leaf.shape) // max(shard, 1))


def _why(leaf: ResolvedLeaf) -> str:
    if leaf.rule == BY_SIZE:
        return "no rule, and small"
    return "no rule" if leaf.rule == BY_DEFAULT else f"below the min_bytes of rule {leaf.rule!r}"
