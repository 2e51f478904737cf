"""Where the tensors of an exported model come from: parameters, folded, renamed, shared or as is.

An exporter's optimizer folds `Transpose(weight)` into a new tensor `val_2`, and keeps one tensor of
several that are equal. Before it runs every weight still has its own name and every change of it is
a node. So the graph is read twice: *before* says what each constant is made of, *after* asks by the
names of values and nodes, which optimizers keep.

>>> from onnx import helper
>>> w = helper.make_tensor("up.weight", 1, [2, 3], [0.0] * 6)
>>> x = helper.make_tensor_value_info("x", 1, [4, 3])
>>> nodes = [
...     helper.make_node("Transpose", ["up.weight"], ["val_0"], perm=[1, 0]),
...     helper.make_node("MatMul", ["x", "val_0"], ["y"]),
... ]
>>> y = helper.make_tensor_value_info("y", 1, [4, 2])
>>> before = Origins(Graph(helper.make_model(helper.make_graph(nodes, "g", [x], [y], [w]))))
>>> before.of("val_0")
Origin(parameter='up.weight', axes=(1, 0))
>>> before.of("y") is None                              # no constant
True

A constant that several weights are made into (`scale * weight`, a folded batch norm) counts as the
one whose shape it has.
"""

from __future__ import annotations

from collections.abc import Callable

from ..reading.graph import Graph, Node
from ..reading.parameter_record import Axes, Origin


class Origins:
    """The origins of all constants of a model that is not optimized yet.

    Args:
        graph: of that model; its initializers carry the names of the weights.
    """

    def __init__(self, graph: Graph) -> None:
        """Follow the weights through the nodes that compute on constants alone."""
        self._reads = {(node.op_type, node.outputs): node.inputs for node in graph.nodes}
        self._origins: dict[str, Origin] = {}
        constant = set(graph.initializers)
        for name, tensor in graph.initializers.items():
            self._origins[name] = Origin(name, tuple(range(len(tensor.dims))))
        for node in graph.nodes:
            if not constant.issuperset(filter(None, (*node.inputs, *node.captured))):
                continue
            constant.update(node.outputs)
            for output in filter(None, node.outputs):
                origins = _follow(node, output, self._origins, graph)
                if origins is not None:
                    self._origins[output] = origins

    def of(self, value: str) -> Origin | None:
        """The origin of a constant by its name, or None."""
        return self._origins.get(value)

    def read_by(self, node: Node) -> tuple[str, ...]:
        """What a node of the optimized model read before, or () if it is a new one."""
        return self._reads.get((node.op_type, node.outputs), ())


def _follow(node: Node, output: str, origins: dict[str, Origin], graph: Graph) -> Origin | None:
    if node.op_type in _ELEMENTWISE:
        return _elementwise(node, output, origins, graph)
    rule = _RULES.get(node.op_type)
    if rule is None or not node.inputs:
        return None
    origin = origins.get(node.inputs[0])
    axes = None if origin is None else rule(node, node.inputs[0], output, graph)
    if origin is None or axes is None:
        return None
    return Origin(
        origin.parameter, tuple(None if axis is None else origin.axes[axis] for axis in axes)
    )


def _same(node: Node, value: str, output: str, graph: Graph) -> Axes | None:
    shape = graph.shape(value)
    return None if shape is None else tuple(range(len(shape)))


def _transposed(node: Node, value: str, output: str, graph: Graph) -> Axes | None:
    shape = graph.shape(value)
    if shape is None:
        return None
    return tuple(node.attributes.get("perm") or reversed(range(len(shape))))


def _reshaped(node: Node, value: str, output: str, graph: Graph) -> Axes | None:
    """Axes that a reshape keeps: the product of the axes before them is equal in both shapes."""
    old, new = graph.shape(value), graph.shape(output)
    if old is None or new is None or not all(isinstance(size, int) for size in (*old, *new)):
        return None
    starts = {start: axis for axis, start in _starts(old)}
    return tuple(
        next((starts[at] for axis, at in _starts(new) if axis == start and at in starts), None)
        for start in range(len(new))
    )


def _gathered(node: Node, value: str, output: str, graph: Graph) -> Axes | None:
    """Rows that were gathered: the axes of the indices replace the axis that they index."""
    shape, picked = graph.shape(value), graph.shape(node.inputs[1])
    if shape is None or picked is None:
        return None
    rank = len(shape)
    axis = node.attributes.get("axis", 0) % rank
    return (*range(axis), *(None for _ in picked), *range(axis + 1, rank))


def _starts(shape: tuple[object, ...]) -> list[tuple[int, tuple[int, int]]]:
    """For each axis longer than 1: the product of the sizes before it, and its size."""
    before, starts = 1, []
    for axis, size in enumerate(shape):
        if isinstance(size, int) and size != 1:
            starts.append((axis, (before, size)))
            before *= size
    return starts


def _elementwise(
    node: Node, output: str, origins: dict[str, Origin], graph: Graph
) -> Origin | None:
    shape = graph.shape(output)
    for name in node.inputs:
        if name in origins and shape is not None and graph.shape(name) == shape:
            return origins[name]
    return None


_ELEMENTWISE = ("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Neg", "Exp")
_RULES: dict[str, Callable[[Node, str, str, Graph], Axes | None]] = {
    "Transpose": _transposed,
    "Gather": _gathered,
    **dict.fromkeys(("Identity", "Cast", "CastLike", "Slice", "Split"), _same),
    **dict.fromkeys(("Reshape", "Flatten", "Squeeze", "Unsqueeze"), _reshaped),
}
