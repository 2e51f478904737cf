"""Names of weights in an exported model: each weight has its own tensor, once more.

An optimizer keeps one tensor of several that are equal, such as the scales of all fresh
LayerNorms. They are weights of their own, perhaps in other stages, so each gets its tensor back.
Weights that are tied in the module stay one.
"""

from __future__ import annotations

from collections.abc import Mapping

import onnx

from ..reading.graph import Graph
from ..reading.parameter_record import Origin
from .origins import Origins


def separate(model: onnx.ModelProto, origins: Origins, first: Mapping[str, str]) -> None:
    """Give each weight its own tensor again, in place."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in Graph(model).nodes:
        for slot, before in enumerate(origins.read_by(node)):
            if slot >= len(node.inputs) or node.inputs[slot] not in tensors:
                continue
            now = node.inputs[slot]
            was, origin = origins.of(before), origins.of(now)
            if was is None or before == now or _same_weight(was, origin, first):
                continue
            if before not in tensors:
                tensors[before] = model.graph.initializer.add()
                tensors[before].CopyFrom(tensors[now])
                tensors[before].name = before
            node.proto.input[slot] = before


def _same_weight(was: Origin, origin: Origin | None, first: Mapping[str, str]) -> bool:
    return origin is not None and (
        first.get(was.parameter, was.parameter) == first.get(origin.parameter, origin.parameter)
    )


def trace(model: onnx.ModelProto, origins: Origins, first: Mapping[str, str]) -> dict[str, Origin]:
    """Find the weight that each tensor of a model comes from."""
    names = {}
    for tensor in model.graph.initializer:
        origin = origins.of(tensor.name)
        if origin is not None and origin.parameter in first:
            names[tensor.name] = Origin(first[origin.parameter], origin.axes)
    return names
