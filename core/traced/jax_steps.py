"""A JAX function as a traced step.

>>> import optax
>>> from isoshard.planner.machine.topologies import topology
>>> tx = optax.adam(1e-3)
>>> def step(params, state, x):
...     loss, grads = jax.value_and_grad(lambda p: ((x @ p["w"]) ** 2).mean())(params)
...     updates, state = tx.update(grads, state)
...     return optax.apply_updates(params, updates), state, loss
>>> params = {"w": jax.ShapeDtypeStruct((512, 2048), "float32")}
>>> arguments = (params, jax.eval_shape(tx.init, params), jax.ShapeDtypeStruct((64, 512), "float32"))
>>> mesh = topology("v5e:2x4").mesh((2, 4), ("data", "model"))
>>> plan = Plan({"w": (None, "model")}, inputs=("data",))
>>> traced = traced_jax_step(step, arguments, {}, mesh, plan)
>>> for leaf in traced.inputs:
...     print(leaf.name, leaf.role, leaf.shape, leaf.sharding.spec)
w parameter (512, 2048) P(None, 'model')
0.count number () P()
0.mu.w optimizer (512, 2048) P(None, 'model')
0.nu.w optimizer (512, 2048) P(None, 'model')
x input (64, 512) P('data',)
>>> [result.replaces for result in traced.results]
[0, 1, 2, 3, None]
"""  # noqa: E501

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import auto, is_typed
from isoshard.core.layout.leaf_paths import path_name
from isoshard.core.plan import Plan
from isoshard.core.plan.freezing import UNSET
from isoshard.core.plan.model_leaves import ModelLeaf
from isoshard.core.plan.resolving import resolve_leaves
from isoshard.core.plan.slot_rules import slot_layouts
from isoshard.core.runtime._jax_internals.jaxpr_classes import jaxpr_as_fun
from isoshard.core.runtime._jax_internals.undocumented import key_impl

from .input_roles import ArgumentLeaf, leaves_of_arguments, replaced
from .traced_step import Role, StepInput, StepResult, TracedStep


def traced_jax_step(
    step: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: Mesh,
    plan: Any = None,
    *,
    batch: Collection[str] | None = None,
    axis_names: Mapping[str, tuple[Any, ...]] | None = None,
    roles: Mapping[str, Role] | None = None,
    name: str = "",
    framework: str = "jax",
) -> TracedStep:
    """Trace a JAX function for a mesh and a plan, without data.

    Args:
        step: a function of pytrees, jitted or not. A jitted function has its own donation; of
            others the state that it replaces is donated.
        args: its arguments: arrays, or `jax.ShapeDtypeStruct`s.
        kwargs: its keyword arguments.
        mesh: over attached or described devices. Explicit axes become Auto if a plan is given, or
            no argument is typed.
        plan: the `Plan`, or one spec for every parameter; None: arrays keep their shardings on a
            mesh of this grid, and others are replicated.
        batch: the names of the arguments that are inputs; by default those that the step does not
            replace.
        axis_names: the names of parameters' axes, by parameter, for plans that map those.
        roles: of arrays, by name, which override those inferred from the step's result.
        name: of the step; that of the function unless given.
        framework: in which it is written.

    Raises:
        PlanError: the plan does not fit the parameters or the batch.
        ShardingError: `batch` names no argument.
    """
    typed = plan is None and is_typed(mesh) and any(map(_is_typed, jax.tree.leaves((args, kwargs))))
    mesh = mesh if typed else auto(mesh)
    jitted: Any = step if hasattr(step, "trace") else jax.jit(step)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        passed = (args, kwargs) if typed else jax.tree.map(_untyped, (tuple(args), dict(kwargs)))
        traced = jitted.trace(*passed[0], **passed[1])
        program = _without_keys(traced.jaxpr)
    arguments = _named_arguments(step, traced.args_info)
    named_arguments = _named_arguments(step, (tuple(args), dict(kwargs)))
    replaced_by = replaced(_abstract(arguments), traced.out_info)
    inputs = _batch(arguments, replaced_by, batch)
    declared = roles or {}
    leaves = [
        leaf
        if leaf.role in ("input", "random")
        else leaf._replace(role=declared.get(leaf.name, leaf.role))
        for leaf in leaves_of_arguments(_abstract(arguments), inputs)
    ]
    present = _present_shardings(leaves, named_arguments, mesh)
    layouts = layouts_of(leaves, present, mesh, plan, axis_names or {})
    donated = [bool(leaf.donated) for leaf in jax.tree.leaves(traced.args_info)]
    donates = [True] * len(leaves) if step is not jitted else donated
    constants = [_constant(index, const, mesh) for index, const in enumerate(program.consts)]
    taken = [
        StepInput(leaf.name, leaf.role, tuple(aval.shape), aval.dtype, layout, leaf.follows)
        for leaf, aval, layout in zip(leaves, program.in_avals, layouts, strict=True)
    ]
    results = _results(traced.out_info, leaves, replaced_by, layouts, donates)
    shift = len(constants)
    results = [
        result
        if result.replaces is None
        else StepResult(result.name, result.replaces + shift, result.sharding)
        for result in results
    ]
    name = name or getattr(step, "__name__", type(step).__name__)
    return TracedStep(
        name, framework, _opened(program), (*constants, *taken), tuple(results), mesh,
        wide=bool(jax.config.read("jax_enable_x64")),
    )  # fmt: skip


