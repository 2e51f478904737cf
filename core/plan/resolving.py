"""Resolution of a plan: the deciding rule of each leaf, merged over factors, with all errors.

For one leaf, in one plan: the first rule whose pattern matches; else the axis names in the leaf's
metadata (`names_of`); else the plan's default. In a product each factor decides so, and their specs
are merged. If no factor has more than a default, every factor must have one; else a small leaf is
replicated, and a large one is an error.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> plan = Plan({"*.up.*": P("tp")}) * Plan.fsdp("fsdp", min_bytes=0)
>>> resolved = resolve(plan, {"a.up.weight": (8, 4)}, make_mesh((2, 4), ("fsdp", "tp")))
>>> resolved.leaves[0].sharding.spec, resolved.leaves[0].rule
(P('tp', 'fsdp'), '*.up.* * fsdp')
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.layout.mesh import ambient_mesh, as_mesh
from isoshard.core.layout.offload import in_memory
from isoshard.core.layout.spec import axis_names, check_even, normalize_spec
from isoshard.core.runtime.formatting import human_bytes

from ..errors import ShardingError
from .freezing import UNSET, Pairs
from .layout_rules import LayoutRule, PlanError
from .logical import AxisTable
from .memory_rules import memory_for
from .merging import merged
from .model_leaves import ModelLeaf, leaves_of, modules_of
from .other_orders import check_orders
from .resolved import BY_DEFAULT, BY_NAMES, BY_SIZE, ResolvedActivation, ResolvedLeaf, ResolvedPlan
from .rule_patterns import label, matcher
from .size_rules import Largest
from .unused_rules import unknown_axes

if TYPE_CHECKING:
    from .plan import Plan


@dataclasses.dataclass(frozen=True)
class Decision:
    """The rule by which one factor of a plan decides for a leaf.

    Attributes:
        rule: the pattern, or `BY_DEFAULT`, `BY_NAMES`, `BY_SIZE`.
        spec: as the plan has it: a spec, a rule, or None.
        axes: the logical axes that the spec may name.
    """

    rule: str
    spec: Any
    axes: AxisTable


def resolve(plan: Plan, tree: Any, mesh: Any, *, strict: bool = False) -> ResolvedPlan:
    """Look up every leaf of a model.

    Args:
        plan: the plan.
        tree: as `Plan.resolve` takes it.
        mesh: the mesh, or what `as_mesh` takes; it may be abstract. None for the one that
            `jax.set_mesh` has set.
        strict: whether rules that decide nothing and leaves without a rule are errors.

    Raises:
        PlanError: naming every leaf with an error.
    """
    return resolve_leaves(plan, leaves_of(tree), mesh, modules_of(tree), strict=strict)


def resolve_leaves(
    plan: Plan,
    leaves: Sequence[ModelLeaf],
    mesh: Any,
    modules: Sequence[str] | None = None,
    *,
    strict: bool = False,
) -> ResolvedPlan:
    """Look up named leaves; see `resolve`.

    Args:
        plan: the plan.
        leaves: of the model.
        mesh: as for `resolve`.
        modules: the names of the model's modules, whose activations count too.
        strict: as for `resolve`.

    Raises:
        PlanError: naming every leaf with an error.
    """
    if not isinstance(mesh, Mesh):
        mesh_arg = ambient_mesh("plan.resolve(tree, mesh)") if mesh is None else mesh
        mesh = as_mesh(mesh_arg, abstract=True)
    factors = plan.product or (plan,)
    memory = [factor.memory for factor in factors if factor.memory]
    resolved: list[ResolvedLeaf] = []
    used: set[str] = set()
    errors: list[str] = []
    axis_errors: list[str] = []
    large: list[ModelLeaf] = []
    for leaf in leaves:
        decisions = decide(plan, leaf, mesh)
        if not decisions:
            large.append(leaf)
            continue
        used.update(decision.rule for decision in decisions)
        rule = _joined_rules(decisions)
        try:
            resolved.append(
                _resolve_leaf(leaf, decisions, rule, mesh, plan.replicate_below, memory)
            )
        except ShardingError as error:
            errors.append(f"{error} [rule {rule!r}]")
    unused = [p for factor in factors for p, _ in factor.rules if p not in used]
    leaf_by_name = {leaf.name: leaf for leaf in leaves}
    for factor in factors if unused else ():
        inactive = [(pattern, spec) for pattern, spec in factor.rules if pattern not in used]
        wrong = [unknown_axes(*rule, factor.axes.names, mesh) for rule in inactive]
        axis_errors += [message for message in wrong if message is not None]

        def decides(name: str, factor: Plan = factor) -> str | None:
            decision = decision_of(factor, leaf_by_name[name], mesh)
            return None if decision is None else decision.rule

        check_orders(factor.rules, tuple(leaf_by_name), used, decides)
    if errors or large or axis_errors:
        raise PlanError(_error_text(errors, large, axis_errors, plan.replicate_below)) from None
    rows, inactive = _activations(plan, modules)
    result = ResolvedPlan(
        tuple(resolved), mesh, tuple(map(label, dict.fromkeys(unused))) + inactive, rows
    )
    if strict and (result.unused or result.unmatched):
        raise PlanError(_strict_error_text(result))
    return result


def decide(plan: Plan, leaf: ModelLeaf, mesh: Mesh | None) -> list[Decision]:
    """The decisions of a plan's factors for one leaf; none if it is large and has no rule.

    With a mesh, axis names in the leaf's metadata may be axes of the mesh.
    """
    factors = plan.product or (plan,)
    factors_with_layouts = [factor for factor in factors if _has_layouts(factor)] or factors
    decisions = [decision_of(factor, leaf, mesh) for factor in factors_with_layouts]
    distinct = list(dict.fromkeys(decision for decision in decisions if decision is not None))
    if any(decision.rule != BY_DEFAULT for decision in distinct) or all(decisions):
        return distinct
    if leaf.size <= plan.replicate_below:
        return [Decision(BY_SIZE, None, AxisTable())]
    return []


def _has_layouts(factor: Plan) -> bool:
    """Whether a factor shards leaves at all: it may have memory, activation or slice rules only."""
    return bool(factor.rules or factor.axes) or factor.default is not UNSET


def decision_of(factor: Plan, leaf: ModelLeaf, mesh: Any) -> Decision | None:
    """The decision of a plan that is no product for one leaf; see `decide`."""
    for pattern, spec in factor.rules:
        if matcher(pattern)(leaf.name):
            return Decision(pattern, spec, factor.axes)
    if leaf.names is not None and _uses_names(factor, leaf.names, mesh):
        return Decision(BY_NAMES, leaf.names, factor.axes)
    return None if factor.default is UNSET else Decision(BY_DEFAULT, factor.default, factor.axes)


def _uses_names(factor: Plan, names: Sequence[Any], mesh: Mesh | None) -> bool:
    """Axis names of a leaf count if the factor has a table, or if the mesh has them."""
    return bool(factor.axes) or (mesh is not None and factor.axes.contains(names, mesh))


def _resolve_leaf(
    leaf: ModelLeaf,
    decisions: list[Decision],
    rule: str,
    mesh: Mesh,
    limit: int,
    memory: Sequence[Pairs],
) -> ResolvedLeaf:
    notes: list[str] = []
    fixed = [decision for decision in decisions if not isinstance(decision.spec, Largest)]
    specs = [_spec(decision, leaf, mesh, notes) for decision in fixed]
    ndim = len(leaf.shape)
    for decision in decisions:
        if isinstance(decision.spec, Largest):  # last: it chooses among axes that are not split yet
            before = merged(specs, ndim, leaf.name) if specs else P()
            specs.append(decision.spec.fit(leaf, mesh, _taken(before, ndim)))
    spec = specs[0] if len(specs) == 1 else merged(specs, ndim, leaf.name)
    check_even(spec, mesh, leaf.shape, name=leaf.name)
    if notes and mesh.size > 1 and leaf.size > limit and _shards(spec, ndim, mesh) == 1:
        raise PlanError(
            f"{leaf.name}: shape {leaf.shape}, {human_bytes(leaf.size)}, would be replicated: "
            f"{'; '.join(notes)}. Give axes another choice, or (name, None) to replicate on purpose"
        )
    sharding = NamedSharding(mesh, spec)
    if memory:
        sharding = in_memory(sharding, memory_for(memory, leaf.name), name=leaf.name)
    size = math.prod(sharding.shard_shape(leaf.shape)) * leaf.itemsize
    return ResolvedLeaf(leaf.name, leaf.shape, leaf.dtype, sharding, size, rule, tuple(notes))


def _spec(decision: Decision, leaf: ModelLeaf, mesh: Mesh, notes: list[str]) -> P:
    spec = decision.spec
    if isinstance(spec, LayoutRule):
        spec = spec.spec(leaf.name, len(leaf.shape))
    if decision.axes.pairs:
        return decision.axes.fit(spec, leaf.shape, mesh, leaf.name, notes)
    return normalize_spec(spec, mesh, len(leaf.shape), name=leaf.name)


def _taken(spec: P, ndim: int) -> list[tuple[str, ...]]:
    return [axis_names(spec[axis]) if axis < len(spec) else () for axis in range(ndim)]


def _shards(spec: P, ndim: int, mesh: Mesh) -> int:
    return math.prod(mesh.shape[axis] for axes in _taken(spec, ndim) for axis in axes)


def _joined_rules(decisions: list[Decision]) -> str:
    """The rules that decided, without replicating defaults where another rule splits."""
    splitting = [
        decision
        for decision in decisions
        if decision.rule != BY_DEFAULT or decision.spec is not None
    ]
    return " * ".join(
        dict.fromkeys(label(decision.rule) for decision in splitting or decisions[:1])
    )


def _activations(
    plan: Plan, modules: Sequence[str] | None
) -> tuple[tuple[ResolvedActivation, ...], tuple[str, ...]]:
    """Modules' inputs and outputs with a rule, and the activation rules that match no module."""
    if modules is None:
        return (), ()
    rows, used = [], set()
    for module in modules:
        activation = plan.activation_for(module)
        if activation is not None:
            used.update(pattern for pattern, *_ in activation.parts)
            rows += [
                ResolvedActivation(module, side, activation.text(side), activation.rule)
                for side in ("input", "output")
                if activation.says(side)
            ]
    rules = [pattern for factor in plan.factors for pattern, _ in factor.activations]
    unused = [f"{label(p)} (activation)" for p in dict.fromkeys(rules) if p not in used]
    return tuple(rows), tuple(unused)


