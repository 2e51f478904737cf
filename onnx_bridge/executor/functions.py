"""Function bodies: what an operator without an entry in the table is made of.

A body comes from the model, or from ONNX, which defines many operators by others; some of these
depend on attributes and on the types of the inputs. A body's nodes get the attributes of the call.

>>> from onnx import helper
>>> graph = Graph(helper.make_model(helper.make_graph(
...     [helper.make_node("MeanVarianceNormalization", ["x"], ["y"], axes=[0])],
...     "g", [helper.make_empty_tensor_value_info("x")], [])))
>>> body = body_of(graph.nodes[0], [np.ones((2, 2), np.float32)], {"": 13}, Functions(()))
>>> sorted({node.op_type for node in body.nodes})
['Add', 'Constant', 'Div', 'Pow', 'ReduceMean', 'Sqrt', 'Sub']
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper

from ..errors import ModelError
from ..reading.graph import Graph, Node
from .operators import find

_DEEPEST = 32  # functions that call functions
_MOST_NODES = 20_000


@dataclasses.dataclass(frozen=True)
class FunctionBody:
    """The body that replaces a node.

    Attributes:
        nodes: in an order they can run in.
        inputs: names of the values they read, in the order of the call's inputs.
        outputs: names of the call's results among the values they make.
        opsets: version of each operator set by domain.
        initializers: tensors of the body.
        produced: names of what is made inside.
    """

    nodes: tuple[Node, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    opsets: dict[str, int]
    initializers: tuple[onnx.TensorProto, ...] = ()
    produced: frozenset[str] = frozenset()


class Functions:
    """A model's functions by domain and name.

    Args:
        functions: the protos.
    """

    def __init__(self, functions: Iterable[onnx.FunctionProto]) -> None:
        """Index them."""
        self._by_name = {(f.domain, f.name): f for f in functions}
        self._expanded = 0

    def find(self, domain: str, name: str) -> onnx.FunctionProto | None:
        """The function of a domain and name, or None."""
        return self._by_name.get((domain, name))

    def expanded(self, nodes: int) -> None:
        """Count nodes that came out of bodies."""
        self._expanded += nodes
        if self._expanded > _MOST_NODES:
            raise ModelError(f"its functions make more than {_MOST_NODES} nodes")


def body_of(
    node: Node, inputs: Sequence[Any], opsets: Mapping[str, int], functions: Functions
) -> FunctionBody:
    """The nodes that replace a node."""
    function = functions.find(node.domain, node.op_type) or _of_onnx(node, inputs, opsets)
    if function is None:
        raise ModelError("it has neither a JAX function nor a function body")
    functions.expanded(len(function.node))
    attributes = {attribute.name: attribute for attribute in node.proto.attribute}
    for default in function.attribute_proto:
        attributes.setdefault(default.name, default)
    if not functions.find(node.domain, node.op_type):
        schema = defs.get_schema(node.op_type, opsets.get(node.domain, 1), node.domain)
        for name, attribute in schema.attributes.items():
            if attribute.default_value.name:
                attributes.setdefault(name, attribute.default_value)
    protos = [_bound(proto, attributes) for proto in function.node]
    versions = {entry.domain: entry.version for entry in function.opset_import}
    value_infos = [helper.make_empty_tensor_value_info(name) for name in function.input]
    graph = helper.make_graph(protos, function.name, value_infos, [])
    merged_opsets = {**opsets, **versions}
    return FunctionBody(
        _nodes(graph, merged_opsets), tuple(function.input), tuple(function.output), merged_opsets
    )


def branch_of(node: Node, attribute: str, opsets: Mapping[str, int]) -> FunctionBody:
    """The graph in an attribute of a control-flow node."""
    inner = node.attributes[attribute]
    produced = {name for proto in inner.node for name in proto.output}
    initializers = {tensor.name for tensor in inner.initializer}
    outer = [name for name in node.captured if name not in produced | initializers]
    graph = onnx.GraphProto()
    graph.CopyFrom(inner)
    graph.input.extend(helper.make_empty_tensor_value_info(name) for name in outer)
    return FunctionBody(
        _nodes(graph, dict(opsets)),
        (),
        tuple(value.name for value in inner.output),
        dict(opsets),
        tuple(inner.initializer),
        frozenset(produced | initializers),
    )


def missing_operators(
    nodes: Sequence[Node], opsets: Mapping[str, int], functions: Functions
) -> list[str]:
    """Which operators have neither an entry in the table nor a function body."""
    missing: dict[str, list[str]] = {}
    for node in nodes:
        for op in _missing_operators(node.proto, opsets, functions, 0, set()):
            missing.setdefault(op, []).append(node.name)
    return [
        f"{op} ({f'{len(names)} nodes, first' if len(names) > 1 else 'node'} {names[0]!r})"
        for op, names in sorted(missing.items())
    ]


def _missing_operators(
    proto: onnx.NodeProto,
    opsets: Mapping[str, int],
    functions: Functions,
    depth: int,
    visited: set[tuple[str, str, int]],
) -> Iterator[str]:
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    version = opsets.get(domain, 1)
    if not domain and version > defs.onnx_opset_version():
        raise ModelError(
            f"the model is of opset {version}, and the installed onnx has "
            f"{defs.onnx_opset_version()}: install a newer onnx, or export at an older opset"
        )
    if proto.op_type == "If" and not domain:
        for attribute in proto.attribute:
            for inner in attribute.g.node:
                yield from _missing_operators(inner, opsets, functions, depth, visited)
        return
    if find(domain, proto.op_type, version):
        return
    if depth and (domain, proto.op_type, version) in visited:
        return
    if depth > _DEEPEST:
        raise ModelError(f"function {proto.op_type!r} calls itself, or is nested too deeply")
    function = functions.find(proto.domain, proto.op_type)
    schema = _schema(domain, proto.op_type, version)
    if function is None and schema is not None and schema.has_function:
        function = schema.function_body
    if function is not None:
        inner = {**opsets, **{entry.domain: entry.version for entry in function.opset_import}}
        for node in function.node:
            yield from (
                op if " in " in op else f"{op} in {proto.op_type}"
                for op in _missing_operators(node, inner, functions, depth + 1, visited)
            )
        visited.add((domain, proto.op_type, version))
    elif schema is None or not schema.has_context_dependent_function:
        yield f"{domain + '.' if domain else ''}{proto.op_type}-{version}"


def _schema(domain: str, op_type: str, version: int) -> Any:
    """ONNX's schema of an operator, or None; onnx's stubs lack some of its properties."""
    if not defs.has(op_type, domain):
        return None
    try:
        return defs.get_schema(op_type, version, domain)
    except defs.SchemaError:  # it is newer than the model's opset
        return None


def _of_onnx(
    node: Node, inputs: Sequence[Any], opsets: Mapping[str, int]
) -> onnx.FunctionProto | None:
    """The body that ONNX gives for an operator."""
    version = opsets.get(node.domain, 1)
    schema = _schema(node.domain, node.op_type, version)
    if schema is None:
        return None
    if schema.has_function:
        function = onnx.FunctionProto()
        function.CopyFrom(schema.function_body)
    elif schema.has_context_dependent_function:
        fitting = [v for v in schema.context_dependent_function_opset_versions if v <= version]
        if not fitting:
            return None
        types = [_type_of(value).SerializeToString() for value in inputs]
        function = onnx.FunctionProto()
        function.ParseFromString(
            schema.get_context_dependent_function_with_opset_version(
                max(fitting), node.proto.SerializeToString(), types
            )
        )
    else:
        return None
    if not function.opset_import:
        function.opset_import.append(helper.make_opsetid("", version))
    return function


def _type_of(value: Any) -> onnx.TypeProto:
    if value is None:
        return onnx.TypeProto()
    code = helper.np_dtype_to_tensor_dtype(np.dtype(value.dtype))
    return helper.make_tensor_type_proto(code, value.shape)


def _bound(proto: onnx.NodeProto, attributes: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """A copy of a node in a function, with the call's attributes where it refers to them."""
    copy = onnx.NodeProto()
    copy.CopyFrom(proto)
    del copy.attribute[:]
    for attribute in proto.attribute:
        bound = onnx.AttributeProto()
        if attribute.ref_attr_name:
            if attribute.ref_attr_name not in attributes:
                continue
            bound.CopyFrom(attributes[attribute.ref_attr_name])
            bound.name = attribute.name
        else:
            bound.CopyFrom(attribute)
            if attribute.HasField("g"):
                inner = [_bound(node, attributes) for node in attribute.g.node]
                del bound.g.node[:]
                bound.g.node.extend(inner)
        copy.attribute.append(bound)
    return copy


def _nodes(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> tuple[Node, ...]:
    imports = [helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    return Graph(helper.make_model(graph, opset_imports=imports)).nodes