def _is_typed(leaf: Any) -> bool:
    layout = getattr(leaf, "sharding", None)
    return isinstance(layout, NamedSharding) and is_typed(layout.mesh)


def _untyped(leaf: Any) -> Any:
    """An argument's shape without the sharding that would be part of its type."""
    if not _is_typed(leaf):
        return leaf
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=weak)


def layouts_of(
    leaves: Sequence[ArgumentLeaf],
    present: Sequence[NamedSharding | None],
    mesh: Mesh,
    plan: Any,
    axis_names: Mapping[str, tuple[Any, ...]],
) -> list[NamedSharding]:
    """The sharding of each leaf: by the plan, or its present one, or replicated.

    Raises:
        PlanError: naming each leaf that the plan does not fit.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    if plan is None:
        return [replicated if sharding is None else sharding for sharding in present]
    plan = plan if isinstance(plan, Plan) else Plan({"*": plan})
    model = [
        _model_leaf(leaf)._replace(names=axis_names.get(leaf.name))
        for leaf in leaves
        if leaf.role in ("parameter", "buffer")
    ]
    result: dict[str, NamedSharding] = resolve_leaves(plan, model, mesh).shardings
    batch = [_model_leaf(leaf) for leaf in leaves if leaf.role == "input"]
    has_inputs = any(factor.inputs is not UNSET for factor in plan.factors)
    inputs: dict[str, NamedSharding] = {}
    if has_inputs and batch:
        inputs = resolve_leaves(plan.for_inputs(), batch, mesh).shardings
    owners = {leaf.name: leaf for leaf in model}
    slots = {_model_leaf(leaf): owners.get(leaf.follows or "") for leaf in leaves if leaf.follows}
    moments = slot_layouts(plan, slots, model, mesh)
    layouts = []
    for leaf, present_sharding in zip(leaves, present, strict=True):
        if leaf.role == "input":
            layouts.append(inputs.get(leaf.name, present_sharding or replicated))
        elif leaf.follows and leaf.name in moments:
            layouts.append(moments[leaf.name])
        else:
            layouts.append(result.get(leaf.follows or leaf.name, replicated))
    return layouts


def _model_leaf(leaf: ArgumentLeaf) -> ModelLeaf:
    dtype = np.dtype(leaf.value.dtype)
    return ModelLeaf(leaf.name, tuple(leaf.value.shape), dtype.name, itemsize=dtype.itemsize)


def _named_arguments(step: Any, arguments: tuple[Any, Any]) -> dict[str, Any]:
    """The arguments by the names of their parameters, in the order of the program's inputs."""
    args, kwargs = arguments
    named = {name: kwargs[name] for name in sorted(kwargs)}  # JAX's order
    try:
        signature = inspect.signature(step)
        bound = signature.bind_partial(*args).arguments
    except (TypeError, ValueError):
        return {f"argument{index}": arg for index, arg in enumerate(args)} | named
    named_arguments: dict[str, Any] = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL:
            named_arguments |= {f"{name}.{index}": arg for index, arg in enumerate(value)}
        else:
            named_arguments[name] = value
    return named_arguments | named


