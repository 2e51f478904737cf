"""The parameters of a graph: which tensors are weights, by their names in plans.

>>> from onnx import helper
>>> from .parameter_record import write_parameters
>>> folded = helper.make_tensor("val_2", 1, [2, 3], [0.0] * 6)
>>> shape = helper.make_tensor("shape", 7, [2], [3, 2])
>>> model = helper.make_model(helper.make_graph([], "g", [], [], [folded, shape]))
>>> write_parameters(model, {"val_2": Origin("up.weight", (1, 0))})
>>> parameters(Graph(model))["val_2"].leaf
ShapeDtypeStruct(shape=(3, 2), dtype=float32)

Numbers, text, and lists of integers (shapes, axes, indices) are no parameters.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from .graph import Graph
from .parameter_record import Origin, parameters_of


class Parameter(NamedTuple):
    """One tensor that is a parameter.

    Attributes:
        leaf: shape and dtype as the weight has them that the tensor was made of.
        origin: that weight, and which axis of it each axis of the tensor is. A tensor of which the
            file says nothing, or that has axes the weight has not, is its own weight.
    """

    leaf: jax.ShapeDtypeStruct
    origin: Origin

    @property
    def name(self) -> str:
        """The name in plans."""
        return self.origin.parameter


def parameters(graph: Graph) -> dict[str, Parameter]:
    """List the parameters of a graph."""
    declared = parameters_of(graph.model)
    by_name = {}
    for tensor, proto in graph.initializers.items():
        dtype, dims = graph.dtype(tensor), tuple(proto.dims)
        if dtype is None or dtype.kind in "OSU" or not dims:
            continue
        if dtype.kind in "iub" and len(dims) < 2:
            continue
        axes = tuple(range(len(dims)))
        origin = declared.get(tensor, Origin(tensor, axes))
        if sorted(-1 if axis is None else axis for axis in origin.axes) != list(axes):
            origin = Origin(tensor, axes)
        shape = tuple(dims[origin.axes.index(axis)] for axis in axes)
        by_name[tensor] = Parameter(jax.ShapeDtypeStruct(shape, np.dtype(dtype)), origin)
    return by_name


def named_leaves(graph: Graph) -> dict[str, jax.ShapeDtypeStruct]:
    """The parameters of a graph as a plan resolves them.

    Returns:
        Shape and dtype by name of the weight; of several tensors made of one, the first counts.
    """
    leaves: dict[str, jax.ShapeDtypeStruct] = {}
    for parameter in parameters(graph).values():
        leaves.setdefault(parameter.name, parameter.leaf)
    return leaves
