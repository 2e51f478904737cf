"""The models that a step reads: their names, and the sharding of each tensor by a plan."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.kit import Plan, Role, ShardingError
from isoshard.torch_bridge.kit import ObjectWalk, modules


@dataclasses.dataclass(frozen=True)
class Named:
    """Name, role and sharding of a tensor.

    Attributes:
        name: the name that rules of a plan match.
        role: see `isoshard.core.traced.traced_step.Role`.
        layout: its sharding.
        follows: of optimizer state, the name of its parameter.
    """

    name: str
    role: Role
    layout: NamedSharding
    follows: str | None = None


@dataclasses.dataclass(frozen=True)
class StepModel:
    """One model that a step reads.

    Attributes:
        module: the outermost.
        name: of the variable or attribute that refers to it.
        prefix: of the names of its parameters and modules: empty, or its name
            where another model has equal ones.
    """

    module: torch.nn.Module
    name: str
    prefix: str


def walk_step(step: Any, leaves: Sequence[Any], paths: Sequence[str]) -> ObjectWalk:
    """The objects that a step reads: its closure, globals and arguments, with all they refer to.

    Args:
        step: a function, a module or a bound method.
        leaves: its arguments; those that are no tensors are searched.
        paths: their names.
    """
    walk = ObjectWalk()
    walk.walk(step, getattr(step, "__name__", type(step).__name__))
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, torch.Tensor):
            walk.walk(leaf, path)
    walk.walk_globals({})
    return walk


def models_of(walk: ObjectWalk, arguments: Mapping[str, Any]) -> list[StepModel]:
    """The models that a step reads: modules that are in no other module."""
    inside = {id(child) for module in walk.modules for child in list(module.modules())[1:]}
    roots = [module for module in walk.modules if id(module) not in inside]
    names = _variables(walk, roots, arguments)
    count = collections.Counter(
        name for root in roots for name in {*dict(modules.tensors(root)), *_children(root)}
    )
    clash = any(times > 1 for times in count.values())
    taken: set[str] = set()
    models = []
    for index, root in enumerate(roots):
        name = names.get(id(root), f"model{index}")
        name = f"{name}{index}" if name in taken else name
        taken.add(name)
        models.append(StepModel(root, name, f"{name}." if clash else ""))
    return models


def _children(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_modules() if name}


def _variables(
    walk: ObjectWalk, roots: Sequence[torch.nn.Module], arguments: Mapping[str, Any]
) -> dict[int, str]:
    """The variables or attributes that refer to modules, by id of the module."""
    root_ids = {id(root) for root in roots}
    names = {id(value): name for name, value in arguments.items() if id(value) in root_ids}
    for source in walk.sources:
        for index, value in enumerate(source.read()):
            if id(value) in root_ids and id(value) not in names:
                names[id(value)] = source.name(index).rpartition(".")[2]
    return names


def layouts_of(
    models: Sequence[StepModel], mesh: Mesh, plan: Any
) -> tuple[dict[int, Named], dict[str, ShardingError]]:
    """The name and sharding of each tensor of the models.

    Args:
        models: of the step.
        mesh: the mesh of the plan.
        plan: a `Plan`, one spec for all, or None: all is replicated.

    Returns:
        By id of the tensor; and of models that the plan does not fit, where there are several, the
        error by the model's name: it counts if the step uses the model.

    Raises:
        ShardingError: the plan does not fit the only model.
    """
    named: dict[int, Named] = {}
    errors: dict[str, ShardingError] = {}
    replicated = NamedSharding(mesh, PartitionSpec())
    with_tensors = [model for model in models if dict(modules.tensors(model.module))]
    for model in with_tensors:
        layouts: Mapping[str, NamedSharding] = {}
        if plan is not None:
            try:
                layouts = modules.layout(model.module, mesh, plan)
            except ShardingError as error:
                if len(with_tensors) == 1:
                    raise
                errors[model.name] = error
        parameters = {id(parameter) for parameter in model.module.parameters()}
        for name, tensor in modules.tensors(model.module):
            role: Role = "parameter" if id(tensor) in parameters else "buffer"
            layout = layouts.get(name, replicated)
            named.setdefault(id(tensor), Named(model.prefix + name, role, layout))
    return named, errors


def input_layouts(
    shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, plan: Any
) -> dict[str, NamedSharding]:
    """The sharding of the batch: by the plan's `inputs`, and replicated without a rule.

    Raises:
        PlanError: the plan does not fit the batch.
    """
    replicated = dict.fromkeys(shapes, NamedSharding(mesh, PartitionSpec()))
    has_inputs = isinstance(plan, Plan) and any(
        isinstance(factor.inputs, Mapping | tuple) for factor in plan.factors
    )
    if not has_inputs or not shapes:
        return replicated
    with_axes = {path: shape for path, shape in shapes.items() if shape}
    return replicated | plan.for_inputs().resolve(with_axes, mesh).shardings
