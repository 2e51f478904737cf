"""Computations that are built value by value, as XLA's builder does it, and run by JAX.

>>> x = parameter(0, jax.ShapeDtypeStruct((2,), "float32"))
>>> doubled = Computation("doubled", apply(lambda a: a + a, x), 1)
>>> doubled(jax.numpy.ones(2)).tolist()
[2.0, 2.0]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax


class Node:
    """One value of a computation.

    Attributes:
        function: makes it of the arrays of `inputs`; the number of a parameter.
        inputs: what it is made of.
        aval: its shape and dtype; a tuple of them for several values in one.
    """

    __slots__ = ("aval", "function", "inputs")

    def __init__(self, function: Any, inputs: tuple[Node, ...], aval: Any):
        """See the class."""
        self.function, self.inputs, self.aval = function, inputs, aval


def parameter(index: int, aval: Any) -> Node:
    """An argument of a computation.

    Args:
        index: its place.
        aval: its shape and dtype, or a tuple of them.
    """
    return Node(index, (), aval)


def apply(function: Callable[..., Any], *inputs: Node) -> Node:
    """What a JAX function makes of values.

    Args:
        function: of as many arrays.
        *inputs: the values.

    Raises:
        TypeError, ValueError: JAX's, where shapes or dtypes do not fit.
    """
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        aval = jax.eval_shape(function, *(operand.aval for operand in inputs))
    return Node(function, inputs, aval)


class Computation:
    """A function of arrays that was built value by value.

    Args:
        name: for messages and reports.
        root: its result.
        count: how many arguments it has; as many as are used if not given.
    """

    def __init__(self, name: str, root: Node, count: int | None = None):
        """See the class."""
        self.name, self.root = name, root
        used = {node.function: node.aval for node in _all(root) if isinstance(node.function, int)}
        self.count = max(used, default=-1) + 1 if count is None else count
        self.avals = [used.get(index) for index in range(self.count)]
        """The shapes and dtypes of the arguments; None for one that is not used."""
        self.__name__ = name

    def __call__(self, *arrays: Any) -> Any:
        """Compute the result."""
        if len(arrays) != self.count:
            raise TypeError(f"{self.name} takes {self.count} arrays, not {len(arrays)}")
        with jax.enable_x64(True):
            return self._evaluate(arrays)

    def _evaluate(self, arrays: Sequence[Any]) -> Any:
        values: dict[int, Any] = {}
        waiting = [self.root]
        while waiting:  # no recursion: a computation may be long
            node = waiting[-1]
            missing = [operand for operand in node.inputs if id(operand) not in values]
            if missing and id(node) not in values:
                waiting += missing
                continue
            waiting.pop()
            if id(node) not in values:
                values[id(node)] = (
                    arrays[node.function]
                    if isinstance(node.function, int)
                    else node.function(*(values[id(operand)] for operand in node.inputs))
                )
        return values[id(self.root)]


def _all(root: Node) -> Iterator[Node]:
    """A value, and all that it is made of."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if id(node) not in seen:
            seen.add(id(node))
            waiting += node.inputs
            yield node


def hlo(computation: Computation) -> str:
    """A computation as HLO text, before any optimisation.

    Args:
        computation: whose arguments are all used.
    """
    with jax.enable_x64(True):
        lowered = jax.jit(computation).lower(*computation.avals)
    return str(lowered.as_text(dialect="hlo"))
