"""Resolution: which rule decides for a leaf, what the factors of a product make together, faults.

For one leaf, in one plan: the first rule whose pattern matches; else what the leaf says of itself
(`names_of`); else the plan's default. In a product each factor decides so, and what they say is
merged. If no factor has more than a default to say, every factor must have one; else a small leaf
is replicated, and a large one is a fault.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.plan import Plan
>>> plan = Plan({"*.up.*": P("tp")}) * Plan.fsdp("fsdp", min_bytes=0)
>>> found = resolve(plan, {"a.up.weight": (8, 4)}, make_mesh((2, 4), ("fsdp", "tp")))
>>> found.leaves[0].sharding.spec, found.leaves[0].rule
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
from .freezing import UNSAID, Pairs
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
    """What one factor of a plan says of a leaf.

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
        strict: whether rules that decide nothing and leaves without a rule are faults.

    Returns:
        The layouts.

    Raises:
        PlanError: naming every leaf at fault.
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
    """Look up leaves that somebody has named already; see `resolve`.

    Args:
        plan: the plan.
        leaves: of the model.
        mesh: as for `resolve`.
        modules: the names of the model's modules, whose activations count too.
        strict: as for `resolve`.

    Returns:
        The layouts.

    Raises:
        PlanError: naming every leaf at fault.
    """
    if not isinstance(mesh, Mesh):
        given = ambient_mesh("plan.resolve(tree, mesh)") if mesh is None else mesh
        mesh = as_mesh(given, abstract=True)
    factors = plan.product or (plan,)
    memory = [factor.memory for factor in factors if factor.memory]
    resolved: list[ResolvedLeaf] = []
    used: set[str] = set()
    faults: list[str] = []
    lacking: list[str] = []
    large: list[ModelLeaf] = []
    for leaf in leaves:
        decisions = decide(plan, leaf, mesh)
        if not decisions:
            large.append(leaf)
            continue
        used.update(decision.rule for decision in decisions)
        rule = _joined(decisions)
        try:
            resolved.append(_lay_out(leaf, decisions, rule, mesh, plan.replicate_below, memory))
        except ShardingError as error:
            faults.append(f"{error} [rule {rule!r}]")
    unused = [p for factor in factors for p, _ in factor.rules if p not in used]
    of_name = {leaf.name: leaf for leaf in leaves}
    for factor in factors if unused else ():
        silent = [(pattern, spec) for pattern, spec in factor.rules if pattern not in used]
        wrong = [unknown_axes(*rule, factor.axes.names, mesh) for rule in silent]
        lacking += [fault for fault in wrong if fault is not None]

        def decides(name: str, factor: Plan = factor) -> str | None:
            found = decision_of(factor, of_name[name], mesh)
            return None if found is None else found.rule

        check_orders(factor.rules, tuple(of_name), used, decides)
    if faults or large or lacking:
        raise PlanError(_complaint(faults, large, lacking, plan.replicate_below)) from None
    rows, silent = _activations(plan, modules)
    found = ResolvedPlan(
        tuple(resolved), mesh, tuple(map(label, dict.fromkeys(unused))) + silent, rows
    )
    if strict and (found.unused or found.unmatched):
        raise PlanError(_strict_complaint(found))
    return found


def decide(plan: Plan, leaf: ModelLeaf, mesh: Mesh | None) -> list[Decision]:
    """Find what the factors of a plan say of one leaf.

    Args:
        plan: the plan.
        leaf: the leaf.
        mesh: the mesh, if it is known: names that a leaf carries may be its axes.

    Returns:
        Their decisions; none if the leaf is large and nobody speaks of it.
    """
    factors = plan.product or (plan,)
    speaking = [factor for factor in factors if _lays_out(factor)] or factors
    found = [decision_of(factor, leaf, mesh) for factor in speaking]
    spoken = list(dict.fromkeys(one for one in found if one is not None))
    if any(one.rule != BY_DEFAULT for one in spoken) or all(found):
        return spoken
    if leaf.size <= plan.replicate_below:
        return [Decision(BY_SIZE, None, AxisTable())]
    return []


def _lays_out(factor: Plan) -> bool:
    """Whether a factor speaks of layouts at all, and not of memory, activations or slices alone."""
    return bool(factor.rules or factor.axes) or factor.default is not UNSAID


