"""A graph's nodes computed one after the other with JAX, to be traced by `jax.jit`.

Values are of two kinds. A NumPy array is known while compiling: constants, integer initializers,
shapes and what is computed from them. A `jax.Array` is known when the program runs. What makes a
shape must be of the first kind; everything else is put on the device when it is needed there,
64-bit integers as 32-bit ones while `jax_enable_x64` is off, each value checked to fit.

>>> import jax.numpy as jnp
>>> from onnx import helper
>>> from ..reading.graph import Graph
>>> nodes = [
...     helper.make_node("Shape", ["x"], ["sizes"]),
...     helper.make_node("Relu", ["x"], ["y"]),
...     helper.make_node("Reshape", ["y", "flat"], ["z"]),
... ]
>>> unknown = [helper.make_empty_tensor_value_info(name) for name in ("x", "flat")]
>>> graph = Graph(helper.make_model(helper.make_graph(nodes, "g", unknown, [])))
>>> values = {"x": jnp.array([[-1.0, 2.0]]), "flat": np.array([-1])}
>>> found = evaluate(graph.nodes, values, {"": 20})
>>> found["sizes"], found["z"]
(array([1, 2]), Array([0., 2.], dtype=float32))

An operator without an entry in the table is replaced by its function body: one in the model, or
the one that ONNX gives with the operator. `If` is followed where its condition is known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from ..errors import ModelError
from ..reading.graph import Node
from .functions import FunctionBody, Functions, body_of, branch_of, missing_operators
from .operators import Operator, find
from .operators.operator_arguments import on_device, scalar_of
from .operators.registry import HOST_LIMIT, largest

Values = dict[str, Any]
Constrain = Callable[[Node, str, Any], Any]
_ERRORS = (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError)


def evaluate(
    nodes: Sequence[Node],
    values: Mapping[str, Any],
    opsets: Mapping[str, int],
    constrain: Constrain | None = None,
    functions: Iterable[onnx.FunctionProto] = (),
) -> Values:
    """Compute nodes in their order.

    Args:
        nodes: in an order they can run in.
        values: what they read from outside, by name: NumPy arrays (known while compiling) or JAX's.
        opsets: version of each operator set by domain; "" is ONNX's own.
        constrain: called with a node, the name of an input or output, and its array; returns the
            array to go on with. It is not called inside function bodies.
        functions: the model's own.

    Returns:
        All values by name: those given, and those computed.

    Raises:
        ModelError: an operator has no entry and no function body (all of them are named), or a node
            cannot be computed.
    """
    table = require_operators(nodes, opsets, functions)
    return _evaluate(nodes, dict(values), opsets, constrain or _as_it_is, table)


def require_operators(
    nodes: Sequence[Node],
    opsets: Mapping[str, int],
    functions: Iterable[onnx.FunctionProto] = (),
) -> Functions:
    """Raise unless every operator can be computed."""
    table = Functions(functions)
    missing = missing_operators(nodes, opsets, table)
    if missing:
        raise ModelError(
            f"{len(missing)} operators have neither a JAX function nor a function body: "
            f"{'; '.join(missing)}. Export the model without them, or teach them with "
            "isoshard.onnx.operator"
        )
    return table


def _evaluate(nodes, values: Values, opsets, constrain: Constrain, functions: Functions) -> Values:
    for node in nodes:
        absent = [name for name in node.inputs if name and name not in values]
        if absent:
            raise ModelError(f"node {node.name!r} ({node.op_type}) reads {absent}, which is absent")
        inputs = [values[name] if name else None for name in node.inputs]
        try:
            results = _node(node, inputs, values, opsets, constrain, functions)
        except _ERRORS as error:
            raise ModelError(f"node {node.name!r} ({node.op_type}): {error}") from error
        for name, result in zip(node.outputs, results, strict=False):
            if name:
                values[name] = constrain(node, name, result)
        lost = [name for name in node.outputs[len(results) :] if name]
        if lost:
            raise ModelError(f"node {node.name!r} ({node.op_type}) does not compute {lost}")
    return values


def _node(node, inputs, values, opsets, constrain, functions) -> Sequence[Any]:
    opset = opsets.get(node.domain, opsets.get("", 1) if not node.domain else 1)
    if node.op_type == "If" and not node.domain:
        return _branch(node, inputs, values, opsets, constrain, functions)
    entry = find(node.domain, node.op_type, opset)
    if entry is not None:
        return _call(entry, node, inputs, constrain)
    inputs = [
        constrain(node, name, value) if name else None
        for name, value in zip(node.inputs, inputs, strict=True)
    ]
    body = body_of(node, inputs, opsets, functions)
    return _body(body, node, inputs, functions)


def _call(entry: Operator, node: Node, inputs: list[Any], constrain: Constrain) -> Sequence[Any]:
    """The results of an operator of the table."""
    unknown = sorted(set(node.attributes) - entry.attributes)
    if unknown:
        raise ModelError(f"attributes {unknown} are not among {sorted(entry.attributes)}")
    if len(inputs) > len(entry.inputs) and not entry.variadic:
        raise ModelError(f"it has {len(inputs)} inputs, and at most {len(entry.inputs)} are known")
    attributes = dict(node.attributes)
    if entry.counted:
        attributes["outputs"] = len(node.outputs)
    on_host = _fits_host(entry, inputs)
    if not on_host:
        inputs = [
            None if value is None else _argument(entry, node, position, value, constrain)
            for position, value in enumerate(inputs)
        ]
    outputs = entry.function(*inputs, **attributes)
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    return [np.asarray(result) for result in results] if on_host else results


def _fits_host(entry: Operator, inputs: Sequence[Any]) -> bool:
    """Whether to compute with NumPy: all inputs are known and small, and the result will be."""
    present = [value for value in inputs if value is not None]
    if entry.host is None or not all(isinstance(value, np.ndarray) for value in present):
        return False
    return max(largest(present), entry.host(inputs)) <= HOST_LIMIT


def _argument(entry: Operator, node: Node, position: int, value: Any, constrain: Constrain) -> Any:
    """An input as the operator's function wants it."""
    role, name = entry.input_name(position), node.inputs[position]
    if isinstance(value, np.ndarray):
        if role in entry.static or role in entry.keep_numpy:
            return value
        value = on_device(value, name)
    elif role in entry.static:
        raise ModelError(
            f"its input {name!r} ({role}) becomes a shape or an axis, which must be known when the "
            "program is compiled, but it is computed from the model's inputs: export the model "
            "with fixed shapes, or make this value a constant"
        )
    return constrain(node, name, value)


