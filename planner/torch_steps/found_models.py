"""The models behind a step: their names, and the layout that a plan gives each of their tensors."""

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
    """What a tensor is called, and what it is for.

    Attributes:
        name: as a plan knows it.
        role: see `isoshard.core.traced.traced_step.Role`.
        layout: where it goes.
        follows: of optimizer state, the name of its parameter.
    """

    name: str
    role: Role
    layout: NamedSharding
    follows: str | None = None


@dataclasses.dataclass(frozen=True)
class FoundModel:
    """One model behind a step.

    Attributes:
        module: the outermost.
        name: of the variable that holds it.
        prefix: what stands before the names of its parameters and modules: nothing, or its name
            where another model has equal ones.
    """

    module: torch.nn.Module
    name: str
    prefix: str


def behind(step: Any, leaves: Sequence[Any], paths: Sequence[str]) -> ObjectWalk:
    """The objects behind a step: what it closes over and names, and what its arguments hold.

    Args:
        step: a function, a module or a bound method.
        leaves: its arguments; those that are no tensors are searched.
        paths: what they are called.
    """
    reachable = ObjectWalk()
    reachable.walk(step, getattr(step, "__name__", type(step).__name__))
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, torch.Tensor):
            reachable.walk(leaf, path)
    reachable.walk_globals({})
    return reachable


def models_of(result: ObjectWalk, arguments: Mapping[str, Any]) -> list[FoundModel]:
    """The models behind a step: modules that are inside no other."""
    inside = {id(child) for module in result.modules for child in list(module.modules())[1:]}
    roots = [module for module in result.modules if id(module) not in inside]
    names = _variables(result, roots, arguments)
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
        models.append(FoundModel(root, name, f"{name}." if clash else ""))
    return models


def _children(module: torch.nn.Module) -> set[str]:
    return {name for name, _ in module.named_modules() if name}


def _variables(
    result: ObjectWalk, roots: Sequence[torch.nn.Module], arguments: Mapping[str, Any]
) -> dict[int, str]:
    """The variables or attributes that hold modules."""
    root_ids = {id(root) for root in roots}
    names = {id(value): name for name, value in arguments.items() if id(value) in root_ids}
    for holder in result.sources:
        for index, value in enumerate(holder.read()):
            if id(value) in root_ids and id(value) not in names:
                names[id(value)] = holder.name(index).rpartition(".")[2]
    return names


def layouts_of(
    models: Sequence[FoundModel], mesh: Mesh, plan: Any
) -> tuple[dict[int, Named], dict[str, ShardingError]]:
    """What each tensor of the models is called, and how it will lie.

    Args:
        models: behind the step.
        mesh: what it is planned for.
        plan: a `Plan`, one spec for all, or None: all is replicated.

    Returns:
        By id of the tensor; and of models that the plan does not fit, where there are several, the
        error by the model's name: it counts if the step uses the model.

    Raises:
        ShardingError: the plan does not fit the only model.
    """
    named: dict[int, Named] = {}
    errors: dict[str, ShardingError] = {}
    sharding = NamedSharding(mesh, PartitionSpec())
    arguments = [model for model in models if dict(modules.tensors(model.module))]
    for model in arguments:
        layouts: Mapping[str, NamedSharding] = {}
        if plan is not None:
            try:
                layouts = modules.layout(model.module, mesh, plan)
            except ShardingError as error:
                if len(arguments) == 1:
                    raise
                errors[model.name] = error
        parameters = {id(parameter) for parameter in model.module.parameters()}
        for name, tensor in modules.tensors(model.module):
            role: Role = "parameter" if id(tensor) in parameters else "buffer"
            layout = layouts.get(name, sharding)
            named.setdefault(id(tensor), Named(model.prefix + name, role, layout))
    return named, errors


def input_layouts(
    shapes: Mapping[str, tuple[int, ...]], mesh: Mesh, plan: Any
) -> dict[str, NamedSharding]:
    """How the batch lies: as the plan's `inputs` say, and whole where they say nothing.

    Raises:
        PlanError: the plan does not fit the batch.
    """
    fromkeys = dict.fromkeys(shapes, NamedSharding(mesh, PartitionSpec()))
    has_activations = isinstance(plan, Plan) and any(
        isinstance(factor.inputs, Mapping | tuple) for factor in plan.factors
    )
    if not has_activations or not shapes:
        return fromkeys
    split = {path: shape for path, shape in shapes.items() if shape}
    return fromkeys | plan.for_inputs().resolve(split, mesh).shardings
