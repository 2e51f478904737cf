"""Layouts that a search finds for a step whose script says none: `use_spmd(auto=True)`, `auto_policy`.

torch_xla gives the traced graph to XLA's auto-sharding pass. Here the first call of a compiled step
is planned as `iso.planner.search` plans it: on the mesh that was asked for, else on the mesh found;
what the user has marked stays. Parameters, gradients and optimizer state are then laid out, modules
are told how their outputs lie, and the arguments of each call are laid out before it.

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
"""  # noqa: E501

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
from .found_models import FoundModel, behind, layouts_of, models_of


@dataclasses.dataclass(frozen=True)
class AutomaticLayout:
    """What was found for a model.

    Attributes:
        result: of the search.
        trains: whether it was for a step with an optimizer.
        constraints: of the outputs of its modules.
    """

    result: SearchResult
    trains: bool
    constraints: ActivationConstraints | None


_FOUND: weakref.WeakKeyDictionary[torch.nn.Module, AutomaticLayout] = weakref.WeakKeyDictionary()


def found_for(module: torch.nn.Module) -> SearchResult | None:
    """The result of the search by which a model was laid out; None if none was."""
    result = _FOUND.get(module)
    for model, one in _FOUND.items() if result is None else ():
        if any(child is module for child in model.modules()):
            result = one
    return None if result is None else result.result


