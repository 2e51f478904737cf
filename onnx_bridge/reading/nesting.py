"""Models whose graphs lie inside each other more deeply than protobuf reads, copies and sends.

Protobuf's messages may be nested a hundred deep, and each graph inside a node takes three. A model
in memory can be deeper, and then fails wherever a part of it is copied, with protobuf's own error.
So the depth is looked at first.

>>> from onnx import helper
>>> graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "main", [], [])
>>> too_deep(helper.make_model(graph))
[]
"""

from __future__ import annotations

import onnx

from .walking import inner_graphs

DEEPEST = 31  # graphs, one inside another, below the model's own


def too_deep(model: onnx.ModelProto) -> list[str]:
    """Whether graphs lie inside each other more deeply than protobuf can copy."""
    level = [model.graph, *model.functions]
    level += [graph for s in model.training_info for graph in (s.initialization, s.algorithm)]
    for _ in range(DEEPEST + 1):
        level = [inner for g in level for node in g.node for _, inner in inner_graphs(node)]
        if not level:
            return []
    return [
        f"its graphs lie more than {DEEPEST} deep inside each other, which no file can: make "
        "functions of the inner ones"
    ]
