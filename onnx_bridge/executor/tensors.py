"""What becomes of a model's tensors when it is compiled: parameters, tables, constants.

*Parameters* enter the compiled function as arguments: they can be exchanged, donated, trained.
A model of `export_torch` says which tensors are weights; in any other every float tensor is one.
*Tables* are large and no weights (masks, indices): they enter as arguments too, but hidden. The
rest are *constants*, known while compiling, as shapes and axes must be.

>>> from onnx import helper
>>> from ..reading.graph import Graph
>>> w = helper.make_tensor("w", 1, [2], [1.0, 2.0])
>>> axes = helper.make_tensor("axes", 7, [1], [0])
>>> found = sort(Graph(helper.make_model(helper.make_graph([], "g", [], [], [w, axes]))))
>>> found.parameters, found.constants
(('w',), {'axes': array([0])})
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import onnx
from onnx import helper, numpy_helper

from ..reading.graph import Graph
from ..reading.parameter_record import parameters_of
from .operators.registry import find

_TABLE_FROM = 1024  # elements; a shape or a list of axes is shorter
_ASK_FOR_SHAPES = ("Shape", "Size")  # which are known without the values


class Sorted(NamedTuple):
    """The tensors of a model by what becomes of them.

    Attributes:
        parameters: names of the weights.
        tables: names of large tensors that are none.
        constants: the others, in host memory.
    """

    parameters: tuple[str, ...]
    tables: tuple[str, ...]
    constants: dict[str, np.ndarray]


def sort(graph: Graph) -> Sorted:
    """Decide for each tensor of a model."""
    declared = parameters_of(graph.model)
    shown = {name for name in graph.initializers if _is_shown(graph, name)}
    parameters, tables, constants = [], [], {}
    for name, tensor in graph.initializers.items():
        weight = _is_inexact(tensor) and (name in declared or not declared)
        if weight and name not in shown:
            parameters.append(name)
        elif math.prod(tensor.dims) >= _TABLE_FROM and name not in shown:
            tables.append(name)
        else:
            constants[name] = numpy_helper.to_array(tensor)
    return Sorted(tuple(parameters), tuple(tables), constants)


def _is_shown(graph: Graph, name: str) -> bool:
    """Whether an operator needs the values of a tensor while compiling, or can use them."""
    for node in graph.consumers(name):
        operator = find(node.domain, node.op_type, graph.opsets.get(node.domain, 1))
        if operator is None or node.op_type in _ASK_FOR_SHAPES:
            continue
        for position, value in enumerate(node.inputs):
            where = operator.input_name(position)
            if value == name and where in (*operator.static, *operator.keep_numpy):
                return True
    return False


def _is_inexact(tensor: onnx.TensorProto) -> bool:
    if tensor.data_type == onnx.TensorProto.STRING:
        return False
    return jnp.issubdtype(helper.tensor_dtype_to_np_dtype(tensor.data_type), jnp.inexact)
