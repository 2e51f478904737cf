"""Automatic sharding of a step by a plan search: `use_spmd(auto=True)`, `auto_policy`.

torch_xla passes the traced graph to XLA's auto-sharding. Here the first call of a compiled step is
planned by `iso.planner.search`: on the requested mesh, else on the best one; marks of the user are
kept. Parameters, gradients and optimizer state are then resharded, outputs of modules constrained,
and the arguments of each call sharded before it.

>>> import isoshard.torch_bridge as xs
>>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
>>> mesh = xs.Mesh(range(8), (8,), ("data",))
>>> model = xs.xla_distribute_module(model, mesh, xs.spmd.auto_policy)
>>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
>>> @xs.compile
... def step(x):
...     sgd.zero_grad()
...     loss = model(x).square().mean()
...     loss.backward()
...     sgd.step()
...     return loss
>>> x = torch.ones(8192, 64, device="jax")
>>> loss = step(x)
>>> xs.auto_plan(model).plan.inputs
(('*', P('data',)),)
>>> x.partition_spec
P('data',)
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.kit import CaptureError, Plan, ShardingError, auto, metrics
from isoshard.planner.plan_search.plan_rules import activation_rules_of
from isoshard.planner.plan_search.search_result import SearchResult, described
from isoshard.planner.plan_search.searching import search
from isoshard.torch_bridge.kit import (
    ActivationConstraints,
    ShardArguments,
    XLAShardedTensor,
    auto_mesh,
    auto_spmd,
    first_layouts,
    forward_hooks,
    forward_pre_hooks,
    get_global_mesh,
    line_of,
    marks,
    modules,
    pytree,
    unplanned_steps,
)

from .assembled_step import argument_paths
from .step_models import StepModel, layouts_of, models_of, walk_step


@dataclasses.dataclass(frozen=True)
class AutomaticLayout:
    """The plan that was applied to a model.

    Attributes:
        result: of the search.
        trains: whether it was for a step with an optimizer.
        constraints: of the outputs of its modules.
    """

    result: SearchResult
    trains: bool
    constraints: ActivationConstraints | None


_LAYOUTS: weakref.WeakKeyDictionary[torch.nn.Module, AutomaticLayout] = weakref.WeakKeyDictionary()


def automatic_plan(module: torch.nn.Module) -> SearchResult | None:
    """The search result by which a model was sharded; None if it was not."""
    layout = _LAYOUTS.get(module)
    for model, model_layout in _LAYOUTS.items() if layout is None else ():
        if any(child is module for child in model.modules()):
            layout = model_layout
    return None if layout is None else layout.result


def shard_step(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardArguments:
    """Search a plan for a step before its first run, and shard its models by it.

    A model that was sharded for another step keeps its sharding, unless this step trains it and
    the other did not.

    Returns:
        A function that shards the arguments of each call. It does nothing where no plan was
        requested or none can be found; then there is a warning.

    Raises:
        ShardingError: no plan fits in memory; or tensors are marked on several meshes.
    """
    state = _StepState(step, args, kwargs)
    if not auto_spmd() and state.requested_mesh is None:
        return _keep_arguments
    unplanned_steps.compiled()
    reason = state.unclear()
    if reason is None:
        present = state.present()
        if present is not None:
            return BatchLayouts(step, present)
        try:
            result = state.search()
        except CaptureError as error:
            reason = str(error)
        else:
            state.shard(result)
            return BatchLayouts(step, result)
    unplanned_steps.warn_unplanned(line_of(step), reason)
    return _keep_arguments


def _keep_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Leave the arguments as they are."""


