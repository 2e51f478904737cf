"""`annotate`: specs and pipeline stages, written onto the nodes of a model.

>>> from onnx import helper
>>> from isoshard.core.layout.mesh import make_mesh
>>> w = helper.make_tensor("w", 1, [8, 4], [0.0] * 32)
>>> x = helper.make_tensor_value_info("x", 1, ["batch", 8])
>>> y = helper.make_tensor_value_info("y", 1, ["batch", 4])
>>> node = helper.make_node("MatMul", ["x", "w"], ["y"], name="up")
>>> model = helper.make_model(helper.make_graph([node], "g", [x], [y], [w]), ir_version=11)
>>> mesh = make_mesh((2, 2), ("data", "model"))
>>> done = annotate(model, mesh, {"x": ("data", None), "w": (None, "model")})
>>> [spec.tensor_name for spec in done.graph.node[0].device_configurations[0].sharding_spec]
['x', 'w']
>>> len(model.configuration), done.configuration[0].num_devices
(0, 4)

Annotating is the last step of an export: most tools that change a graph drop annotations, or leave
them with names that are no more. A weight or an input is annotated at every node that reads it, a
result at the node that makes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from jax.sharding import Mesh

from isoshard.core.kit import Plan, ShardingError, as_mesh, named_sharding, warn_unused

from ..errors import AnnotationError, raise_annotations
from ..layouts.meshes import NumberedMesh
from ..layouts.writing import to_sharding_spec
from ..reading.graph import Graph
from ..reading.mesh_record import MeshRecord, write_mesh
from ..reading.parameters import named_leaves
from ..reading.stages import stages_of
from .choosing import Specs, specs_of
from .staging import Stages, declared_stages, stage_submeshes

_FIRST_IR = 11  # that has annotations
_LAST_IR = 13  # that ONNX Runtime 1.31 reads


def annotate(
    model: onnx.ModelProto,
    mesh: Mesh,
    specs: Mapping[Any, Any] | Plan,
    stages: Stages | None = None,
    config: str = "default",
    *,
    stage_axis: str = "stage",
) -> onnx.ModelProto:
    """Write a layout onto a copy of a model.

    Args:
        model: is unchanged. Its weights are copied.
        mesh: the devices. With stages it is the mesh of one stage, and stage after stage is on
            the next `mesh.size` devices of the file; or, if it has an axis called `stage_axis`, it
            is the mesh of all, and stages lie along that axis.
        specs: a mapping of names and specs, or a Plan. A name is that of a value, of a parameter
            as `export_torch` keeps it, or a pattern as a Plan takes it; the first that matches
            decides. A pair of names, of a node and of one of its values, is for that node alone. A
            spec is anything that `isoshard.shard` takes. A Plan speaks of parameters, inputs, and
            of what goes into modules and comes out.
        stages: a mapping of patterns for names of nodes, or of the modules they come from, and
            pipeline stages; or a function of a `Node` that gives one, or None. Nodes without one
            follow what they read.
        config: name of the annotation; one of the same name is replaced.
        stage_axis: the axis along which stages lie, if the mesh has it.

    Returns:
        The annotated copy, of IR version 11 or more. Its metadata keeps the axes of the mesh.

    Raises:
        AnnotationError: a spec does not fit its tensor, a name fits nothing, no node touches a
            tensor, or stages run backwards; all errors of one kind in one message.
        PlanError: the plan does not fit.
        ModelError: the graph cannot be read.

    Example:
        >>> from onnx import parser
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> model = parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["":20]> g (float[8] x) => (float[8] y) {y=Abs(x)}')
        >>> done = annotate(model, make_mesh((4,), ("x",)), {"x": ("x",)}, config="quad")
        >>> done.configuration[0].name, len(done.graph.node[0].device_configurations)
        ('quad', 1)
    """
    mesh = as_mesh(mesh)
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    graph = Graph(copied)
    named = declared_stages(graph, stages)
    stage_of = stages_of(graph, named)
    stage_mesh, record = stage_submeshes(mesh, sorted(set(stage_of)) or [0], stage_axis)
    chosen = specs_of(graph, specs, next(iter(stage_mesh.values())).mesh)
    protos = _write(graph, chosen, stage_of, stage_mesh)
    warn_unused(specs, named_leaves(graph))
    _clear(copied, config)
    _configure(copied, config, mesh, record)
    for node in graph.nodes:
        node_protos = protos.get(node.index, [])
        if node_protos or named:
            entry = node.proto.device_configurations.add(configuration_id=config)
            entry.sharding_spec.extend(node_protos)
            if named:
                entry.pipeline_stage = stage_of[node.index]
    return copied


def _write(
    graph: Graph,
    chosen: Specs,
    stage_of: tuple[int, ...],
    stage_mesh: Mapping[int, NumberedMesh],
) -> dict[int, list[onnx.ShardingSpecProto]]:
    """The messages of each node, in the order of its inputs and outputs."""
    protos: dict[int, list[onnx.ShardingSpecProto]] = {}
    errors = []
    for node in graph.nodes:
        over = stage_mesh[stage_of[node.index]]
        for tensor in dict.fromkeys(filter(None, (*node.inputs, *node.outputs))):
            if not chosen.has_spec(graph, node, tensor):
                continue
            try:
                proto = _proto(graph, tensor, chosen.spec(node, tensor), over)
                protos.setdefault(node.index, []).append(proto)
            except AnnotationError as error:
                errors.append(error.at(node=node.name))
    raise_annotations(errors)
    return protos


def _proto(graph: Graph, tensor: str, spec: Any, over: NumberedMesh) -> onnx.ShardingSpecProto:
    shape = graph.shape(tensor)
    ndim = len(shape) if shape is not None else _entries(spec, tensor)
    try:
        sharding = named_sharding(spec, over.mesh, ndim, name="the layout")
    except (ShardingError, TypeError) as error:
        raise AnnotationError(str(error), tensor=tensor) from None
    return to_sharding_spec(sharding, tensor, shape, devices=over.device_ids)


def _entries(spec: Any, tensor: str) -> int:
    """The number of axes that a spec covers, for a tensor of unknown rank."""
    if spec is None:
        return 0
    try:
        return len(spec)
    except TypeError:
        raise AnnotationError(
            f"its rank is unknown, and {spec!r} does not determine it; give the value a shape",
            tensor=tensor,
        ) from None


def _clear(model: onnx.ModelProto, config: str) -> None:
    """Drop an earlier annotation of this name."""
    for configuration in [proto for proto in model.configuration if proto.name == config]:
        model.configuration.remove(configuration)
    for node in model.graph.node:
        entries = node.device_configurations
        for entry in [proto for proto in entries if proto.configuration_id == config]:
            entries.remove(entry)


def _configure(model: onnx.ModelProto, config: str, mesh: Mesh, record: MeshRecord) -> None:
    names = [f"{device.platform}:{device.id}" for device in np.ravel(mesh.devices)]
    device_names = names if len(names) == record.size else []
    model.configuration.add(name=config, num_devices=record.size, device=device_names)
    write_mesh(model, config, record)
    model.ir_version = max(_FIRST_IR, model.ir_version)
    if model.ir_version > _LAST_IR:
        warnings.warn(
            f"the model has IR version {model.ir_version}; ONNX Runtime 1.31 reads up to "
            f"{_LAST_IR}, and annotations need {_FIRST_IR}: set model.ir_version if it uses "
            "nothing newer",
            stacklevel=3,
        )
