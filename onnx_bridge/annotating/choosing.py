"""Choosing: which spec a user's mapping or plan gives to which value of a graph.

>>> from onnx import helper
>>> x = helper.make_tensor_value_info("x", 1, [4])
>>> node = helper.make_node("Relu", ["x"], ["up.y"], name="relu")
>>> graph = Graph(helper.make_model(helper.make_graph([node], "g", [x], [])))
>>> from isoshard.core.layout.mesh import make_mesh
>>> mesh = make_mesh((2,), ("data",))
>>> specs_of(graph, {"up.*": ("data",), ("relu", "x"): None}, mesh)
Specs(values={'up.y': ('data',)}, at_nodes={('relu', 'x'): None})
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import Plan, check_patterns, matches
from isoshard.onnx_bridge.annotating import weight_layouts

from ..errors import AnnotationError
from ..reading.graph import Graph, Node
from ..reading.parameter_record import Origin
from ..reading.parameters import parameters


@dataclasses.dataclass(frozen=True)
class Specs:
    """The specs that were chosen.

    Attributes:
        values: by name of the value.
        at_nodes: by name of a node and of one of its values; before those.
    """

    values: dict[str, Any]
    at_nodes: dict[tuple[str, str], Any]

    def has_spec(self, graph: Graph, node: Node, tensor: str) -> bool:
        """Whether a tensor is annotated at a node."""
        if (node.name, tensor) in self.at_nodes:
            return True
        maker = graph.producer(tensor)
        return tensor in self.values and (maker is None or maker.index == node.index)

    def spec(self, node: Node, tensor: str) -> Any:
        """The spec of a tensor at a node, as the user wrote it."""
        return self.at_nodes.get((node.name, tensor), self.values.get(tensor))


def specs_of(graph: Graph, specs: Mapping[Any, Any] | Plan, mesh: Mesh) -> Specs:
    """Find the spec of every value.

    Raises:
        AnnotationError: a name fits no value, or one that no node reads or makes; or the weights
            that one tensor stands for are to lie differently.
        PlanError: the plan does not fit.
    """
    if isinstance(specs, Plan):
        values = {
            **_of_parameters(graph, specs, mesh),
            **weight_layouts.of_activations(specs, graph, mesh),
            **weight_layouts.of_inputs(specs, graph, mesh),
        }
        touched = set(_touched(graph))
        return Specs({name: spec for name, spec in values.items() if name in touched}, {})
    return _by_name(graph, specs)


def _of_parameters(graph: Graph, plan: Plan, mesh: Mesh) -> dict[str, P]:
    specs: dict[str, P] = {}
    waiting = parameters(graph)
    while waiting:  # several tensors made of one weight may have several shapes: one at a time
        now = {parameter.name: tensor for tensor, parameter in reversed(waiting.items())}
        leaves = {name: waiting[tensor].leaf for name, tensor in now.items()}
        for leaf in plan.resolve(leaves, mesh).leaves:
            tensor = now[leaf.name]
            origin = waiting.pop(tensor).origin
            if weight_layouts.has_rule(leaf):
                specs[tensor] = P(*origin.spec(tuple(leaf.sharding.spec)))
    return specs


def _touched(graph: Graph) -> Iterator[str]:
    for node in graph.nodes:
        yield from filter(None, (*node.inputs, *node.outputs))


def _by_name(graph: Graph, specs: Mapping[Any, Any]) -> Specs:
    pairs = {key: spec for key, spec in specs.items() if isinstance(key, tuple)}
    names = {key: spec for key, spec in specs.items() if not isinstance(key, tuple)}
    check_patterns(names)
    values: dict[str, Any] = {}
    used = set()
    weights = {tensor: parameter.origin for tensor, parameter in parameters(graph).items()}
    for value in dict.fromkeys(_touched(graph)):
        origin = weights.get(value)
        for pattern, spec in names.items():
            if pattern == value or matches(pattern, value):
                values.setdefault(value, spec)
                used.add(pattern)
            elif origin is not None and matches(pattern, origin.parameter):
                values.setdefault(value, _turned(spec, origin))
                used.add(pattern)
    uses = {(node.name, t) for node in graph.nodes for t in (*node.inputs, *node.outputs)}
    wrong = [_unknown(graph, name) for name in names if name not in used]
    wrong += [
        f"{pair!r} is no pair of a node and a value that it reads or makes"
        for pair in pairs
        if pair not in uses
    ]
    if wrong:
        raise AnnotationError("; ".join(wrong))
    return Specs(values, pairs)


def _unknown(graph: Graph, name: str) -> str:
    if name in graph.values:
        return f"no node reads {name!r}, so there is no place for its spec; leave it out"
    names = list(graph.values)
    shown = ", ".join(map(repr, names[:8])) + (", .." if len(names) > 8 else "")
    return f"no value or parameter is called {name!r}; there is {shown}"


def _turned(spec: Any, origin: Origin) -> Any:
    """A weight's spec for a tensor whose axes are in another order."""
    if spec is None or list(origin.axes) == list(range(len(origin.axes))):
        return spec
    if not isinstance(spec, P | tuple | list):
        raise AnnotationError(
            f"{spec!r} is for the weight {origin.parameter!r}, whose axes are in another order "
            "here; write it as a P(..)",
        )
    return P(*origin.spec(tuple(spec)))
