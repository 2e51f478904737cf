"""From the layout of a torch module to the values of its exported graph.

The exporter writes into every node which modules it came from. So a plan's patterns for modules
find their values in the graph.

>>> from onnx import helper
>>> node = helper.make_node("Relu", ["x"], ["y"])
>>> _ = node.metadata_props.add(key=_SCOPES, value="['', 'layers.0', 'layers.0.act', 'relu']")
>>> x, y = (helper.make_tensor_value_info(name, 1, [8, 4]) for name in "xy")
>>> graph = Graph(helper.make_model(helper.make_graph([node], "g", [x], [y])))
>>> modules_around(graph.nodes[0])
('', 'layers.0', 'layers.0.act')
>>> from isoshard.core.layout.mesh import make_mesh
>>> of_activations(Plan(activations={"*.act": P("x")}), graph, make_mesh((8,), ("x",)))
{'y': P('x',)}
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    BY_DEFAULT,
    BY_SIZE,
    UNSET,
    Plan,
    ResolvedLeaf,
    ResolvedPlan,
    ShardingError,
    Side,
    Tiles,
    check_no_sums,
    stored,
)
from isoshard.onnx_bridge.errors import AnnotationWarning, ModelError
from isoshard.onnx_bridge.reading.graph import Graph, Node
from isoshard.onnx_bridge.reading.parameter_record import Origin

_SCOPES = "pkg.torch.onnx.name_scopes"


def modules_around(node: Node) -> tuple[str, ...]:
    """Read the modules a node comes from, the outermost first."""
    scope = next((p.value for p in node.proto.metadata_props if p.key == _SCOPES), None)
    if not scope:
        return ()
    try:
        return tuple(map(str, ast.literal_eval(scope)))[:-1]
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise ModelError(
            f"node {node.name!r}: the metadata {_SCOPES!r} is no list of names; remove it"
        ) from None


def has_rule(leaf: ResolvedLeaf) -> bool:
    """Whether a file declares the sharding of a weight.

    Returns:
        False for a weight that is not split because no rule names it: that is what an unannotated
        weight is anyway, and where it meets a split value each device takes its part of it.
    """
    return leaf.rule not in (BY_DEFAULT, BY_SIZE) or any(leaf.sharding.spec)


def ruled_specs(resolved: ResolvedPlan) -> dict[str, P]:
    """The specs of the weights whose sharding a file declares."""
    return {leaf.name: leaf.sharding.spec for leaf in resolved.leaves if has_rule(leaf)}


def spec_over(layout: NamedSharding | P, mesh: Mesh, ndim: int) -> P:
    """Say a layout over the mesh of the export."""
    if isinstance(layout, P):
        return layout
    check_no_sums(layout, "a file has no words for that")
    plain = stored(layout)
    if dict(plain.mesh.shape) == dict(mesh.shape):
        return plain.spec
    return Tiles.from_sharding(plain, ndim).to_spec(mesh)


def of_parameters(
    layout: Mapping[str, P], parameters: Mapping[str, Origin], graph: Graph, mesh: Mesh
) -> dict[str, P]:
    """Carry the specs of weights over to the tensors made of them."""
    specs = {}
    for tensor, origin in parameters.items():
        if origin.parameter not in layout:
            continue
        entries = origin.spec(tuple(layout[origin.parameter]))
        specs[tensor] = P(
            *(
                entry if size % _count(entry, mesh) == 0 else None
                for entry, size in zip(entries, graph.initializers[tensor].dims, strict=True)
            )
        )
    return specs


def of_inputs(plan: Plan, graph: Graph, mesh: Mesh) -> dict[str, P]:
    """Find the specs that a plan gives the inputs of a graph."""
    if all(factor.inputs is UNSET for factor in plan.factors):
        return {}
    shapes = {name: _sizes(graph, name, mesh) for name in graph.inputs}
    structs = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    return plan.for_inputs().resolve(structs, mesh).specs


def of_activations(plan: Plan, graph: Graph, mesh: Mesh) -> dict[str, P]:
    """Find the values that a plan speaks of by the modules they go into or come out of.

    Raises:
        ShardingError: a spec does not fit, or two rules give one value different specs; all errors
            are collected.
    """
    around = {node.index: modules_around(node) for node in graph.nodes}
    names = dict.fromkeys(name for modules in around.values() for name in modules)
    specs: dict[str, tuple[P, str]] = {}
    errors: list[str] = []
    unmatched: list[str] = []
    for module in names:
        activation = plan.activation_for(module)
        if activation is None:
            continue
        inside = [node for node in graph.nodes if module in around[node.index]]
        sides: dict[Side, list[str]] = {
            "input": _entering(graph, inside),
            "output": _leaving(graph, inside),
        }
        for side, values in sides.items():
            if not activation.says(side):
                continue
            shapes = {value: _sizes(graph, value, mesh) for value in values}
            paths = [""] if len(values) == 1 and side == "output" else map(str, range(len(values)))
            called = dict(zip(paths, values, strict=True))
            try:
                resolved = activation.resolve(
                    side, {path: shapes[value] for path, value in called.items()}, mesh
                )
            except ShardingError as error:
                errors.append(str(error))
                continue
            for path, sharding in resolved.items():
                if any(entry is P.UNCONSTRAINED for entry in sharding.spec):
                    unmatched.append(f"{called[path]!r} ({side} of {module!r})")
                else:
                    _add(specs, called[path], sharding, f"{side} of {module!r}", errors)
    if errors:
        raise ShardingError("\n".join(["the plan's activations do not fit:", *errors]))
    if unmatched:
        warnings.warn(
            "the plan leaves axes of these values to the compiler, which a file cannot express, so "
            f"they get no spec: {', '.join(unmatched)}. Name every axis, or None, to have them in "
            "the file",
            AnnotationWarning,
            stacklevel=3,
        )
    return {value: spec for value, (spec, _) in specs.items()}


def _add(
    specs: dict[str, tuple[P, str]],
    value: str,
    sharding: NamedSharding,
    where: str,
    errors: list[str],
) -> None:
    spec, before = specs.setdefault(value, (sharding.spec, where))
    if spec != sharding.spec:
        errors.append(f"  value {value!r} is {spec} as {before}, and {sharding.spec} as {where}")


def _entering(graph: Graph, inside: Iterable[Node]) -> list[str]:
    inside = list(inside)
    produced = {value for node in inside for value in node.outputs}
    read = dict.fromkeys(value for node in inside for value in node.inputs if value)
    return [value for value in read if value not in produced and _is_variable(graph, value)]


def _leaving(graph: Graph, inside: Iterable[Node]) -> list[str]:
    """What modules give: values that only others read; if they read all themselves too, all.

    A mask that the first of several layers computes for all of them is no result of it.
    """
    inside = list(inside)
    indices = {node.index for node in inside}
    read = {value for node in inside for value in node.inputs}
    produced = [value for node in inside for value in node.outputs if value]
    leaving = [
        value
        for value in produced
        if value in graph.outputs
        or any(node.index not in indices for node in graph.consumers(value))
    ]
    return [value for value in leaving if value not in read] or leaving


def _is_variable(graph: Graph, value: str) -> bool:
    return value not in graph.initializers


def _sizes(graph: Graph, value: str, mesh: Mesh) -> tuple[int, ...]:
    """A shape in numbers; an open size counts as one that every mesh axis divides."""
    shape = graph.shape(value)
    if shape is None:
        raise ModelError(f"the rank of {value!r} is unknown, so no spec can be checked against it")
    return tuple(size if isinstance(size, int) else mesh.size for size in shape)


def _count(entry: Any, mesh: Mesh) -> int:
    count = 1
    for name in () if entry is None else (entry,) if isinstance(entry, str) else entry:
        count *= mesh.shape[name]
    return count