def decision_of(factor: Plan, leaf: ModelLeaf, mesh: Any) -> Decision | None:
    """Find what a plan that is no product says of one leaf; see `decide`."""
    for pattern, spec in factor.rules:
        if matcher(pattern)(leaf.name):
            return Decision(pattern, spec, factor.axes)
    if leaf.names is not None and _speaks(factor, leaf.names, mesh):
        return Decision(BY_NAMES, leaf.names, factor.axes)
    return None if factor.default is UNSAID else Decision(BY_DEFAULT, factor.default, factor.axes)


def _speaks(factor: Plan, names: Sequence[Any], mesh: Mesh | None) -> bool:
    """Names of a leaf count if the factor has a table, or if they are those of the mesh."""
    return bool(factor.axes) or (mesh is not None and factor.axes.knows(names, mesh))


def _lay_out(
    leaf: ModelLeaf,
    decisions: list[Decision],
    rule: str,
    mesh: Mesh,
    limit: int,
    memory: Sequence[Pairs],
) -> ResolvedLeaf:
    notes: list[str] = []
    fixed = [one for one in decisions if not isinstance(one.spec, Largest)]
    specs = [_spec(one, leaf, mesh, notes) for one in fixed]
    ndim = len(leaf.shape)
    for one in decisions:
        if isinstance(one.spec, Largest):  # last, and inside: it goes by what is split already
            before = merged(specs, ndim, leaf.name) if specs else P()
            specs.append(one.spec.fit(leaf, mesh, _taken(before, ndim)))
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


def _joined(decisions: list[Decision]) -> str:
    """The rules that decided, without defaults that only replicate where another rule speaks."""
    spoken = [one for one in decisions if one.rule != BY_DEFAULT or one.spec is not None]
    return " * ".join(dict.fromkeys(label(one.rule) for one in spoken or decisions[:1]))


def _activations(
    plan: Plan, modules: Sequence[str] | None
) -> tuple[tuple[ResolvedActivation, ...], tuple[str, ...]]:
    """The activations that a plan speaks of, and the rules for them that decide nothing."""
    if modules is None:
        return (), ()
    rows, used = [], set()
    for module in modules:
        found = plan.activation_for(module)
        if found is not None:
            used.update(pattern for pattern, *_ in found.parts)
            rows += [
                ResolvedActivation(module, side, found.text(side), found.rule)
                for side in ("input", "output")
                if found.says(side)
            ]
    rules = [pattern for factor in plan.factors for pattern, _ in factor.activations]
    silent = [f"{label(p)} (activation)" for p in dict.fromkeys(rules) if p not in used]
    return tuple(rows), tuple(silent)


def _complaint(faults: list[str], large: list[ModelLeaf], lacking: list[str], limit: int) -> str:
    lines = []
    if faults:
        lines.append(f"the specs of {_leaves(len(faults))} do not fit:")
        lines += [f"  {fault}" for fault in faults]
    if lacking:
        lines.append("rules that decide for no leaf name axes that the mesh lacks:")
        lines += [f"  {fault}" for fault in lacking]
    if large:
        verb = "matches" if len(large) == 1 else "match"
        lines.append(f"{_leaves(len(large))} larger than {human_bytes(limit)} {verb} no rule:")
        lines += [_large_line(leaf) for leaf in large]
        what = "it" if len(large) == 1 else "each"
        lines.append(
            f"Add a rule for {what} (None replicates on purpose), or give the plan a default: "
            "Plan(.., default=P())."
        )
    return "\n".join(lines)


def _strict_complaint(found: ResolvedPlan) -> str:
    lines = ["the plan and the model do not cover each other, as strict=True asks:"]
    lines += [f"  rule {rule!r} decides nothing" for rule in found.unused]
    lines += [f"  {name}: no rule matches" for name in found.unmatched]
    return "\n".join(lines)


def _leaves(count: int) -> str:
    return f"{count} leaf" if count == 1 else f"{count} leaves"


def _large_line(leaf: ModelLeaf) -> str:
    size = human_bytes(leaf.size)
    of = f"{size} if float32" if leaf.dtype is None else f"{leaf.dtype}, {size}"
    names = "" if leaf.names is None else f"; it says of its axes {leaf.names}, and axes= is empty"
    return f"  {leaf.name}: shape {leaf.shape}, {of}{names}"
