"""From a recorded step to a `TracedStep`: its program, and a name for every input and result."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.kit import StepInput, StepResult, TracedStep
from isoshard.torch_bridge.kit import (
    Assembly,
    CompileRequest,
    Notes,
    input_placement,
    plan_lowering,
    pytree,
    sharding_ids,
)

from .planned_recording import PlannedRecording
from .step_models import Named


def argument_paths(step: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Each leaf of the arguments by the name of its argument and its path in it.

    >>> def step(tokens, *rest, labels=None): ...
    >>> argument_paths(step, ({"a": 1, "b": [2]}, 3), {"labels": 4})
    ['tokens.a', 'tokens.b.0', 'rest.0', 'labels']
    """
    function = step.forward if isinstance(step, torch.nn.Module) else step
    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        bound, parameters = None, {}
    names: list[str] = []
    if bound is not None:
        for name in bound.arguments:
            if parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
                names += [f"{name}.{position}" for position in range(len(bound.arguments[name]))]
            elif parameters[name].kind in _POSITIONAL and len(names) < len(args):
                names.append(name)
    names += [f"argument{position}" for position in range(len(names), len(args))]
    paths = []
    for name, tree in [*zip(names, args, strict=False), *kwargs.items()]:
        for path, _ in pytree.tree_flatten_with_path(tree)[0]:
            paths.append(".".join([name, *map(key_text, path)]))
    return paths


_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)


def key_text(key: Any) -> str:
    """One step of a path in nested arguments or results."""
    for attribute in ("idx", "key", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def assembled(
    recording: PlannedRecording,
    names: Mapping[int, Named],
    mesh: Mesh,
    name: str,
    where: str,
    modules: tuple[str, ...],
) -> TracedStep:
    """Trace a recorded step."""
    names = dict(names)
    assembly = Assembly(recording, where)
    plan, escaped = assembly.plan()
    values = assembly.choose_results(plan)
    plan.live += tuple(sorted(escaped))  # results that the step stored in objects
    plan.result_layouts += (sharding_ids.UNPLACED,) * len(escaped)
    intern = sharding_ids.intern(NamedSharding(mesh, PartitionSpec()))
    result_layouts = {*recording.tape.marks, *plan.result_layouts} - {sharding_ids.UNPLACED}
    plan.placed = tuple(input_placement.layouts_on(intern, values, result_layouts)[1])
    plan.notes = Notes(recording.tape.origins(), recording.tape.outputs)
    inputs = _inputs(recording, names, plan, values)
    finer_mesh = _mesh_of(plan, mesh)
    with plan_lowering.tracing(plan, [_struct(leaf) for leaf in inputs]):
        program = _traced(plan, inputs, finer_mesh)
        results = _results(recording, names, assembly, plan, values)
    everywhere = NamedSharding(finer_mesh, PartitionSpec())
    if plan.lifted:
        double = np.dtype(np.float64)
        inputs.append(StepInput("numbers", "number", (plan.lifted,), double, everywhere))
    if plan.draws:
        words = (plan.draws, 3)
        inputs.append(StepInput("random", "random", words, np.dtype(np.uint32), everywhere))
    return TracedStep(
        name, "torch", program, tuple(inputs), tuple(results), finer_mesh, modules, wide=True
    )


def _mesh_of(plan: CompileRequest, mesh: Mesh) -> Mesh:
    """The mesh of all layouts: a finer one, if marks are on meshes of several shapes."""
    placed: Any = sharding_ids.sharding(plan.placed[0]) if plan.placed else None
    return mesh if placed is None else placed.mesh


def _struct(leaf: StepInput) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _traced(plan: CompileRequest, inputs: Sequence[StepInput], mesh: Mesh) -> Any:
    """The jaxpr; floats and random words are among its inputs only if there are any."""
    step = plan_lowering.traceable(plan)
    extra = plan_lowering.extra_inputs(plan)
    traced = [input_ for input_ in extra if input_.shape[0]]
    absent = [np.zeros(input_.shape, input_.dtype) for input_ in extra if not input_.shape[0]]

    def isoshard_step(*arguments: Any) -> Any:
        leaves, extra_leaves = arguments[: len(inputs)], list(arguments[len(inputs) :])
        scalars = extra_leaves.pop(0) if plan.lifted else absent[0]
        return step(*leaves, scalars, extra_leaves.pop(0) if plan.draws else absent[-1])

    structs = [_struct(leaf) for leaf in inputs]
    return jax.jit(isoshard_step, keep_unused=True).trace(*structs, *traced).jaxpr


def _inputs(
    recording: PlannedRecording,
    names: dict[int, Named],
    plan: CompileRequest,
    values: Sequence[Any],
) -> list[StepInput]:
    firsts = {id(first): storage for storage, first in recording.log.storages.values()}
    inputs, indices = [], {"host": 0, "closed_over": 0}
    for value, layout_id in zip(values, plan.placed, strict=True):
        storage = firsts.get(id(value))
        named = None if storage is None else names.get(id(storage))
        layout: Any = sharding_ids.sharding(layout_id)
        if named is None and storage is not None:
            names[id(storage)] = named = Named(f"memory.{len(names)}", "buffer", layout)
        if named is None:
            kind = "host" if id(value) in recording.cpu_ops.operands else "closed_over"
            named = Named(
                f"{kind}.{indices[kind]}", "number" if kind == "host" else "buffer", layout
            )
            indices[kind] += 1
        shape, dtype = tuple(value.array.shape), np.dtype(value.array.dtype)
        inputs.append(StepInput(named.name, named.role, shape, dtype, layout, named.follows))
    return inputs


def _results(
    recording: PlannedRecording,
    names: Mapping[int, Named],
    assembly: Assembly,
    plan: CompileRequest,
    values: Sequence[Any],
) -> list[StepResult]:
    positions = {id(value): position for position, value in enumerate(values)}
    names_of_slots: dict[int, tuple[str, int | None]] = {}
    for storage in assembly.written:
        named = names.get(id(storage))
        position = positions.get(id(recording.log.storages[id(storage)][1]))
        name = f"memory.{len(names_of_slots)}" if named is None else named.name
        names_of_slots[storage.value.slot] = (name, position)
    for tensor, value, _ in assembly.created:
        names_of_slots.setdefault(value.slot, (_name_of(tensor, recording, names, assembly), None))
    results = []
    for slot, layout_id in zip(plan.live, plan.result_layouts, strict=True):
        name, position = names_of_slots.get(slot, (f"kept.{slot}", None))
        finer = plan_lowering.refined(layout_id)
        layout: Any = None if layout_id == sharding_ids.UNPLACED else sharding_ids.sharding(finer)
        results.append(StepResult(name, position, layout))
    return results


def _name_of(
    tensor: Any, recording: PlannedRecording, names: Mapping[int, Named], assembly: Assembly
) -> str:
    """The name of a new result: its path in the step's result, or "grad." and its parameter."""
    tree = pytree.tree_unflatten(list(range(len(recording.leaves))), recording.structure)
    for path, index in pytree.tree_flatten_with_path(tree)[0]:
        if recording.leaves[index] is tensor:
            return ".".join(map(key_text, path)) or "result"
    for owner, gradient in zip(recording.tensors, assembly.after, strict=True):
        if gradient is tensor:
            named = names.get(id(getattr(owner, "_storage", None)))
            return "grad" if named is None else f"grad.{named.name}"
    return "result"
