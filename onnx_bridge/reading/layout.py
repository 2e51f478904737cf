"""`layout`: the shardings of an annotated model, on a mesh.

>>> from onnx import helper
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.onnx_bridge.annotating import annotate
>>> w = helper.make_tensor("w", 1, [8, 4], [0.0] * 32)
>>> x = helper.make_tensor_value_info("x", 1, ["batch", 8])
>>> y = helper.make_tensor_value_info("y", 1, ["batch", 4])
>>> node = helper.make_node("MatMul", ["x", "w"], ["y"], name="up")
>>> model = helper.make_model(helper.make_graph([node], "g", [x], [y], [w]), ir_version=11)
>>> mesh = make_mesh((2, 4), ("data", "model"))
>>> specs = {"x": P("data"), "w": P(None, "model"), "y": P("data", "model")}
>>> found = layout(annotate(model, mesh, specs))
>>> found.parameters["w"][0].spec, found.sharding(0, "y").spec
(P(None, 'model'), P('data', 'model'))
>>> print(found)
configuration 'default' of 8 devices
stage 0: 1 node on devices 0-7, mesh (data=2, model=4)
tensor  kind       shape         dtype    spec                bytes/device  stage
x       input      ('batch', 8)  float32  P('data',)                     ?  0
w       parameter  (8, 4)        float32  P(None, 'model')            32 B  0
y       output     ('batch', 4)  float32  P('data', 'model')             ?  0

A model with pipeline stages has one mesh for each. A parameter lies where the first node of a stage
that reads it wants it; a later node that wants it otherwise gets it so.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import onnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import Tiles, named_sharding, same_layout

from ..errors import AnnotationError, raise_annotations
from ..layouts.meshes import NumberedMesh
from ..layouts.shardings import Uneven, even_tiles, sharding_over
from ..layouts.tiling import read_tiles
from .annotations import Configuration, NodeAnnotation, choose, node_annotations
from .graph import Graph
from .layout_table import layout_table
from .stage_meshes import stage_meshes
from .stages import stages_of

Where = tuple[int, str]  # index of a node, name of one of its tensors


@dataclasses.dataclass(frozen=True)
class Stage:
    """One pipeline stage.

    Attributes:
        number: as the file has it.
        mesh: the devices it runs on.
        nodes: indices of its nodes, in an order they can run in.
        inputs: names of the values it reads: the model's inputs and results of earlier stages.
        outputs: names of the values that later stages or the user read.

    Example:
        >>> import jax
        >>> from onnx import parser
        >>> from isoshard.onnx_bridge.annotating import annotate
        >>> model = parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["": 20]> g (float[8] x) => (float[8] y) '
        ...     '{h = Abs(x) y = Neg(h)}')
        >>> mesh = jax.make_mesh((4,), ("x",))                  # of one stage
        >>> found = layout(annotate(model, mesh, {"x": ("x",)}, {"Abs*": 0, "Neg*": 1}))
        >>> [(stage.number, stage.inputs, stage.outputs) for stage in found.stages]
        [(0, ('x',), ('h',)), (1, ('h',), ('y',))]
    """

    number: int
    mesh: Mesh
    nodes: tuple[int, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class ModelLayout:
    """The layout of a model on meshes; `print` it for a table.

    Attributes:
        graph: the graph.
        configuration: the device configuration that was read.
        stages: in the order they run.
        parameters: the layout of each initializer in each stage that reads it, by name and number
            of the stage; replicated where nothing is said.
        inputs: the layout of each input of the model where it is read first; likewise.
        outputs: the layout of each output of the model, where the node that makes it says one.
        notes: what was decided where the file leaves it open.
        devices: what the file calls the devices of each stage, in the order of its mesh.
        shardings: what `sharding` looks up.

    Example:
        >>> import jax
        >>> from onnx import parser
        >>> from isoshard.onnx_bridge.annotating import annotate
        >>> model = parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["":20]> g (float[8] x) => (float[8] y) {y=Abs(x)}')
        >>> found = layout(annotate(model, jax.make_mesh((4,), ("x",)), {"x": ("x",)}))
        >>> found.inputs["x"].spec, found.outputs, found.sharding(0, "x").spec
        (P('x',), {}, P('x',))
    """

    graph: Graph
    configuration: Configuration
    stages: tuple[Stage, ...]
    parameters: dict[str, dict[int, NamedSharding]]
    inputs: dict[str, NamedSharding]
    outputs: dict[str, NamedSharding]
    notes: tuple[str, ...]
    devices: dict[int, tuple[int, ...]]
    shardings: Mapping[Where, NamedSharding] = dataclasses.field(repr=False)

    def sharding(self, node_index: int, tensor: str) -> NamedSharding | None:
        """The sharding that a node declares for one of its tensors.

        Args:
            node_index: position of the node.
            tensor: name of an input or output.

        Returns:
            The layout over the mesh of the node's stage, or None if nothing is said.
        """
        return self.shardings.get((node_index, tensor))

    def __str__(self) -> str:
        """A table of the inputs, the parameters and all annotated values, by stage."""
        return layout_table(self)


def layout(
    model: onnx.ModelProto,
    mesh: Mesh | None = None,
    config: str | None = None,
    uneven: Uneven = "error",
) -> ModelLayout:
    """Read the layout of an annotated model.

    Args:
        model: the model.
        mesh: over all devices of the configuration, in the order in which the file numbers them.
            By default the mesh that the file keeps; if it keeps none, one is made to fit.
        config: name of the configuration, if there are several.
        uneven: what to do with an axis that does not split evenly: raise, or "replicate" it, with
            a warning.

    Returns:
        The layout of each tensor at each node, of the parameters, inputs and outputs.

    Raises:
        AnnotationError: the annotations contradict each other, the graph or the mesh, or say what
            no NamedSharding does: every such tensor, with its node, its axis and the reason.
        ModelError: the graph cannot be read.
        DeviceError: no mesh is given, and there are too few devices.

    Example:
        >>> import jax
        >>> from onnx import parser
        >>> from isoshard.onnx_bridge.annotating import annotate
        >>> model = parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["":20]> g (float[8] x) => (float[8] y) {y=Abs(x)}')
        >>> print(layout(annotate(model, jax.make_mesh((8,), ("x",)), {"x": ("x",)})))
        configuration 'default' of 8 devices
        stage 0: 1 node on devices 0-7, mesh (x=8)
        tensor  kind   shape  dtype    spec     bytes/device  stage
        x       input  (8,)   float32  P('x',)           4 B  0
    """
    graph = Graph(model)
    configuration = choose(model, config)
    annotations = node_annotations(model, configuration.name)
    stage_of = stages_of(
        graph, {index: annotation.stage for index, annotation in annotations.items()}
    )
    notes: list[str] = []
    tiles = _read_tiles(graph, annotations, configuration.num_devices, uneven, notes)
    stage_indices = sorted(set(stage_of)) or [0]
    by_stage = {
        stage: [tile for (index, _), tile in tiles.items() if stage_of[index] == stage]
        for stage in stage_indices
    }
    meshes = stage_meshes(model, configuration, by_stage, mesh, notes)
    shardings = _over_meshes(graph, tiles, stage_of, meshes)
    stages = tuple(_stage(graph, stage, stage_of, meshes[stage].mesh) for stage in stage_indices)
    return ModelLayout(
        graph,
        configuration,
        stages,
        _parameters(graph, stages, shardings, notes),
        _inputs(graph, stages, shardings),
        {
            name: shardings[maker.index, name]
            for name in graph.outputs
            if (maker := graph.producer(name)) is not None and (maker.index, name) in shardings
        },
        tuple(notes),
        {stage: over.device_ids for stage, over in meshes.items()},
        shardings,
    )


def _read_tiles(
    graph: Graph,
    annotations: Mapping[int, NodeAnnotation],
    num_devices: int,
    uneven: Uneven,
    notes: list[str],
) -> dict[Where, Tiles]:
    tiles_by_use: dict[Where, Tiles] = {}
    errors = []
    unsplit = []
    for index, annotation in annotations.items():
        for tensor, proto in annotation.specs.items():
            shape = graph.shape(tensor)
            try:
                tiles = read_tiles(proto, shape, num_devices)
                tiles_by_use[index, tensor] = even = even_tiles(tiles, shape, tensor, uneven)
            except AnnotationError as error:
                errors.append(error.at(node=graph.nodes[index].name))
                continue
            if even is not tiles:
                unsplit.append(
                    f"node {graph.nodes[index].name!r}, tensor {tensor!r}: shape {shape} does not "
                    f"split evenly into {tiles.blocks} blocks, but into {even.blocks}"
                )
    raise_annotations(errors)
    if unsplit:
        notes += unsplit
        warnings.warn("axes are left unsharded:\n  " + "\n  ".join(unsplit), stacklevel=3)
    return tiles_by_use


def _over_meshes(
    graph: Graph,
    tiles: Mapping[Where, Tiles],
    stage_of: Sequence[int],
    meshes: Mapping[int, NumberedMesh],
) -> dict[Where, NamedSharding]:
    by_use: dict[Where, NamedSharding] = {}
    errors = []
    for (index, tensor), tile in tiles.items():
        try:
            by_use[index, tensor] = sharding_over(meshes[stage_of[index]], tile, tensor)
        except AnnotationError as error:
            errors.append(error.at(node=graph.nodes[index].name))
    raise_annotations(errors)
    return by_use


def _stage(graph: Graph, stage_index: int, stage_of: Sequence[int], mesh: Mesh) -> Stage:
    nodes = [node for node in graph.nodes if stage_of[node.index] == stage_index]
    produced = [value for node in nodes for value in node.outputs if value]
    local_values = {*produced, *graph.initializers}
    read = dict.fromkeys(
        value
        for node in nodes
        for value in (*node.inputs, *node.captured)
        if value not in local_values
    )
    later = [
        value
        for value in produced
        if value in graph.outputs
        or any(stage_of[reader.index] != stage_index for reader in graph.consumers(value))
    ]
    inputs = tuple(value for value in read if value)
    return Stage(stage_index, mesh, tuple(node.index for node in nodes), inputs, tuple(later))


def _parameters(
    graph: Graph,
    stages: Sequence[Stage],
    shardings: Mapping[Where, NamedSharding],
    notes: list[str],
) -> dict[str, dict[int, NamedSharding]]:
    by_parameter: dict[str, dict[int, NamedSharding]] = {}
    nodes_of = {stage.number: set(stage.nodes) for stage in stages}
    for name, tensor in graph.initializers.items():
        readers = graph.consumers(name)
        for stage in stages:
            reader_indices = [
                node.index for node in readers if node.index in nodes_of[stage.number]
            ]
            readings = [shardings[at, name] for at in reader_indices if (at, name) in shardings]
            if not reader_indices:
                continue
            ndim = len(tensor.dims)
            by_parameter.setdefault(name, {})[stage.number] = (
                readings[0] if readings else named_sharding(P(), stage.mesh, ndim)
            )
            if any(not same_layout(readings[0], other, ndim) for other in readings[1:]):
                kinds = ", ".join(map(str, dict.fromkeys(sharding.spec for sharding in readings)))
                notes.append(
                    f"parameter {name!r} is read as {kinds} in stage {stage.number}; it is sharded "
                    f"as {readings[0].spec}"
                )
        if len(by_parameter.get(name, ())) > 1:
            where = ", ".join(map(str, by_parameter[name]))
            notes.append(f"parameter {name!r} is in stages {where}")
    return by_parameter


def _inputs(
    graph: Graph, stages: Sequence[Stage], shardings: Mapping[Where, NamedSharding]
) -> dict[str, NamedSharding]:
    by_input = {}
    for name in graph.inputs:
        first = next((stage for stage in stages if name in stage.inputs), stages[0])
        readings = (shardings.get((index, name)) for index in first.nodes)
        replicated = named_sharding(P(), first.mesh, len(graph.shape(name) or ()))
        by_input[name] = next(
            (sharding for sharding in readings if sharding is not None), replicated
        )
    return by_input
