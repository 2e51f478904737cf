"""`export_torch`: a torch module and its plan as an annotated ONNX model.

    plan = Plan({"*.up.*": Linear(out="tp"), "*.down.*": Linear(into="tp")}, inputs=P("dp"),
                default=P())
    model = iso.onnx.export_torch(net, (example,), mesh, plan, stages={"0*": 0, "1*": 1})

torch exports, torch's optimizer folds; the names of the weights are traced (`origins`), the plan is
resolved for the module's parameters as `iso.shard(module, mesh, plan)` does, and its specs are
written onto the nodes as the very last step. The graph is the computation of one device; the
shardings are its annotations.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import onnx
import torch
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import Plan, ShardingError, as_mesh

from ..annotating import weight_layouts
from ..annotating.annotate import annotate
from ..annotating.staging import Stages
from ..errors import ModelError
from ..reading.graph import Graph
from ..reading.parameter_record import write_parameters
from . import naming, plain_copies
from .finishing import save, simplify
from .origins import Origins


def export_torch(
    module: torch.nn.Module,
    args: Sequence[Any],
    mesh: Mesh | None = None,
    plan: Plan | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    stages: Stages | None = None,
    dynamic_shapes: Any = None,
    opset: int | None = None,
    config: str = "default",
    stage_axis: str = "stage",
    twin: torch.nn.Module | None = None,
    path: str | Path | None = None,
) -> onnx.ModelProto:
    """Export a torch module with its layout.

    Args:
        module: in eval mode. Plain, of DTensors, or on the device `jax`; weights that are not
            plain are gathered whole, counted in `isoshard.metrics`.
        args: example inputs, plain tensors: shapes and dtypes count, not values.
        mesh: the mesh of one stage, or of all, as for `annotate`; None takes that of the module's
            own tensors.
        plan: the layout, as for `iso.shard(module, mesh, plan)`: rules for the parameters, `inputs`
            by the names of forward's arguments, `activations` by the names of modules. None takes
            the layout of the module's own tensors.
        kwargs: example keyword arguments.
        stages: patterns for names of modules and the pipeline stage of each, as for `annotate`.
        dynamic_shapes: as for `torch.onnx.export`.
        opset: version of ONNX's operators; None takes torch's choice.
        config: name of the annotation.
        stage_axis: as for `annotate`.
        twin: a plain module of the same class and names, which may be on `meta`, for a module that
            cannot be copied (FSDP2). It gets the weights.
        path: where to save as well; weights of 1 GiB and more go beside it as external data.

    Returns:
        The annotated model. `parameters_of` tells which tensor is which weight.

    Raises:
        ShardingError: the plan does not fit, or there is no layout.
        ModelError: the module is in training mode, or cannot be copied or exported.

    Example:
        >>> from isoshard.onnx_bridge import layout
        >>> net = torch.nn.Linear(8, 4).eval()
        >>> plan = Plan({"weight": (None, "x")}, default=P())
        >>> model = export_torch(net, (torch.ones(2, 8),), jax.make_mesh((8,), ("x",)), plan)
        >>> layout(model).parameters["weight"][0].spec
        P(None, 'x')
    """
    if module.training:
        raise ModelError(
            f"{type(module).__name__} is in training mode, and a file has no dropout and no "
            "running statistics that change: call module.eval() first"
        )
    mesh = plain_copies.mesh_for(module) if mesh is None else as_mesh(mesh)
    layout = _layout(module, mesh, plan)
    first = plain_copies.first_names(module)
    plain = (
        plain_copies.plain_copy(module) if twin is None else plain_copies.filled_copy(module, twin)
    )
    program = _trace(plain, args, kwargs, dynamic_shapes, opset)
    origins = Origins(Graph(program.model_proto))
    program.optimize()
    model = program.model_proto
    naming.separate(model, origins, first)
    simplify(model)
    parameters = naming.trace(model, origins, first)
    write_parameters(model, parameters)
    graph = Graph(model)
    specs: dict[str, P] = weight_layouts.of_parameters(layout, parameters, graph, mesh)
    if plan is not None:
        specs |= weight_layouts.of_activations(plan, graph, mesh)
        specs |= weight_layouts.of_inputs(plan, graph, mesh)
    done = annotate(model, mesh, specs, stages, config, stage_axis=stage_axis)
    if path is not None:
        save(done, Path(path))
    return done


def _layout(module: torch.nn.Module, mesh: Mesh, plan: Plan | None) -> dict[str, P]:
    """The spec of every parameter and buffer."""
    tensors = plain_copies.named_tensors(module)
    if plan is not None:
        shapes = {name: _abstract(tensor) for name, tensor in tensors.items()}
        return weight_layouts.ruled_specs(plan.resolve(shapes, mesh)) if shapes else {}
    shardings = plain_copies.layouts_of(module)
    if not shardings:
        raise ShardingError(
            f"{type(module).__name__} is not sharded: its tensors are on "
            f"{next(iter(tensors.values())).device}, and there is no plan; pass one, "
            "export_torch(module, args, mesh, plan)"
        )
    return {
        name: weight_layouts.spec_over(shardings[name], mesh, tensor.dim())
        if name in shardings
        else P()
        for name, tensor in tensors.items()
    }


def _abstract(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    dtype = jnp.dtype(str(tensor.dtype).removeprefix("torch."))
    return jax.ShapeDtypeStruct(tuple(tensor.shape), dtype)


def _trace(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Any, dynamic_shapes: Any, opset: Any
) -> torch.onnx.ONNXProgram:
    """Export without optimizing: the weights then still have their names."""
    with warnings.catch_warnings():
        # torch's own, about torch's own calls
        warnings.filterwarnings("ignore", "`isinstance.treespec, LeafSpec.`", FutureWarning)
        try:
            program = torch.onnx.export(
                module,
                tuple(args),
                kwargs=dict(kwargs or {}),
                dynamo=True,
                dynamic_shapes=dynamic_shapes,
                opset_version=opset,
                optimize=False,
                verbose=False,
            )
        except torch.onnx.errors.OnnxExporterError as error:
            raise ModelError(f"torch cannot export {type(module).__name__}: {error}") from error
    if program is None:
        raise ModelError(f"torch exported nothing for {type(module).__name__}")
    return program
