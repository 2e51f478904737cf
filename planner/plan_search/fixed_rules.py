"""A user's own rules: what they decide is given, and the search finds the rest."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.errors import ShardingError
from isoshard.core.layout.spec import axis_names
from isoshard.core.plan import Plan, PlanError
from isoshard.core.plan.freezing import UNSET
from isoshard.core.plan.model_leaves import ModelLeaf
from isoshard.core.plan.resolving import resolve_leaves
from isoshard.core.traced.traced_step import TracedStep

from ..axes.factor_layouts import ArrayLayout
from .named_dimensions import LeafGroup


def fixed_layouts(fixed: Plan | None, step: TracedStep, mesh: Mesh) -> dict[str, NamedSharding]:
    """What a plan decides of a step's parameters and batch, by name.

    Args:
        fixed: the user's plan; None decides nothing.
        step: the step.
        mesh: the mesh.

    Raises:
        PlanError: a rule names an axis that the mesh has not, or does not fit.
    """
    if fixed is None:
        return {}
    open_ended = _without_default(fixed)
    found: dict[str, NamedSharding] = {}
    leaves = _leaves(step, ("parameter", "buffer"))
    try:
        resolved = resolve_leaves(open_ended, leaves, mesh)
        undecided = set(resolved.unmatched)
        found |= {n: one for n, one in resolved.shardings.items() if n not in undecided}
        if any(one.inputs is not UNSET for one in fixed.factors):
            inputs = resolve_leaves(fixed.for_inputs(), _leaves(step, ("input",)), mesh)
            undecided = set(inputs.unmatched)
            found |= {n: one for n, one in inputs.shardings.items() if n not in undecided}
    except ShardingError as error:
        axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
        raise PlanError(
            f"fixed= does not go with the mesh ({axes}): {error}. Name one of its axes, or give "
            "search a mesh that has yours"
        ) from None
    return found


def forced_layouts(
    layouts: Mapping[str, NamedSharding], groups: Sequence[LeafGroup], mesh: Mesh
) -> dict[int, ArrayLayout]:
    """Layouts of groups as numbers of mesh axes.

    Args:
        layouts: by name of an input; of a group the first name that is there counts.
        groups: what is laid out.
        mesh: the mesh.
    """
    found: dict[int, ArrayLayout] = {}
    for number, group in enumerate(groups):
        name = next((name for name in group.names if name in layouts), None)
        if name is not None:
            found[number] = _numbered(layouts[name].spec, len(group.shape), mesh)
        elif group.names[0].startswith("closed_over."):
            found[number] = ((),) * len(group.shape)
    return found


def joined(fixed: Plan | None, found: Plan) -> Plan:
    """The user's rules, and behind them those found.

    Args:
        fixed: the user's.
        found: speaks of all that those leave.
    """
    if fixed is None:
        return found
    if fixed.product:
        return dataclasses.replace(
            found,
            activations=tuple(pair for one in fixed.factors for pair in one.activations),
            memory=tuple(pair for one in fixed.factors for pair in one.memory),
        )
    both = _without_default(fixed, UNSET).otherwise(found)
    if fixed.inputs is UNSET or found.inputs is UNSET:
        return both
    mine = dict(fixed.inputs)
    more = {pattern: spec for pattern, spec in found.inputs if pattern not in mine}
    return dataclasses.replace(both, inputs=mine | more)


def _without_default(plan: Plan, default: object = None) -> Plan:
    if plan.product:
        factors = tuple(dataclasses.replace(one, default=default) for one in plan.product)
        return dataclasses.replace(plan, product=factors)
    return dataclasses.replace(plan, default=default)


def _leaves(step: TracedStep, roles: Sequence[str]) -> list[ModelLeaf]:
    return [
        ModelLeaf(one.name, one.shape, one.dtype.name, itemsize=one.dtype.itemsize)
        for one in step.inputs
        if one.role in roles and not one.name.startswith("closed_over.")
    ]


def _numbered(spec: PartitionSpec, rank: int, mesh: Mesh) -> ArrayLayout:
    places = {name: number for number, name in enumerate(mesh.axis_names)}
    entries = (*spec, *(None,) * rank)[:rank]
    return tuple(
        tuple(places[name] for name in axis_names(one) if mesh.shape[name] > 1) for one in entries
    )