def _error_text(
    errors: list[str], large: list[ModelLeaf], axis_errors: list[str], limit: int
) -> str:
    lines = []
    if errors:
        lines.append(f"the specs of {_leaves(len(errors))} do not fit:")
        lines += [f"  {message}" for message in errors]
    if axis_errors:
        lines.append("rules that decide for no leaf name axes that the mesh lacks:")
        lines += [f"  {message}" for message in axis_errors]
    if large:
        verb = "matches" if len(large) == 1 else "match"
        lines.append(f"{_leaves(len(large))} larger than {human_bytes(limit)} {verb} no rule:")
        lines += [_large_line(leaf) for leaf in large]
        object_ = "it" if len(large) == 1 else "each"
        lines.append(
            f"Add a rule for {object_} (None replicates on purpose), or give the plan a default: "
            "Plan(.., default=P())."
        )
    return "\n".join(lines)


def _strict_error_text(resolved: ResolvedPlan) -> str:
    lines = ["the plan and the model do not cover each other, as strict=True requires:"]
    lines += [f"  rule {rule!r} decides nothing" for rule in resolved.unused]
    lines += [f"  {name}: no rule matches" for name in resolved.unmatched]
    return "\n".join(lines)


def _leaves(count: int) -> str:
    return f"{count} leaf" if count == 1 else f"{count} leaves"


def _large_line(leaf: ModelLeaf) -> str:
    size = human_bytes(leaf.size)
    of = f"{size} if float32" if leaf.dtype is None else f"{leaf.dtype}, {size}"
    names = "" if leaf.names is None else f"; its axis names are {leaf.names}, and axes= is empty"
    return f"  {leaf.name}: shape {leaf.shape}, {of}{names}"
