"""`export_jax`: a JAX function or a Flax or Equinox module, with its layout, as an ONNX model.

    plan = Plan({"*.up.*": Linear(out="tp"), "*.down.*": Linear(into="tp")}, inputs=P("dp"),
                default=P())
    model = iso.onnx.export_jax(net, (example,), mesh, plan, stages={"blocks.0.*": 0, "*": 1})

jax2onnx writes the operators. It knows no layouts, and while it runs it replaces functions of JAX
and Flax, which `jit` would then remember. So the function is traced before, written out as one list
of primitives (`flat_programs`), and only that is given away, with every value that has a layout as
one more result: results keep their names, whatever an optimizer does. Afterwards they are results
no longer, weights become initializers, and the layouts are written onto the nodes.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import onnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from onnx import numpy_helper

from isoshard.core.kit import (
    Plan,
    PlanError,
    Tracer,
    auto,
    check_patterns,
    constrain,
    install_command,
    is_typed,
    matches,
    metrics,
    opened,
)

from ..annotating.annotate import annotate
from ..annotating.staging import Stages
from ..errors import AnnotationError, ModelError
from ..reading.graph import Graph
from ..reading.parameter_record import Origin, write_parameters
from .finishing import save
from .flat_programs import FlatProgram, flat_program, untyped_context
from .jax_functions import SplitFunction, output_names, split_function
from .jax_layouts import mesh_for, specs_for


def export_jax(
    fn: Callable[..., Any],
    args: Sequence[Any],
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    *,
    params: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    stages: Stages | None = None,
    opset: int | None = None,
    config: str = "default",
    stage_axis: str = "stage",
    path: str | Path | None = None,
) -> onnx.ModelProto:
    """Export a JAX function with its layout.

    Args:
        fn: an NNX or Equinox module in eval mode, or any function of arrays. Its own
            `with_sharding_constraint`s, `reshard`s and `out_sharding=`s, and the `in_shardings` and
            `out_shardings` of its `jit`s, become annotations.
        args: example inputs, pytrees of arrays or `jax.ShapeDtypeStruct`s, also with symbolic sizes
            (`jax.export.symbolic_shape`): shapes, dtypes and layouts count, not values.
        mesh: the mesh of one stage, or of all, as for `annotate`; None takes that of the first
            layout that is found, else the one that `jax.set_mesh` has set.
        plan: rules for the weights, and `inputs` by the names of the arguments. None takes the
            layout of the arrays themselves.
        params: weights that `fn` takes as its first argument, such as Linen's variables. They go
            into the file; those that are on several devices are gathered whole, counted in
            `isoshard.metrics`.
        kwargs: flags for `fn`, which are unchanged.
        stages: patterns for names of weights, and the pipeline stage of what reads them (what
            reads no weight follows what it reads); or a function of a `Node`, as for `annotate`.
        opset: version of ONNX's operators; None takes jax2onnx's choice.
        config: name of the annotation.
        stage_axis: as for `annotate`.
        path: where to save as well; weights of 1 GiB and more go beside it as external data.

    Returns:
        The annotated model. Inputs have the names of the arguments, weights those that plans know,
        results those of their paths. Inputs and weights that no result depends on are left out.

    Raises:
        ShardingError: the plan does not fit, or there is no layout.
        AnnotationError: a layout cannot be written, or the stages do not fit.
        ModelError: the function cannot be exported: random numbers, `shard_map`, state that
            changes, operations that jax2onnx does not know.
        ModuleNotFoundError: jax2onnx is not installed.

    Example:
        >>> from isoshard.onnx_bridge import layout
        >>> mesh = jax.make_mesh((8,), ("x",))
        >>> x = jax.ShapeDtypeStruct((8, 4), "float32")
        >>> model = export_jax(lambda x: 2 * x, (x,), mesh, Plan(inputs=P("x")))
        >>> layout(model).inputs["x"].spec
        P('x',)
    """
    if jax.config.read("jax_enable_x64"):
        raise ModelError(
            "jax2onnx widens float32 while jax_enable_x64 is on; turn it off to export"
        )
    if plan is not None and any(factor.activations for factor in plan.factors):
        raise PlanError(
            "export_jax reads shardings inside a model from the model itself, not from the plan's "
            "activations: constrain them in the function, and pass a plan without activations"
        )
    taken = split_function(fn, args, params, kwargs)
    leaves = {**taken.weights, **taken.inputs}
    program = flat_program(taken.function, [*map(_typed, leaves.values())])
    mesh = mesh_for(mesh, taken, program)
    read = [list(leaves)[at] for at in program.read]
    results = jax.eval_shape(taken.function, *map(_typed, leaves.values()))
    outputs = output_names(results, leaves)
    values = _value_names(program, outputs, set(leaves))
    model = _convert(taken, program, mesh, read, values, opset)
    del model.graph.output[len(outputs) :]
    _store_weights(model, {name: taken.weights[name] for name in read if name in taken.weights})
    graph = Graph(model)
    specs = specs_for(taken, program, plan, graph, mesh, values)
    touched = {value for node in graph.nodes for value in (*node.inputs, *node.outputs)}
    specs = {name: spec for name, spec in specs.items() if name in touched}
    if isinstance(stages, Mapping):
        stages = _stages_by_weight(graph, stages, taken.weights)
    done = annotate(model, mesh, specs, stages, config, stage_axis=stage_axis)
    if path is not None:
        save(done, Path(path))
    return done


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _typed(leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype, and on Explicit axes the type, under which JAX would trace."""
    layout = getattr(leaf, "sharding", None)
    is_typed_sharding = isinstance(layout, NamedSharding) and is_typed(layout.mesh)
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=layout if is_typed_sharding else None
    )