class _StepState:
    """The models, optimizers and arguments that a step reads."""

    def __init__(self, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self.step, self.args, self.kwargs = step, args, kwargs
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        paths = argument_paths(step, args, kwargs)
        self.walk = walk_step(step, leaves, paths)
        self.arguments = dict(zip(paths, leaves, strict=True))
        self.models = [
            model
            for model in models_of(self.walk, self.arguments)
            if any(True for _ in modules.tensors(model.module))
        ]
        meshes = [first_layouts.requested_mesh(model.module.modules()) for model in self.models]
        self.requested_mesh = next((mesh for mesh in meshes if mesh is not None), None)
        self.planned = [
            model
            for model, mesh in zip(self.models, meshes, strict=True)
            if mesh is not None or auto_spmd()
        ]
        self.tensors = {
            model.prefix + name: tensor
            for model in self.models
            for name, tensor in modules.tensors(model.module)
        }
        ids = set(map(id, self.tensors.values()))
        self.batch = {
            path: leaf
            for path, leaf in self.arguments.items()
            if isinstance(leaf, torch.Tensor) and id(leaf) not in ids
        }

    def unclear(self) -> str | None:
        """Why the step cannot be planned, as far as that is seen before it is traced."""
        if jax.process_count() > 1 and jax.devices()[0].platform == "cpu":
            return "rates of CPUs are measured, so processes might find different plans."
        if not self.models:
            return "it reads no module with parameters, whose tensors a plan could name."
        if any(model.prefix for model in self.models):
            names = " and ".join(model.name for model in self.models)
            return f"{names} have tensors of the same names, which rules cannot distinguish."
        return None

    def present(self) -> SearchResult | None:
        """The search result of another step with the same models."""
        layouts = [_LAYOUTS.get(model.module) for model in self.planned]
        for layout in layouts:
            if layout is None or (self.walk.optimizers and not layout.trains):
                return None
        return layouts[0].result if layouts and layouts[0] is not None else None

    def search(self) -> SearchResult:
        """Search a plan; tensors with marks, and models that are not to be planned, are fixed."""
        declared = self._user_shardings(self.tensors)
        if self.requested_mesh is not None:
            for model in self.models:
                if model not in self.planned:
                    declared |= self._current_shardings(model, self.requested_mesh.get_jax_mesh())
        batch = self._user_shardings(self.batch)
        mesh = self._mesh({**declared, **batch})
        fixed = _fixed(declared, batch, self.tensors)
        return search(self.step, self.args, mesh, kwargs=self.kwargs, fixed=fixed)

    def shard(self, result: SearchResult) -> None:
        """Shard the models of the step, and record the plan in the report."""
        layouts = layouts_of(self.models, result.mesh, result.plan)[0]
        moved = 0
        tensors = [t for model in self.planned for _, t in modules.tensors(model.module)]
        for tensor in tensors:
            sharding = layouts[id(tensor)].layout
            if isinstance(tensor, XLAShardedTensor) and first_layouts.user_sharding(tensor) is None:
                for follower in (tensor, *self._following(tensor)):
                    marks.annotate(follower, sharding)
                    first_layouts.note_for_now(follower)
                    metrics.count("plans.laid_out")
                    metrics.count("plans.laid_out_bytes", follower.nbytes)
                moved += 1
        for model in self.planned:
            before = _LAYOUTS.get(model.module)
            if before is not None and before.constraints is not None:
                before.constraints.remove()
            constraints = _constraints(model, result)
            _LAYOUTS[model.module] = AutomaticLayout(
                result, bool(self.walk.optimizers), constraints
            )
        metrics.count("plans.found")
        metrics.record_plan(
            line_of(self.step),
            f"{described(result.mesh)}, {moved} of {len(self.tensors)} tensors laid out by what "
            f"was found in {result.seconds_taken:.1f} s; "
            "isoshard.torch_bridge.auto_plan(model) says it",
        )

    def _user_shardings(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, NamedSharding]:
        shardings = {name: first_layouts.user_sharding(tensor) for name, tensor in tensors.items()}
        return {name: sharding for name, sharding in shardings.items() if sharding is not None}

    def _current_shardings(self, model: StepModel, mesh: Mesh) -> dict[str, NamedSharding]:
        replicated = NamedSharding(mesh, PartitionSpec())
        shardings = {
            name: marks.placed(tensor) if isinstance(tensor, XLAShardedTensor) else None
            for name, tensor in modules.tensors(model.module)
        }
        return {name: current or replicated for name, current in shardings.items()}

    def _mesh(self, marked: Mapping[str, NamedSharding]) -> Mesh | int:
        """The requested mesh, or that of marks; the number of devices without either."""
        meshes = {name: auto(sharding.mesh) for name, sharding in marked.items()}
        if self.requested_mesh is not None:
            mesh, source = self.requested_mesh.get_jax_mesh(), "the plan is for"
        elif meshes:
            first = next(iter(meshes))
            mesh, source = meshes[first], f"{first} is marked on"
        elif get_global_mesh() is not None or os.environ.get("XLA_AUTO_SPMD_MESH"):
            mesh, source = auto_mesh().get_jax_mesh(), "the plan is for"
        else:
            return jax.device_count()
        mesh = auto(mesh)
        others = [
            f"{name} on {described(other)}" for name, other in meshes.items() if other != mesh
        ]
        if others:
            raise ShardingError(
                f"{line_of(self.step)}: the step is to be sharded automatically over one mesh; "
                f"{source} {described(mesh)}, and {', '.join(others[:5])}"
                f"{', ..' if len(others) > 5 else ''}. Mark everything on one mesh."
            )
        return mesh

    def _following(self, tensor: XLAShardedTensor) -> Iterable[XLAShardedTensor]:
        """A parameter's gradient, and the state of its shape that optimizers keep."""
        followers = [tensor.grad] if tensor.is_leaf else []
        for optimizer in self.walk.optimizers:
            followers += optimizer.state.get(tensor, {}).values()
        sharding = marks.placed(tensor)
        for follower in followers:
            if isinstance(follower, XLAShardedTensor) and follower.shape == tensor.shape:
                present = marks.marked(follower)
                if present is None or present == sharding:
                    yield follower


def _fixed(
    marked: Mapping[str, NamedSharding],
    batch: Mapping[str, NamedSharding],
    tensors: Mapping[str, torch.Tensor],
) -> Plan | None:
    """Marks as a plan whose rules match these tensors only."""
    if not marked and not batch:
        return None
    split = {name: marked[name].spec if name in marked else PartitionSpec() for name in tensors}
    unsplit = {
        name: PartitionSpec("whole" if name in marked and not any(split[name]) else None)
        for name in tensors
    }
    rules: dict[str, Any] = dict(
        activation_rules_of({n: _short(axis) for n, axis in split.items()})
    )
    rules |= dict.fromkeys(activation_rules_of({n: _short(spec) for n, spec in unsplit.items()}))
    inputs: dict[str, Any] = (
        {"inputs": {n: axis.spec for n, axis in batch.items()}} if batch else {}
    )
    return Plan(rules, **inputs)


def _short(spec: PartitionSpec) -> PartitionSpec:
    """A spec without None at its end."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _constraints(model: StepModel, result: SearchResult) -> ActivationConstraints | None:
    """Hooks that constrain the outputs of modules, unless the user has set such hooks."""
    plan, module = result.plan, model.module
    names = [name for name, _ in module.named_modules()]
    if not plan.activations or not any(map(plan.activation_for, names)):
        return None
    for child in module.modules():
        for hook in (*forward_pre_hooks(child).values(), *forward_hooks(child).values()):
            if hasattr(hook, "constraint_key"):
                return None
    return ActivationConstraints(module, result.mesh, plan)


class BatchLayouts:
    """Shards arguments without marks by the `inputs` of a plan, before each call.

    Args:
        step: the function.
        result: the plan and its mesh.
    """

    def __init__(self, step: Any, result: SearchResult):
        """See the class."""
        self._step, self._mesh = step, result.mesh
        has_inputs = any(isinstance(factor.inputs, tuple) for factor in result.plan.factors)
        self._plan = result.plan.for_inputs() if has_inputs else None
        self._cache: dict[tuple[str, tuple[int, ...]], NamedSharding | None] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Shard the arguments; those whose axes do not divide are left."""
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        if self._plan is None or not any(map(_is_open, leaves)):
            return
        paths: Sequence[str] = argument_paths(self._step, args, kwargs)
        for path, leaf in zip(paths, leaves, strict=True):
            if _is_open(leaf):
                sharding = self._layout(path, tuple(leaf.shape))
                if sharding is not None and marks.placed(leaf) != sharding:
                    marks.annotate(leaf, sharding)
                    first_layouts.note_for_now(leaf)

    def _layout(self, path: str, shape: tuple[int, ...]) -> NamedSharding | None:
        if (path, shape) not in self._cache and self._plan is not None:
            try:
                sharding = self._plan.resolve({path: shape}, self._mesh).shardings[path]
            except ShardingError:  # another batch than the one that was planned
                sharding = None
            self._cache[path, shape] = sharding
        return self._cache.get((path, shape))


def _is_open(leaf: Any) -> bool:
    """Whether an argument is a tensor on the device without a mark."""
    return isinstance(leaf, XLAShardedTensor) and leaf.ndim > 0 and marks.marked(leaf) is None
