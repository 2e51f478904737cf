"""The table from ONNX operators to JAX functions.

A function takes the operator's inputs by position, and its attributes by keyword under ONNX's
names; an input that is left out is None. It returns one result or a tuple of them. Where opsets
differ, each version has its own entry, and the newest one that is not too new serves.

>>> @operator("Halve", domain="doc")
... def halve(x):
...     return x / 2
>>> find("doc", "Halve", 1).function is halve, find("doc", "Double", 1)
(True, None)
>>> find("", "Softmax", 12).since, find("", "Softmax", 20).since
(1, 13)

Shapes are constants of an XLA program, so inputs that become one must be known when it is compiled.
Such inputs are named in `static` and arrive as NumPy arrays, int64 as int64. Operators from which
models compute them (Shape, Gather, Concat, Mul, ..) state in `host` how large their result can be;
when all inputs are NumPy arrays and the result is small, they are called with these and must return
NumPy arrays. Everything else is a `jax.Array`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

NEWEST = 25  # the opset up to which the table is checked against ONNX's operator changes
HOST_LIMIT = 1 << 16  # elements of a value that is computed while compiling
TABLE_LIMIT = 1 << 24  # numbers in a table of places or weights that is made while compiling


@dataclasses.dataclass(frozen=True)
class Operator:
    """How one operator is computed, from one opset on.

    Attributes:
        domain: of the operator set; "" is ONNX's own.
        op_type: e.g. "MatMul".
        since: the first opset version it is right for.
        function: the JAX function.
        static: names of inputs that must be known when the program is compiled.
        keep_numpy: names of inputs that stay NumPy arrays if they are known.
        host: an upper bound of the elements of the result, from the inputs, for operators that
            compute with NumPy arrays as well as with JAX's; None for others.
        counted: the function takes `outputs=`, the number of results that the node names.
        inputs: names of the function's positional parameters.
        variadic: any number of inputs follows these.
        attributes: names of the attributes it knows.
    """

    domain: str
    op_type: str
    since: int
    function: Callable[..., Any]
    static: tuple[str, ...]
    keep_numpy: tuple[str, ...]
    host: Callable[[Sequence[np.ndarray]], int] | None
    counted: bool
    inputs: tuple[str, ...]
    variadic: bool
    attributes: frozenset[str]

    def input_name(self, position: int) -> str:
        """The name of the input at a position of the node's list."""
        if position < len(self.inputs):
            return self.inputs[position]
        return self.op_type.lower() + "s" if self.variadic else f"input {position}"


_TABLE: dict[tuple[str, str], dict[int, Operator]] = {}


def operator(
    *op_types: str,
    since: int = 1,
    domain: str = "",
    static: Sequence[str] = (),
    known: Sequence[str] = (),
    host: Callable[[Sequence[np.ndarray]], int] | None = None,
    counted: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the JAX function that computes each operator in `op_types`.

    Args:
        *op_types: names of operators.
        since: the first opset version it is right for.
        domain: of the operator set.
        static: see `Operator`.
        known: see `Operator`.
        host: see `Operator`.
        counted: see `Operator`.

    Returns:
        A decorator that registers its function and returns it unchanged.

    Example:
        >>> @operator("Scaled", domain="doc")
        ... def scaled(x, *, by=2.0):
        ...     return x * by
        >>> sorted(find("doc", "Scaled", 1).attributes)
        ['by']
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        inputs, attributes, variadic = [], [], False
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.kind is parameter.KEYWORD_ONLY:
                attributes.append(name)
            elif parameter.kind is parameter.VAR_POSITIONAL:
                variadic = True
            else:
                inputs.append(name)
        for op_type in op_types:
            _TABLE.setdefault((domain, op_type), {})[since] = Operator(
                domain,
                op_type,
                since,
                function,
                tuple(static),
                tuple(known),
                host,
                counted,
                tuple(inputs),
                variadic,
                frozenset(attributes) - ({"outputs"} if counted else set()),
            )
        return function

    return register


def find(domain: str, op_type: str, opset: int) -> Operator | None:
    """The entry that serves an operator at an opset version, or None.

    Args:
        domain: of the operator set; "ai.onnx" is "".
        op_type: name of the operator.
        opset: the version that the model imports.

    Returns:
        The newest entry that is not newer than `opset`. None if there is none, or if ONNX changed
        the operator after the last version that was checked.
    """
    domain = "" if domain == "ai.onnx" else domain
    versions = _TABLE.get((domain, op_type), {})
    fitting = [since for since in versions if since <= opset]
    if not fitting:
        return None
    entry = versions[max(fitting)]
    if not domain and opset > NEWEST:
        changed = onnx.defs.get_schema(op_type, opset, domain).since_version
        if changed > NEWEST and entry.since != changed:
            return None
    return entry


def entries() -> tuple[Operator, ...]:
    """All entries, ordered by domain, name and version."""
    return tuple(
        versions[since]
        for _, versions in sorted(_TABLE.items(), key=lambda item: item[0])
        for since in sorted(versions)
    )


def largest(inputs: Sequence[np.ndarray]) -> int:
    """The bound of an operator whose result is at most as large as all its inputs together."""
    return sum(x.size for x in inputs if x is not None)


def broadcast(inputs: Sequence[np.ndarray]) -> int:
    """The bound of an operator that broadcasts its inputs."""
    return math.prod(np.broadcast_shapes(*(x.shape for x in inputs if x is not None)))


def outer(inputs: Sequence[np.ndarray]) -> int:
    """The bound of an operator whose result is at most the product of its inputs' sizes."""
    return math.prod(max(x.size, 1) for x in inputs if x is not None)
