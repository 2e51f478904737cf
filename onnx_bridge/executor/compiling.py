"""`compile`: an annotated model as a function, with parameters sharded by its annotations.

>>> import numpy as np
>>> from onnx import helper
>>> from isoshard.core.layout.mesh import make_mesh
>>> from ..annotating.annotate import annotate
>>> w = helper.make_tensor("w", 1, [4, 8], np.ones((4, 8), np.float32))
>>> x = helper.make_tensor_value_info("x", 1, ["batch", 4])
>>> y = helper.make_tensor_value_info("y", 1, ["batch", 8])
>>> product = helper.make_node("MatMul", ["x", "w"], ["y"], name="product")
>>> graph = helper.make_graph([product], "g", [x], [y], [w])
>>> model = helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 20)])
>>> mesh = make_mesh((8,), ("tp",))
>>> run = compile(annotate(model, mesh, {"w": jax.P(None, "tp"), "x": None}))
>>> run.parameters[0]["w"].sharding.spec
P(None, 'tp')
>>> run(np.ones((2, 4), np.float32)).shape
(2, 8)

Each pipeline stage is one program on its own devices; what goes from one to the next is copied by
`jax.device_put`. The stages run one after the other: batches are not cut into microbatches.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import jax
import onnx
from jax.sharding import Mesh, NamedSharding
from onnx import helper, numpy_helper

from isoshard.core.kit import device_dtype, shard

from ..errors import ModelError
from ..layouts.shardings import Uneven
from ..reading.layout import ModelLayout, layout
from ..reading.opening import load
from ..reading.parameter_record import Origin, parameters_of
from .evaluating import require_operators
from .inferred import with_inferred
from .model_inputs import Inputs, placed
from .program import Program
from .routes import Routes, Shapes, abstract
from .tensors import Sorted, sort

MAX_BYTES = 1 << 36
Parameters = tuple[dict[str, jax.Array], ...]


class Compiled:
    """A model that runs on a mesh. Made by `compile`.

    Args:
        model_layout: the shardings that the annotations declare.
        max_bytes: of any value.

    Attributes:
        parameters: for each stage the weights it uses, by the tensor's name in the file, placed. A
            weight that two stages use is in both: add its gradients.
        origins: which weight of the exported module each tensor is, if the file says so.
        layout: what the annotations say.

    Example:
        >>> from onnx import parser
        >>> from isoshard.onnx_bridge.annotating import annotate
        >>> model = parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["":20]> g (float[8] x) => (float[8] y) {y=Abs(x)}')
        >>> run = compile(annotate(model, jax.make_mesh((8,), ("x",)), {"x": ("x",)}))
        >>> run.input_shardings["x"].spec, "all-reduce" in run.hlo()[0]
        (P('x',), False)
    """

    def __init__(self, model_layout: ModelLayout, max_bytes: int) -> None:
        """Make the programs, check what can be checked without data, place the tensors."""
        graph = model_layout.graph
        self.layout = model_layout
        self.origins: dict[str, Origin] = parameters_of(graph.model)
        self._inputs = Inputs(graph)
        tensors = sort(graph)
        self._programs = [
            Program(model_layout, stage, tensors.constants, max_bytes)
            for stage in model_layout.stages
        ]
        self._jitted = [jax.jit(program) for program in self._programs]
        tensors_by_program = [_program_tensors(program, tensors) for program in self._programs]
        self._routes = Routes(
            self._programs, [(_shapes(a), _shapes(b)) for a, b in tensors_by_program], self._jitted
        )
        if self._inputs.structs is not None:
            self._routes.lowered(self._inputs.structs)
        arrays = [(_placed(a), _placed(b)) for a, b in tensors_by_program]
        self.parameters: Parameters = tuple(parameters for parameters, _ in arrays)
        self._tables = [tables for _, tables in arrays]

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """Run the model with its own parameters.

        Args:
            *args: inputs in the order of the file: NumPy or JAX arrays.
            **inputs: inputs by name.

        Returns:
            The output, or a dictionary of them by name if there are several; on the mesh that was
            given, with its axis types. Inside a JAX transformation only those are of which the file
            says how they are sharded; the others are on Auto axes, along which the compiler
            chooses.

        Raises:
            ModelError: an input does not fit, or a value would be too large.
            ShardingError: an input does not split evenly.
        """
        return self.apply(self.parameters, *args, **inputs)

    def apply(self, parameters: Parameters, *args: Any, **inputs: Any) -> Any:
        """Run the model with other parameters: what to differentiate.

        Args:
            parameters: like `self.parameters`.
            *args: inputs in the order of the file.
            **inputs: inputs by name.

        Returns:
            As `__call__`.

        Raises:
            ModelError: as `__call__`.
            ShardingError: likewise.
        """
        bound = self._inputs.bind(args, inputs)
        values: dict[str, Any] = dict(bound)
        producers: dict[str, Program] = {}
        for index, route in enumerate(self._routes.of(bound)):
            entering = {name: placed(values[name], where, name) for name, where in route.items()}
            program, tables = self._jitted[index], self._tables[index]
            with self._programs[index].context():
                outputs = program(parameters[index], tables, entering)
            values.update(outputs)
            producers.update(dict.fromkeys(outputs, self._programs[index]))
        results = {
            name: producers[name].on_users_mesh(name, values[name])
            for name in self.layout.graph.outputs
        }
        return next(iter(results.values())) if len(results) == 1 else results

    @property
    def input_shardings(self) -> dict[str, NamedSharding]:
        """The sharding of each input at its first reader: arrays sharded so are not moved."""
        return dict(self.layout.inputs)

    def lowered(self, *args: Any, **inputs: Any) -> tuple[Any, ...]:
        """Lower each stage for inputs of some shapes.

        Args:
            *args: inputs in order, arrays or `jax.ShapeDtypeStruct`; none at all if the model
                says all their shapes.
            **inputs: inputs by name.

        Returns:
            One `jax.stages.Lowered` per stage.

        Raises:
            ModelError: an input does not fit, or shapes are open and none were given.
        """
        structs = self._inputs.structs
        if args or inputs or structs is None:
            structs = abstract(self._inputs.bind(args, inputs))
        return tuple(self._routes.lowered(structs))

    def hlo(self, *args: Any, **inputs: Any) -> tuple[str, ...]:
        """The compiled programs as text, in which the collectives can be counted.

        Args:
            *args: as for `lowered`.
            **inputs: likewise.

        Returns:
            One text per stage.
        """
        return tuple(lowered.compile().as_text() for lowered in self.lowered(*args, **inputs))


def compile(
    model: str | os.PathLike[str] | bytes | onnx.ModelProto,
    mesh: Mesh | None = None,
    config: str | None = None,
    *,
    unspecified: Literal["auto", "infer"] = "auto",
    uneven: Uneven = "error",
    max_bytes: int = MAX_BYTES,
) -> Compiled:
    """Make an annotated model a function on a mesh.

    Args:
        model: as for `load`.
        mesh: over all devices of the configuration; None takes the one that the file keeps.
        config: name of the configuration, if there are several.
        unspecified: what becomes of results that no annotation speaks of: the compiler lays them
            out ("auto"), or they are sharded as the formalism of proposal 0007 infers ("infer").
        uneven: as for `layout`.
        max_bytes: of any single value, on all devices together; 64 GiB unless given. Values are
            looked at while they are only shapes.

    Returns:
        The function, its parameters placed.

    Raises:
        ModelError: the model cannot be read, has operators that cannot run (all of them are
            listed), or a value is too large.
        AnnotationError: its annotations do not fit it, or the mesh.
        ValueError: `unspecified` is neither of the two.

    Example:
        >>> from onnx import parser
        >>> from isoshard.onnx_bridge.annotating import annotate
        >>> model = parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["":20]> g (float[8] x) => (float[8] y) {y=Abs(x)}')
        >>> run = compile(annotate(model, jax.make_mesh((8,), ("x",)), {"x": ("x",)}))
        >>> run(-jax.numpy.arange(8.0)).tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    """
    if unspecified not in ("auto", "infer"):
        raise ValueError(f"unspecified is 'auto' or 'infer', not {unspecified!r}")
    model_layout = layout(load(model), mesh, config, uneven)
    unread = [
        name for name in model_layout.graph.outputs if model_layout.graph.producer(name) is None
    ]
    if unread:
        raise ModelError(
            f"{', '.join(map(repr, unread))}: an output that no node makes; add an Identity"
        )
    require_operators(
        model_layout.graph.nodes, model_layout.graph.opsets, model_layout.graph.model.functions
    )
    return Compiled(
        with_inferred(model_layout) if unspecified == "infer" else model_layout, max_bytes
    )


def stage_tensors(program: Program, tensors: Sorted) -> tuple[Shapes, Shapes]:
    """The parameters and tables of a stage as shapes with their layouts."""
    parameters, tables = _program_tensors(program, tensors)
    return _shapes(parameters), _shapes(tables)


def _program_tensors(program: Program, tensors: Sorted) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameters and tables that a stage reads: each a TensorProto and its layout."""
    graph, stage = program.layout.graph, program.stage.number
    parameters_ = [
        {
            name: (graph.initializers[name], where[stage])
            for name in names
            if stage in (where := program.layout.parameters.get(name, {}))
        }
        for names in (tensors.parameters, tensors.tables)
    ]
    return parameters_[0], parameters_[1]


def _shapes(tensors: dict[str, Any]) -> Shapes:
    return {
        name: jax.ShapeDtypeStruct(
            tuple(proto.dims),
            device_dtype(helper.tensor_dtype_to_np_dtype(proto.data_type), name),
            sharding=where,
        )
        for name, (proto, where) in tensors.items()
    }


def _placed(tensors: dict[str, Any]) -> dict[str, jax.Array]:
    return {
        name: shard(numpy_helper.to_array(proto), where.mesh, where, name=name)
        for name, (proto, where) in tensors.items()
    }