def _body(
    body: FunctionBody, node: Node, inputs: Sequence[Any], functions: Functions
) -> Sequence[Any]:
    """The results of a function that the node names."""
    values = dict.fromkeys(body.inputs) | dict(zip(body.inputs, inputs, strict=False))
    nodes = [_without(node, values) for node in body.nodes]
    values_out = _evaluate(nodes, values, body.opsets, _as_it_is, functions)
    requested = zip(body.outputs, node.outputs, strict=False)
    return [values_out[name] if is_used else None for name, is_used in requested]


def _without(node: Node, values: Values) -> Node:
    """A node of a function that is called without some optional inputs: they are left out."""
    inputs = [name if values.get(name, node) is not None else "" for name in node.inputs]
    return dataclasses.replace(node, inputs=tuple(inputs))


def _branch(node, inputs, values, opsets, constrain, functions) -> Sequence[Any]:
    """The results of the branch of an `If` that its condition names."""
    if not isinstance(inputs[0], np.ndarray):
        raise ModelError(
            f"its condition {node.inputs[0]!r} is computed from the model's inputs: only an If "
            "whose condition is known when the program is compiled can be followed"
        )
    taken = "then_branch" if scalar_of(inputs[0], "the condition") else "else_branch"
    graph = branch_of(node, taken, opsets)
    outer = {name: value for name, value in values.items() if name not in graph.produced}
    inner = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializers}
    values_out = _evaluate(graph.nodes, {**outer, **inner}, opsets, _as_it_is, functions)
    return [values_out[name] for name in graph.outputs]


def _as_it_is(node: Node, tensor: str, array: Any) -> Any:
    return array
