"""A model's graph: nodes, values, who makes them and who reads them.

>>> from onnx import helper
>>> relu = helper.make_node("Relu", ["x"], ["y"])
>>> float32 = 1
>>> x = helper.make_tensor_value_info("x", float32, ["batch", 8])
>>> y = helper.make_tensor_value_info("y", float32, None)
>>> graph = Graph(helper.make_model(helper.make_graph([relu], "g", [x], [y])))
>>> graph.nodes[0].name, graph.nodes[0].op_type, graph.inputs, graph.outputs
('Relu_0', 'Relu', ('x',), ('y',))
>>> graph.shape("y"), graph.dtype("x")                   # what the file leaves out is inferred
(('batch', 8), dtype('float32'))
>>> graph.producer("y").name, [node.name for node in graph.consumers("x")]
('Relu_0', ['Relu_0'])

Only the main graph is read. The graphs inside control-flow nodes are attributes; what they read
from outside counts as read by their node.

Source: the ONNX specification, docs/IR.md of onnx.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from onnx import helper

from ..errors import ModelError
from .inferring import Dims, Info, infer, read_info
from .walking import too_deep

Shape = Dims


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One operation of the main graph.

    Attributes:
        index: position in the file.
        name: as the file has it, or made up of operation and index, and unique then.
        op_type: e.g. "MatMul".
        domain: of the operator set; "" is ONNX's own.
        inputs: names of the values read; "" for an optional one that is left out.
        outputs: names of the values made; likewise.
        captured: names of values of the main graph that graphs in its attributes read.
        attributes: by name: numbers, strings, lists of them; tensors and graphs stay protos.
        proto: the node itself, not copied.

    Example:
        >>> from onnx import parser
        >>> model = parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["":20]> g (float[8] x) => (float[8] y) {y=Abs(x)}')
        >>> node = Graph(model).nodes[0]
        >>> node.index, node.name, node.op_type, node.inputs, node.outputs
        (0, 'Abs_0', 'Abs', ('x',), ('y',))
    """

    index: int
    name: str
    op_type: str
    domain: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    captured: tuple[str, ...]
    attributes: dict[str, Any]
    proto: onnx.NodeProto


