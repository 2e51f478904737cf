"""A step of torch as a traced step: for any mesh and plan, without data and without weights.

>>> import isoshard.torch_bridge
>>> from isoshard import Plan
>>> from isoshard.planner.machine.topologies import topology
>>> with torch.device("meta"):
...     model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
>>> adam = torch.optim.AdamW(model.parameters())
>>> def step(x):
...     adam.zero_grad()
...     loss = model(x).square().mean()
...     loss.backward()
...     adam.step()
...     return loss
>>> mesh = topology("v5e:16x16").mesh((16, 16), ("data", "model"))
>>> plan = Plan.data_parallel("data") * Plan({"0.weight": ("model",), "*": ()})
>>> traced = traced_step(step, (torch.empty(512, 1024, device="meta"),), {}, mesh, plan)
>>> for leaf in traced.inputs[:3]:
...     print(leaf.name, leaf.role, leaf.shape, leaf.sharding.spec)
0.weight parameter (4096, 1024) P('model',)
0.bias parameter (4096,) P()
x input (512, 1024) P('data',)
>>> {leaf.name for leaf in traced.inputs if leaf.follows == "0.weight"} == {
...     "exp_avg.0.weight", "exp_avg_sq.0.weight"}
True
>>> traced.results[-1].name, traced.modules
('result', ('0', '1'))
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import torch
from jax.sharding import Mesh

from isoshard.core.kit import Plan, TracedStep, as_mesh, auto, uncollected
from isoshard.torch_bridge.kit import (
    ActivationConstraints,
    CompiledStep,
    forward_hooks,
    forward_pre_hooks,
    lazy_tensor,
    line_of,
    logical_dtype,
    pytree,
)

from .assembled_step import argument_paths, assembled
from .optimizer_slots import keep_slots, make_slots
from .placeholder_tensors import PlaceholderTensors
from .planned_recording import PlannedRecording
from .planning_tape import ModuleOutputs
from .step_models import Named, StepModel, input_layouts, layouts_of, models_of, walk_step


def traced_step(
    step: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Any, plan: Any
) -> TracedStep:
    """Trace a step of torch for a mesh and a plan; afterwards everything is as it was before.

    Args:
        step: a function, a module, a bound method, or a step of `xs.compile`. Models and optimizers
            are its arguments or what it closes over, on "meta", on the CPU or on the `jax` device.
        args: its arguments. Tensors on any device, of which only shape and dtype count; or
            `jax.ShapeDtypeStruct`s.
        kwargs: its keyword arguments.
        mesh: over devices that are here or described.
        plan: of the parameters, the batch (`inputs`) and activations; None: all is replicated.

    Raises:
        CaptureError: the step reads the value of a tensor; the message names the line.
        PlanError: the plan does not fit the model or the batch.
        ShardingError: a mark inside the step is on a mesh that has other axes.
        TypeError: the step cannot be called.
    """
    if not callable(step):
        raise TypeError(
            f"a step must be a function of tensors, a module or a step of xs.compile, not "
            f"{type(step).__name__}"
        )
    mesh = auto(as_mesh(mesh))
    with uncollected():
        return _Planning(step, args, kwargs, mesh, plan).traced()


class _Planning:
    """One step on its way to being traced."""

    def __init__(
        self, step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mesh: Mesh, plan: Any
    ):
        self.step = step.step if isinstance(step, CompiledStep) else step
        self.mesh, self.plan = mesh, plan
        self.leaves, self.structure = pytree.tree_flatten((args, dict(kwargs)))
        self.paths = argument_paths(self.step, args, kwargs)
        self.walk = walk_step(self.step, self.leaves, self.paths)
        by_name = dict(zip(self.paths, self.leaves, strict=True))
        self.models = models_of(self.walk, by_name)
        self.named, self.errors = layouts_of(self.models, mesh, plan)
        self.inputs = self._inputs()

    def traced(self) -> TracedStep:
        named = {**self.inputs, **self.named}
        placeholders = PlaceholderTensors(self.walk, named, self.mesh)
        marks = ModuleOutputs(self._module_names(), gradients=self.plan is None)
        with placeholders, self._activations(), marks as outputs:
            leaves = self._arguments(placeholders)
            arguments = [leaf for leaf in leaves if isinstance(leaf, lazy_tensor.LazyTensor)]
            make_slots(
                self.walk.optimizers,
                lambda step: PlannedRecording(step, self.walk, (), self.mesh),
                placeholders,
            )
            recording = self._recorded(leaves, arguments)
            optimizers = self.walk.optimizers
            if keep_slots(optimizers, recording, placeholders.names, placeholders):
                recording.undo()
                recording.forget()
                placeholders.again()
                recording = self._recorded(leaves, arguments)
            try:
                return self._assembled(recording, placeholders, outputs.used)
            finally:
                recording.undo()
                recording.forget()

    def _recorded(self, leaves: list[Any], arguments: list[Any]) -> PlannedRecording:
        recording = PlannedRecording(self.step, self.walk, arguments, self.mesh)
        args, kwargs = pytree.tree_unflatten(leaves, self.structure)
        try:
            recording.run(args, kwargs)
        except BaseException:
            recording.undo()
            recording.forget()
            raise
        return recording

    def _arguments(self, placeholders: PlaceholderTensors) -> list[Any]:
        """The arguments with tensors without elements."""
        leaves, cache = [], {}
        for leaf in self.leaves:
            if id(leaf) not in self.inputs or id(leaf) in placeholders.tensors:
                leaves.append(placeholders.of(leaf))
            else:
                if id(leaf) not in cache:
                    cache[id(leaf)] = placeholders.placeholder(
                        _as_tensor(leaf), self.inputs[id(leaf)]
                    )
                leaves.append(cache[id(leaf)])
        return leaves

    def _inputs(self) -> dict[int, Named]:
        """The name and sharding of each array of the batch."""
        batch = {
            path: leaf
            for path, leaf in zip(self.paths, self.leaves, strict=True)
            if _has_shape(leaf) and id(leaf) not in self.named
        }
        shapes = {path: tuple(leaf.shape) for path, leaf in batch.items()}
        layouts = input_layouts(shapes, self.mesh, self.plan)
        named: dict[int, Named] = {}
        for path, leaf in batch.items():
            named.setdefault(id(leaf), Named(path, "input", layouts[path]))
        return named

    def _module_names(self) -> dict[int, str]:
        return {
            id(module): model.prefix + name
            for model in reversed(self.models)
            for name, module in model.module.named_modules()
            if name
        }

    @contextlib.contextmanager
    def _activations(self) -> Iterator[None]:
        """The plan's constraints on outputs of modules, instead of those that are set."""
        if not isinstance(self.plan, Plan) or not _has_activations(self.plan):
            yield
            return
        removed = [_without_constraints(model) for model in self.models]
        handles = []
        try:
            for model in self.models:
                names = [name for name, _ in model.module.named_modules()]
                if len(self.models) == 1 or any(map(self.plan.activation_for, names)):
                    handles.append(ActivationConstraints(model.module, self.mesh, self.plan))
            yield
        finally:
            for handle in handles:
                handle.remove()
            for hooks, before in [pair for pairs in removed for pair in pairs]:
                hooks.clear()
                hooks.update(before)

    def _assembled(
        self, recording: PlannedRecording, placeholders: PlaceholderTensors, used: tuple[str, ...]
    ) -> TracedStep:
        """The recorded step as a program.

        Raises:
            ShardingError: it uses a model that the plan does not fit.
        """
        for model in self.models:
            if model.name in self.errors:
                for tensor in (*model.module.parameters(), *model.module.buffers()):
                    if id(getattr(tensor, "_storage", None)) in recording.log.storages:
                        raise self.errors[model.name]
        name = getattr(self.step, "__name__", type(self.step).__name__)
        return assembled(recording, placeholders.names, self.mesh, name, line_of(self.step), used)


def _has_activations(plan: Plan) -> bool:
    return any(factor.activations for factor in plan.factors)


def _without_constraints(model: StepModel) -> list[tuple[dict[int, Any], dict[int, Any]]]:
    """Remove the constraints of another mesh from a model; returns the hooks from before."""
    removed = []
    for module in model.module.modules():
        for hooks in (forward_pre_hooks(module), forward_hooks(module)):
            if any(hasattr(hook, "constraint_key") for hook in hooks.values()):
                removed.append((hooks, dict(hooks)))
                for key in [key for key, hook in hooks.items() if hasattr(hook, "constraint_key")]:
                    del hooks[key]
    return removed


def _has_shape(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | jax.ShapeDtypeStruct | jax.Array)


def _as_tensor(leaf: Any) -> torch.Tensor:
    """A tensor of the shape and dtype of a leaf."""
    if isinstance(leaf, torch.Tensor):
        return leaf
    return torch.empty(tuple(leaf.shape), dtype=logical_dtype(leaf.dtype), device="meta")
