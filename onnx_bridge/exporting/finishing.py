"""What an exported model goes through last: simplified for its shardings, and saved.

Attention's keys are transposed through a reshape that fuses batch and heads. The two are split over
different mesh axes, and no layout of the fused axis has both: the partitioner would have to gather.

>>> from onnx import helper
>>> shape = [helper.make_tensor(name, 7, [len(to)], to)
...          for name, to in (("fused", [-1, 16, 8]), ("whole", [4, 2, 8, 16]))]
>>> nodes = [
...     helper.make_node("Reshape", ["keys", "fused"], ["a"]),
...     helper.make_node("Transpose", ["a"], ["b"], perm=[0, 2, 1]),
...     helper.make_node("Reshape", ["b", "whole"], ["y"]),
... ]
>>> keys = helper.make_tensor_value_info("keys", 1, [4, 2, 16, 8])
>>> y = helper.make_tensor_value_info("y", 1, [4, 2, 8, 16])
>>> model = helper.make_model(helper.make_graph(nodes, "g", [keys], [y], shape))
>>> simplify(model)
>>> [(node.op_type, *node.input) for node in model.graph.node]
[('Transpose', 'keys')]
"""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import helper

from ..reading.graph import Graph, Node

# A protobuf message ends at 2 GiB; half of it leaves room for the graph itself.
_EXTERNAL_FROM = 1 << 30


def simplify(model: onnx.ModelProto) -> None:
    """Transpose the last two axes without fusing the others; in place, with the same values."""
    graph = Graph(model)
    dropped: list[Node] = []
    loose: set[str] = set()
    for last in graph.nodes:
        chain = _fused_transpose(graph, last)
        if chain is None:
            continue
        first = chain[0]
        rank = len(graph.shape(first.inputs[0]) or ())
        perm = [*range(rank - 2), rank - 1, rank - 2]
        last.proto.op_type = "Transpose"
        del last.proto.input[:], last.proto.attribute[:]
        last.proto.input.append(first.inputs[0])
        last.proto.attribute.append(helper.make_attribute("perm", perm))
        dropped += chain
        loose.update(first.inputs[1:], last.inputs[1:])
    for node in sorted(dropped, key=lambda node: -node.index):
        del model.graph.node[node.index]
    _drop_unread(model, loose)


def save(model: onnx.ModelProto, path: Path) -> None:
    """Write a model; from 1 GiB on its weights go into `<name>.data` next to it."""
    if model.ByteSize() < _EXTERNAL_FROM:
        onnx.save_model(model, path)
        return
    data_name = f"{path.name}.data"
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    onnx.save_model(copy, path, save_as_external_data=True, location=data_name)


def _fused_transpose(graph: Graph, last: Node) -> tuple[Node, Node] | None:
    """The reshape that fuses and the transpose before the reshape that takes apart, or None."""
    if last.op_type != "Reshape":
        return None
    middle = _only_maker(graph, last.inputs[0], "Transpose")
    first = None if middle is None else _only_maker(graph, middle.inputs[0], "Reshape")
    if middle is None or first is None or middle.attributes.get("perm") != [0, 2, 1]:
        return None
    before, fused, after = (
        graph.shape(value) for value in (first.inputs[0], middle.inputs[0], last.outputs[0])
    )
    if before is None or fused is None or after is None or None in before or len(before) < 3:
        return None
    fits = fused[1:] == before[-2:] and after == (*before[:-2], before[-1], before[-2])
    return (first, middle) if fits else None


def _only_maker(graph: Graph, value: str, op_type: str) -> Node | None:
    """The node of a kind that makes a value which one node reads, or None."""
    maker = graph.producer(value)
    if maker is None or maker.op_type != op_type or value in graph.outputs:
        return None
    return maker if len(graph.consumers(value)) == 1 else None


def _drop_unread(model: onnx.ModelProto, loose: set[str]) -> None:
    """Drop those tensors among some that no node reads any more."""
    read = {value for node in Graph(model).nodes for value in (*node.inputs, *node.captured)}
    read.update(value.name for value in model.graph.output)
    for tensor in [tensor for tensor in model.graph.initializer if tensor.name in loose - read]:
        model.graph.initializer.remove(tensor)