def _convert(
    taken: SplitFunction,
    program: FlatProgram,
    mesh: Mesh,
    read: Sequence[str],
    values: Sequence[str],
    opset: int | None,
) -> onnx.ModelProto:
    with _registered_functions(), untyped_context():
        return _converted(taken, program, mesh, read, values, opset)


@contextlib.contextmanager
def _registered_functions() -> Iterator[None]:
    """Give JAX back the functions that jax2onnx replaces for good (`jax.numpy.cumsum`)."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("jax", "flax", "equinox") and "._src" not in name
    ]
    before = [(module, dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for module, names in before:
            for name, value in names.items():
                if callable(value) and vars(module).get(name) is not value:
                    setattr(module, name, value)


def _converted(
    taken: SplitFunction,
    program: FlatProgram,
    mesh: Mesh,
    read: Sequence[str],
    values: Sequence[str],
    opset: int | None,
) -> onnx.ModelProto:
    try:
        jax2onnx: Any = importlib.import_module("jax2onnx")
    except ModuleNotFoundError as error:
        if error.name != "jax2onnx":
            raise
        raise ModuleNotFoundError(
            f"export_jax needs jax2onnx; get it with {install_command('onnx-jax')}",
            name="jax2onnx",
        ) from None
    leaves = {**taken.weights, **taken.inputs}
    replicated = NamedSharding(auto(mesh), P())

    def replayed(*arrays: Any) -> list[Any]:
        array_ids = {id(value) for value in arrays}
        results: dict[str, Any] = {}
        for name, value in zip(values, program(*arrays), strict=True):
            if name in results:
                continue
            if id(value) in array_ids or not isinstance(value, Tracer):
                # an Identity of its own: what is an input, a constant or a result already
                value = constrain(value, replicated)
            array_ids.add(id(value))
            results[name] = value
        return list(results.values())

    try:
        return jax2onnx.to_onnx(
            replayed,
            [_abstract(leaves[name]) for name in read],
            model_name=taken.name,
            input_names=list(read),
            output_names=list(dict.fromkeys(values)),
            **({} if opset is None else {"opset": opset}),
        )
    except Exception as error:
        raise ModelError(f"jax2onnx cannot export {taken.name}: {error}") from error


def _value_names(program: FlatProgram, outputs: Sequence[str], used: set[str]) -> list[str]:
    """A name for each result, then for each value sharded; what is a result has that name."""
    atoms = opened(program.jaxpr).outvars
    names_by_id = dict(
        zip(map(id, reversed(atoms[: len(outputs)])), reversed(outputs), strict=True)
    )
    names = list(outputs)
    for at, atom in enumerate(atoms[len(outputs) :]):
        name = f"constraint_{at}"
        while name in used or name in outputs:
            name += "_"
        names.append(names_by_id.get(id(atom), name))
    return names


def _store_weights(model: onnx.ModelProto, weights: Mapping[str, Any]) -> None:
    """Make inputs that are weights initializers."""
    inputs = [value for value in model.graph.input if value.name not in weights]
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    for name, array in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(_gathered(array), name))
    ranks = {name: tuple(range(array.ndim)) for name, array in weights.items()}
    write_parameters(model, {name: Origin(name, axes) for name, axes in ranks.items()})


def _gathered(array: Any) -> np.ndarray:
    if isinstance(array, jax.Array) and not array.is_fully_replicated:
        metrics.count("gathers")
    return np.asarray(array)


def _stages_by_weight(
    graph: Graph, stages: Mapping[str, int], weights: Mapping[str, Any]
) -> Callable[[Any], int | None]:
    """The stage of each node that reads a weight: that of the weight, or a later one it reads."""
    check_patterns(stages)
    stage_of_weight: dict[str, int] = {}
    unused = set(stages)
    for name in weights:
        fitting = [pattern for pattern in stages if pattern == name or matches(pattern, name)]
        unused.difference_update(fitting)
        if fitting:
            stage_of_weight[name] = stages[fitting[0]]
    if unused:
        raise AnnotationError(
            f"stages has {', '.join(map(repr, sorted(unused)))}, which match no weight; weights "
            f"are {', '.join(map(repr, list(weights)[:8]))}"
        )
    constants = dict.fromkeys(graph.initializers)
    stage_of: dict[int, int | None] = {}
    reached: dict[str, int] = dict(stage_of_weight)
    for node in graph.nodes:
        values = [value for value in (*node.inputs, *node.captured) if value]
        stage = max((reached[value] for value in values if value in reached), default=None)
        if stage is not None:
            reached.update(dict.fromkeys(node.outputs, stage))
        if all(value in constants for value in values):
            # made of weights alone, such as a transposed one: it belongs to whoever reads it
            constants |= dict.fromkeys(node.outputs)
        elif any(value in constants and value in reached for value in values):
            stage_of[node.index] = stage
    return lambda node: stage_of.get(node.index)
