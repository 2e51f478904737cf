"""Everywhere a model keeps nodes and tensors: its graph, graphs inside nodes, functions, training.

>>> from onnx import helper
>>> inner = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "then", [], [])
>>> both = {"then_branch": inner, "else_branch": inner}
>>> node = helper.make_node("If", ["c"], ["z"], name="if", **both)
>>> model = helper.make_model(helper.make_graph([node], "main", [], []))
>>> [body.where for body in bodies(model)]
['the graph', "else_branch of node 'if'", "then_branch of node 'if'"]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import onnx

LONGEST = 80

DEEPEST = 31
"""The most graphs inside each other, below the model's own: protobuf reads and copies messages
nested at most a hundred deep, and each graph inside a node takes three levels. A deeper model in
memory fails with protobuf's own error wherever a graph of it is copied, so the depth is checked
first."""


class GraphBody(NamedTuple):
    """Something that has nodes.

    Attributes:
        where: in words, for messages.
        proto: the graph or function.
    """

    where: str
    proto: onnx.GraphProto | onnx.FunctionProto


def bodies(model: onnx.ModelProto) -> Iterator[GraphBody]:
    """Everything in a model that has nodes."""
    waiting = [GraphBody("the graph", model.graph)]
    for step in model.training_info:
        waiting += [GraphBody("a training graph", step.initialization)]
        waiting += [GraphBody("a training graph", step.algorithm)]
    waiting += [
        GraphBody(f"function {shown(function.name)}", function) for function in model.functions
    ]
    waiting.reverse()
    while waiting:
        body = waiting.pop()
        yield body
        for node in reversed(body.proto.node):
            waiting += [GraphBody(*inner) for inner in inner_graphs(node)][::-1]


def inner_graphs(node: onnx.NodeProto) -> Iterator[tuple[str, onnx.GraphProto]]:
    """The graphs that a node has as attributes."""
    for attribute in node.attribute:
        if attribute.HasField("g") or attribute.graphs:
            graphs = [attribute.g] if attribute.HasField("g") else []
            for graph in (*graphs, *attribute.graphs):
                yield f"{attribute.name[:LONGEST]} of {describe_node(node)}", graph


def too_deep(model: onnx.ModelProto) -> list[str]:
    """The error of a model whose graphs are nested more deeply than protobuf can copy.

    Example:
        >>> from onnx import helper
        >>> graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "main", [], [])
        >>> too_deep(helper.make_model(graph))
        []
    """
    level = [model.graph, *model.functions]
    level += [graph for s in model.training_info for graph in (s.initialization, s.algorithm)]
    for _ in range(DEEPEST + 1):
        level = [inner for g in level for node in g.node for _, inner in inner_graphs(node)]
        if not level:
            return []
    return [
        f"its graphs are nested more than {DEEPEST} deep, which no file can be: make functions of "
        "the inner ones"
    ]


def tensors(model: onnx.ModelProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Every tensor that a model holds data of.

    Yields:
        Where it is, in words, and the tensor: weights, constants in attributes, and the values and
        indices of sparse ones.
    """
    for body in bodies(model):
        if isinstance(body.proto, onnx.GraphProto):
            for tensor in body.proto.initializer:
                yield f"weight {shown(tensor.name)}", tensor
            yield from _sparse(body.where, body.proto.sparse_initializer)
        else:
            yield from _attributes(body.where, body.proto.attribute_proto)
        for node in body.proto.node:
            yield from _attributes(describe_node(node), node.attribute)


def describe_node(node: onnx.NodeProto) -> str:
    """How messages call a node: by its name, or by what it makes."""
    if node.name:
        return f"node {shown(node.name)}"
    first_output = next(iter(node.output), "")
    return f"the {node.op_type[:LONGEST] or '?'} that makes {shown(first_output)}"


def shown(name: str) -> str:
    """A name in quotes, cut where a file gave it absurd length."""
    return repr(name if len(name) <= LONGEST else f"{name[:LONGEST]}..")


def _attributes(
    where: str, attributes: Sequence[onnx.AttributeProto]
) -> Iterator[tuple[str, onnx.TensorProto]]:
    for attribute in attributes:
        single = [attribute.t] if attribute.HasField("t") else []
        for tensor in (*single, *attribute.tensors):
            yield f"attribute {shown(attribute.name)} of {where}", tensor
        sparse = [attribute.sparse_tensor] if attribute.HasField("sparse_tensor") else []
        yield from _sparse(where, (*sparse, *attribute.sparse_tensors))


def _sparse(
    where: str, sparse: Sequence[onnx.SparseTensorProto]
) -> Iterator[tuple[str, onnx.TensorProto]]:
    for tensor in sparse:
        yield f"the values of a sparse tensor in {where}", tensor.values
        yield f"the indices of a sparse tensor in {where}", tensor.indices