def _abstract(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The trees with shapes instead of JAX's `ArgInfo`."""
    return {
        name: jax.tree.map(lambda arg: jax.ShapeDtypeStruct(arg.shape, arg.dtype), tree)
        for name, tree in arguments.items()
    }


def _batch(
    arguments: Mapping[str, Any], replaced_by: Collection[str], batch: Collection[str] | None
) -> set[str]:
    if batch is not None:
        unknown = [name for name in batch if name not in arguments]
        if unknown:
            raise ShardingError(
                f"batch={tuple(batch)!r} names no argument of the step: {', '.join(unknown)}; its "
                f"arguments are {', '.join(arguments)}"
            )
        return set(batch)
    model = set(replaced_by) or set(list(arguments)[:1])
    return set(arguments) - model


def _present_shardings(
    leaves: Sequence[ArgumentLeaf], arguments: Mapping[str, Any], mesh: Mesh
) -> list[NamedSharding | None]:
    """The shardings that arrays have on a mesh of this grid."""
    by_path = {
        (argument, path_name(path)): leaf
        for argument, tree in arguments.items()
        for path, leaf in jax.tree.leaves_with_path(tree)
    }
    result: list[NamedSharding | None] = []
    for leaf in leaves:
        inside = leaf.name.removeprefix(f"{leaf.argument}.") if leaf.role == "input" else leaf.name
        array = by_path.get((leaf.argument, inside), by_path.get((leaf.argument, "")))
        sharding = getattr(array, "sharding", None)
        if isinstance(sharding, NamedSharding) and dict(sharding.mesh.shape) == dict(mesh.shape):
            result.append(NamedSharding(mesh, sharding.spec))
        else:
            result.append(None)
    return result


def _results(
    info: Any,
    leaves: Sequence[ArgumentLeaf],
    replaced_by: Mapping[str, int | None],
    layouts: Sequence[NamedSharding],
    donates: Sequence[bool],
) -> list[StepResult]:
    """The results of a step, with the inputs that they replace."""
    first = {}
    for index, leaf in enumerate(leaves):
        first.setdefault(leaf.argument, index)
    argument_of = {position: name for name, position in replaced_by.items()}
    children = (
        [info] if None in argument_of else jax.tree.leaves(info, is_leaf=lambda x: x is not info)
    )
    results = []
    for position, child in enumerate(children):
        argument = argument_of.get(None if None in argument_of else position)
        for at, (path, _) in enumerate(jax.tree.leaves_with_path(child)):
            if argument is None:
                results.append(StepResult(path_name(path) or f"result{position}"))
                continue
            index = first[argument] + at
            source = index if donates[index] else None
            results.append(StepResult(leaves[index].name, source, layouts[index]))
    return results


def _constant(index: int, array: Any, mesh: Mesh) -> StepInput:
    """An array that the step closes over: an input, so that no program contains its elements."""
    dtype = np.dtype(array.dtype)
    sharding = NamedSharding(mesh, PartitionSpec())
    return StepInput(f"closed_over.{index}", "buffer", tuple(np.shape(array)), dtype, sharding)


def _without_keys(program: Any) -> Any:
    """The program with random keys as inputs of key data."""
    kinds = [_key_kind(aval) for aval in program.in_avals]
    if not any(kinds):
        return program
    run = jaxpr_as_fun(program)

    def from_words(*args: Any) -> Any:
        return run(
            *(
                arg if kind is None else jax.random.wrap_key_data(arg, impl=kind)
                for arg, kind in zip(args, kinds, strict=True)
            )
        )

    without_keys = [
        aval if kind is None else jax.eval_shape(jax.random.key_data, aval)
        for aval, kind in zip(program.in_avals, kinds, strict=True)
    ]
    return jax.make_jaxpr(from_words)(*without_keys)


def _key_kind(aval: Any) -> Any:
    """The implementation of an aval of random keys; None of other avals."""
    if not jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return None
    key_kind: list[Any] = []
    shape = jax.ShapeDtypeStruct(aval.shape, aval.dtype)
    jax.eval_shape(lambda key: key_kind.append(key_impl(key)), shape)
    return key_kind[0]


def _opened(program: Any) -> Any:
    """The program with its constants as the first inputs."""
    constants = program.consts
    if not constants:
        return program
    shapes = [jax.ShapeDtypeStruct(np.shape(constant), constant.dtype) for constant in constants]

    def opened(*args: Any) -> Any:
        consts, arguments = args[: len(constants)], args[len(constants) :]
        return jaxpr_as_fun(program.replace(consts=consts))(*arguments)

    return jax.make_jaxpr(opened)(*shapes, *program.in_avals)
