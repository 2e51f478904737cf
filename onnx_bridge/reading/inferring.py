"""Shapes and dtypes of a graph's values: those of the file, and those that onnx infers.

>>> from onnx import helper
>>> x = helper.make_tensor_value_info("x", 1, [2, "n"])
>>> read_info(helper.make_graph([], "g", [x], []))["x"]
Info(shape=(2, 'n'), dtype=dtype('float32'))
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from onnx import helper

from ..errors import ModelError

Dims = tuple[int | str | None, ...]
_SMALL = 4096  # elements; larger tensors are no shapes, axes or indices that inference looks into


class Info(NamedTuple):
    """What is known of a value.

    Attributes:
        shape: a size, a name or None per axis; None if the rank is unknown.
        dtype: as NumPy has it, or None.
    """

    shape: Dims | None
    dtype: np.dtype | None


def read_info(graph: onnx.GraphProto) -> dict[str, Info]:
    """Read the shapes and dtypes that a graph declares for its values."""
    infos = {v.name: _of_type(v.type) for v in (*graph.value_info, *graph.output, *graph.input)}
    infos.update((t.name, Info(tuple(t.dims), _dtype(t.data_type))) for t in graph.initializer)
    return infos


def infer(model: onnx.ModelProto) -> dict[str, Info]:
    """Infer the shapes and dtypes that a model does not declare.

    The weights are left out: only small tensors, which may be shapes, are looked into.
    """
    graph = model.graph
    try:
        # With data_prop, onnx makes a list of every 1-D tensor that is cast or joined: a file of
        # 100 bytes can ask for one of 2**60 entries.
        return read_info(onnx.shape_inference.infer_shapes(_without_weights(model)).graph)
    except DecodeError:  # protobuf takes 100 messages inside each other
        why = "its types are nested too deeply"
    except (onnx.shape_inference.InferenceError, ValueError) as error:  # the other: dtypes
        why = str(error)
    raise ModelError(f"shapes of graph {graph.name!r} cannot be inferred: {why}")


def _without_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    graph = model.graph
    slim = onnx.ModelProto(ir_version=model.ir_version)
    slim.opset_import.extend(model.opset_import)
    slim.functions.extend(model.functions)
    slim.graph.name = graph.name or "graph"
    slim.graph.node.extend(graph.node)
    slim.graph.value_info.extend(graph.value_info)
    slim.graph.output.extend(graph.output)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    slim.graph.input.extend(v for v in graph.input if v.name not in weights)
    for tensor in graph.initializer:
        if math.prod(tensor.dims) <= _SMALL and not tensor.external_data:
            slim.graph.initializer.append(tensor)
        else:
            value = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            slim.graph.input.append(value)
    return slim


def _of_type(kind: onnx.TypeProto) -> Info:
    if not kind.HasField("tensor_type"):
        return Info(None, None)
    tensor = kind.tensor_type
    shape = tuple(map(_dim, tensor.shape.dim)) if tensor.HasField("shape") else None
    return Info(shape, _dtype(tensor.elem_type))


def _dim(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return dim.dim_value
    return dim.dim_param or None


def _dtype(code: int) -> np.dtype | None:
    is_defined = code in onnx.TensorProto.DataType.values() and code != onnx.TensorProto.UNDEFINED
    return np.dtype(helper.tensor_dtype_to_np_dtype(code)) if is_defined else None