class Graph:
    """The main graph of a model, indexed. The model is not copied and must not change meanwhile.

    Args:
        model: the model.

    Attributes:
        model: the same.
        nodes: in the order of the file, which is an order they can run in.
        initializers: tensors by name.
        inputs: names of the inputs, without those that are initializers too.
        outputs: names of the outputs.
        opsets: version of each operator set by domain; "" is ONNX's own.

    Raises:
        ModelError: a value is made twice, is read before or without being made, an attribute
            refers to a function's, or there are sparse initializers; all errors in one message.

    Example:
        >>> from onnx import parser
        >>> graph = Graph(parser.parse_model(
        ...     '<ir_version: 11, opset_import: ["": 20]> g (float[N] x) => (float y) {y = Det(z)}'))
        Traceback (most recent call last):
            ...
        isoshard.onnx_bridge.errors.ModelError: graph 'g' cannot be read: node 'Det_0' reads 'z' and nothing makes it
    """  # noqa: E501

    def __init__(self, model: onnx.ModelProto) -> None:
        """Read the graph, and check that it can run in order."""
        if deep := too_deep(model):
            raise ModelError(f"graph {model.graph.name!r} cannot be read: {deep[0]}")
        graph = model.graph
        self.model = model
        self.initializers: dict[str, onnx.TensorProto] = {t.name: t for t in graph.initializer}
        self.inputs = tuple(v.name for v in graph.input if v.name not in self.initializers)
        self.outputs = tuple(v.name for v in graph.output)
        self.opsets = {_domain(entry.domain): entry.version for entry in model.opset_import}
        errors: list[str] = []
        self.nodes = tuple(_nodes(graph, errors))
        self._producers: dict[str, Node] = {}
        self._consumers: dict[str, dict[int, Node]] = {}
        self._index(errors)
        if graph.sparse_initializer:
            errors.append("it has sparse initializers, which are not read: make them dense")
        if errors:
            raise ModelError(f"graph {graph.name!r} cannot be read: {'; '.join(errors)}")

    def shape(self, value: str) -> Shape | None:
        """The shape of a value.

        Args:
            value: its name.

        Returns:
            One entry per axis: a size, the name of a size, or None; None if not even the rank is
            known, or if it is no tensor. What the file leaves out is inferred by onnx.
        """
        return self._info(value, "shape")

    def dtype(self, value: str) -> np.dtype | None:
        """The dtype of a value as NumPy has it, or None if it is unknown or no tensor."""
        return self._info(value, "dtype")

    def producer(self, value: str) -> Node | None:
        """The node that makes a value; None for inputs and initializers."""
        return self._producers.get(value)

    def consumers(self, value: str) -> tuple[Node, ...]:
        """The nodes that read a value, in order, each once."""
        return tuple(self._consumers.get(value, {}).values())

    @property
    def values(self) -> tuple[str, ...]:
        """The names of all values: inputs, initializers, results."""
        return tuple(dict.fromkeys([*self.inputs, *self.initializers, *self._producers]))

    def _info(self, value: str, field: str) -> Any:
        value_info = getattr(self._infos.get(value), field, None)
        if value_info is not None or (value in self._infos and value not in self._producers):
            return value_info
        return getattr(self._inferred.get(value), field, None)

    @functools.cached_property
    def _infos(self) -> dict[str, Info]:
        return read_info(self.model.graph)

    @functools.cached_property
    def _inferred(self) -> dict[str, Info]:
        return infer(self.model)

    def _index(self, errors: list[str]) -> None:
        produced = set(self.inputs) | set(self.initializers)
        results = {name for node in self.nodes for name in node.outputs}
        for node in self.nodes:
            for name in dict.fromkeys(filter(None, (*node.inputs, *node.captured))):
                if name not in produced:
                    when = "before it is made" if name in results else "and nothing makes it"
                    errors.append(f"node {node.name!r} reads {name!r} {when}")
                self._consumers.setdefault(name, {})[node.index] = node
            for name in filter(None, node.outputs):
                if name in produced:
                    errors.append(f"node {node.name!r} makes {name!r}, which is there already")
                produced.add(name)
                self._producers.setdefault(name, node)
        errors += [
            f"output {name!r} is made by nothing" for name in self.outputs if name not in produced
        ]


def _nodes(graph: onnx.GraphProto, errors: list[str]) -> Iterator[Node]:
    taken = {proto.name for proto in graph.node}
    for index, proto in enumerate(graph.node):
        name = proto.name
        if not name:
            name = f"{proto.op_type}_{index}"
            while name in taken:
                name += "_"
            taken.add(name)
        attributes = {}
        for attribute in proto.attribute:
            if attribute.ref_attr_name:
                errors.append(f"attribute {attribute.name!r} of node {name!r} is a function's")
                continue
            attributes[attribute.name] = _attribute(attribute)
        yield Node(
            index,
            name,
            proto.op_type,
            _domain(proto.domain),
            tuple(proto.input),
            tuple(proto.output),
            tuple(dict.fromkeys(_captured(proto))),
            attributes,
            proto,
        )


def _attribute(attribute: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(attribute)
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if attribute.type == onnx.AttributeProto.STRINGS:
        return [item.decode("utf-8", "replace") for item in value]
    return list(value) if not hasattr(value, "SerializeToString") and _many(attribute) else value


def _many(attribute: onnx.AttributeProto) -> bool:
    return attribute.type >= onnx.AttributeProto.FLOATS and attribute.type not in (
        onnx.AttributeProto.SPARSE_TENSOR,
        onnx.AttributeProto.TYPE_PROTO,
    )


def _captured(proto: onnx.NodeProto) -> Iterator[str]:
    """Names that the graphs inside a node read from outside them."""
    for attribute in proto.attribute:
        for inner in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
            bound = {value.name for value in (*inner.input, *inner.initializer)}
            for node in inner.node:
                for name in (*node.input, *_captured(node)):
                    if name and name not in bound:
                        yield name
                bound.update(node.output)
            yield from (value.name for value in inner.output if value.name not in bound)


def _domain(name: str) -> str:
    return "" if name == "ai.onnx" else name