def lay_out(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ShardArguments:
    """Find a plan for a step that is about to run for the first time, and lay its models out by it.

    A model that was laid out for another step keeps its layout, unless this step trains it and that
    one did not.

    Returns:
        What lays out the arguments of each call. It does nothing where no plan was asked for or
        none can be found; then there is a warning.

    Raises:
        ShardingError: no plan fits in memory; or tensors are marked on several meshes.
    """
    behind_it = _Behind(step, args, kwargs)
    if not auto_spmd() and behind_it.mesh_asked_for is None:
        return _nothing
    unplanned_steps.compiled()
    reason = behind_it.unclear()
    if reason is None:
        found_plans = behind_it.known()
        if found_plans is not None:
            return BatchLayouts(step, found_plans)
        try:
            result = behind_it.search()
        except CaptureError as error:
            reason = str(error)
        else:
            behind_it.place(result)
            return BatchLayouts(step, result)
    unplanned_steps.warn_unplanned(line_of(step), reason)
    return _nothing


def _nothing(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Leave the arguments as they are."""


class _Behind:
    """The models, optimizers and arguments of a step."""

    def __init__(self, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]):
        self.step, self.args, self.kwargs = step, args, kwargs
        leaves = pytree.tree_leaves((args, dict(kwargs)))
        paths = argument_paths(step, args, kwargs)
        self.reached = behind(step, leaves, paths)
        self.arguments = dict(zip(paths, leaves, strict=True))
        self.models = [
            model
            for model in models_of(self.reached, self.arguments)
            if any(True for _ in modules.tensors(model.module))
        ]
        meshes = [first_layouts.requested_mesh(model.module.modules()) for model in self.models]
        self.mesh_asked_for = next((mesh for mesh in meshes if mesh is not None), None)
        self.wanted = [
            model
            for model, mesh in zip(self.models, meshes, strict=True)
            if mesh is not None or auto_spmd()
        ]
        self.tensors = {
            model.prefix + name: tensor
            for model in self.models
            for name, tensor in modules.tensors(model.module)
        }
        mine = set(map(id, self.tensors.values()))
        self.batch = {
            path: leaf
            for path, leaf in self.arguments.items()
            if isinstance(leaf, torch.Tensor) and id(leaf) not in mine
        }

    def unclear(self) -> str | None:
        """Why the step cannot be planned, as far as that is seen before it is traced."""
        if jax.process_count() > 1 and jax.devices()[0].platform == "cpu":
            return "what CPUs can do is measured, and processes might find different plans."
        if not self.models:
            return "no module with parameters is behind it, whose tensors a plan could name."
        if any(model.prefix for model in self.models):
            names = " and ".join(model.name for model in self.models)
            return f"{names} have tensors of the same names, so that no rule tells them apart."
        return None

    def known(self) -> SearchResult | None:
        """What was found for another step with the same models."""
        result = [_FOUND.get(model.module) for model in self.wanted]
        for one in result:
            if one is None or (self.reached.optimizers and not one.trains):
                return None
        return result[0].result if result and result[0] is not None else None

    def search(self) -> SearchResult:
        """Find a plan; what the user marked, and models that nobody asked about, stay."""
        declared = self._said(self.tensors)
        if self.mesh_asked_for is not None:
            for model in self.models:
                if model not in self.wanted:
                    declared |= self._as_they_lie(model, self.mesh_asked_for.get_jax_mesh())
        batch = self._said(self.batch)
        mesh = self._mesh({**declared, **batch})
        fixed = _fixed(declared, batch, self.tensors)
        return search(self.step, self.args, mesh, kwargs=self.kwargs, fixed=fixed)

    def place(self, result: SearchResult) -> None:
        """Lay out what is behind the step, and note what was found."""
        layouts = layouts_of(self.models, result.mesh, result.plan)[0]
        moved = 0
        for tensor in [t for axis in self.wanted for _, t in modules.tensors(axis.module)]:
            sharding = layouts[id(tensor)].layout
            if isinstance(tensor, XLAShardedTensor) and first_layouts.user_sharding(tensor) is None:
                for one in (tensor, *self._following(tensor)):
                    marks.annotate(one, sharding)
                    first_layouts.note_for_now(one)
                    metrics.count("plans.laid_out")
                    metrics.count("plans.laid_out_bytes", one.nbytes)
                moved += 1
        for model in self.wanted:
            before = _FOUND.get(model.module)
            if before is not None and before.constraints is not None:
                before.constraints.remove()
            constraints = _constraints(model, result)
            _FOUND[model.module] = AutomaticLayout(
                result, bool(self.reached.optimizers), constraints
            )
        metrics.count("plans.found")
        metrics.record_plan(
            line_of(self.step),
            f"{described(result.mesh)}, {moved} of {len(self.tensors)} tensors laid out by what "
            f"was found in {result.seconds_taken:.1f} s; "
            "isoshard.torch_bridge.auto_plan(model) says it",
        )

    def _said(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, NamedSharding]:
        result = {name: first_layouts.user_sharding(tensor) for name, tensor in tensors.items()}
        return {name: one for name, one in result.items() if one is not None}

    def _as_they_lie(self, model: FoundModel, mesh: Mesh) -> dict[str, NamedSharding]:
        sharding = NamedSharding(mesh, PartitionSpec())
        result = {
            name: marks.placed(tensor) if isinstance(tensor, XLAShardedTensor) else None
            for name, tensor in modules.tensors(model.module)
        }
        return {name: one or sharding for name, one in result.items()}

    def _mesh(self, text: Mapping[str, NamedSharding]) -> Mesh | int:
        """The requested mesh, or that of marks; a number of devices without either."""
        meshes = {name: auto(word.mesh) for name, word in text.items()}
        if self.mesh_asked_for is not None:
            mesh, whose = self.mesh_asked_for.get_jax_mesh(), "the plan is for"
        elif meshes:
            first = next(iter(meshes))
            mesh, whose = meshes[first], f"{first} is marked on"
        elif get_global_mesh() is not None or os.environ.get("XLA_AUTO_SPMD_MESH"):
            mesh, whose = auto_mesh().get_jax_mesh(), "the plan is for"
        else:
            return jax.device_count()
        mesh = auto(mesh)
        others = [f"{name} on {described(one)}" for name, one in meshes.items() if one != mesh]
        if others:
            raise ShardingError(
                f"{line_of(self.step)}: the step is to be laid out automatically over one mesh; "
                f"{whose} {described(mesh)}, and {', '.join(others[:5])}"
                f"{', ..' if len(others) > 5 else ''}. Mark everything on one mesh."
            )
        return mesh

    def _following(self, tensor: XLAShardedTensor) -> Iterable[XLAShardedTensor]:
        """A parameter's gradient, and the state of its shape that optimizers keep."""
        gradients = [tensor.grad] if tensor.is_leaf else []
        for optimizer in self.reached.optimizers:
            gradients += optimizer.state.get(tensor, {}).values()
        lies = marks.placed(tensor)
        for one in gradients:
            if isinstance(one, XLAShardedTensor) and one.shape == tensor.shape:
                present = marks.marked(one)
                if present is None or present == lies:
                    yield one


def _fixed(
    text: Mapping[str, NamedSharding],
    batch: Mapping[str, NamedSharding],
    tensors: Mapping[str, torch.Tensor],
) -> Plan | None:
    """Marks as rules by name, which mean no other tensor."""
    if not text and not batch:
        return None
    split = {name: text[name].spec if name in text else PartitionSpec() for name in tensors}
    full = {
        name: PartitionSpec("whole" if name in text and not any(split[name]) else None)
        for name in tensors
    }
    rules: dict[str, Any] = dict(
        activation_rules_of({n: _short(axis) for n, axis in split.items()})
    )
    rules |= dict.fromkeys(activation_rules_of({n: _short(one) for n, one in full.items()}))
    inputs: dict[str, Any] = (
        {"inputs": {n: axis.spec for n, axis in batch.items()}} if batch else {}
    )
    return Plan(rules, **inputs)


def _short(spec: PartitionSpec) -> PartitionSpec:
    """Without None at its end."""
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def _constraints(model: FoundModel, result: SearchResult) -> ActivationConstraints | None:
    """Hooks that lay out the outputs of modules, unless the user has put such hooks there."""
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
    """Lays out the arguments of a call that nobody has marked, as a plan's inputs say.

    Args:
        step: what is called.
        found: the plan and its mesh.
    """

    def __init__(self, step: Any, result: SearchResult):
        """See the class."""
        self._step, self._mesh = step, result.mesh
        says = any(isinstance(factor.inputs, tuple) for factor in result.plan.factors)
        self._plan = result.plan.for_inputs() if says else None
        self._known: dict[tuple[str, tuple[int, ...]], NamedSharding | None] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Lay them out; what does not divide stays as it is."""
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
        if (path, shape) not in self._known and self._plan is not None:
            try:
                result = self._plan.resolve({path: shape}, self._mesh).shardings[path]
            except ShardingError:  # another batch than the one that was planned
                result = None
            self._known[path, shape] = result
        return self._known.get((path, shape))


def _is_open(leaf: Any) -> bool:
    """Whether an argument is a tensor on the device that nobody has marked."""
    return isinstance(leaf, XLAShardedTensor) and leaf.ndim > 0 and marks.marked(leaf) is None
