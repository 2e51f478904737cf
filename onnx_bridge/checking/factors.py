"""Factors: the axes that an operator's inputs and outputs share, as an einsum's letters.

`C = A @ B` has three: m, k and n. A's axes are (m, k), B's (k, n), C's (m, n). A factor is split
the same way in every tensor that has it; one that no output has is summed over.

>>> product = Factors((("m", "k"), ("k", "n")), (("m", "n"),), FORMALISM)
>>> sorted(product.combined)
['k']

Sources: the groups of operators in ONNX proposal 0007; Alpa, arXiv 2201.12023, for the idea.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import TensorProto, numpy_helper

from ..reading.contents import error_of
from ..reading.external import is_external
from ..reading.graph import Graph, Node

FORMALISM = "formalism"
EXTENSION = "extension"

Axes = tuple[str | None, ...]
Dims = tuple[int | str | None, ...]

_SMALL = 4096
_INTEGERS = (TensorProto.INT64, TensorProto.INT32)


class Unfit(ValueError):
    """A rule does not apply to a node: what it needs is computed, or malformed."""


class NoShape(Unfit):
    """A rule needs a shape that is unknown."""


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors of a node.

    Attributes:
        inputs: per input, the factor of each axis; None for an axis of size 1 that is broadcast,
            and instead of the axes for an input that may have any sharding.
        outputs: likewise; None for an output that does not follow from the inputs.
        basis: where the rule comes from, `FORMALISM` (the proposal) or `EXTENSION` (ours).
        unsplit: factors that have to be on one device: a split is undone before.
        inside: factors of an output that take part in a sum or a window: a split stays, and
            devices exchange partial results.
        limits: factors that can be split only into a divisor of a number.
    """

    inputs: tuple[Axes | None, ...]
    outputs: tuple[Axes | None, ...]
    basis: str
    unsplit: frozenset[str] = frozenset()
    inside: frozenset[str] = frozenset()
    limits: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def combined(self) -> frozenset[str]:
        """Factors along which devices have partial results: summed over, or `inside`."""
        in_outputs = {factor for axes in self.outputs for factor in axes or ()}
        had = {factor for axes in self.inputs for factor in axes or () if factor}
        return frozenset(had - in_outputs - self.unsplit) | self.inside


class Site:
    """A node as rules see it: ranks and constants looked up.

    Args:
        graph: the graph.
        node: one of its nodes.
    """

    def __init__(self, graph: Graph, node: Node) -> None:
        """Look the shapes up."""
        self.graph, self.node = graph, node
        self.inputs = [graph.shape(name) if name else None for name in node.inputs]
        self.outputs = [graph.shape(name) if name else None for name in node.outputs]

    def shape(self, index: int) -> Dims:
        """The shape of an input; `NoShape` if its rank is not known, or there is no such input."""
        return _shape_at(self.inputs, index, "input")

    def result(self, index: int) -> Dims:
        """The shape of an output; `NoShape` likewise."""
        return _shape_at(self.outputs, index, "output")

    def int_attribute(self, name: str, default: int) -> int:
        """An integer among the attributes, or its default; `Unfit` if it is none."""
        value = self.node.attributes.get(name, default)
        if not isinstance(value, int):
            raise Unfit(f"its {name} is no integer")
        return value

    def int_list(self, name: str) -> list[int] | None:
        """Whole numbers among the attributes, None if not there; `Unfit` if they are none."""
        value = self.node.attributes.get(name)
        if value is not None and not (
            isinstance(value, list) and all(isinstance(item, int) for item in value)
        ):
            raise Unfit(f"its {name} are no integers")
        return value

    def axis(self, default: int, rank: int) -> int:
        """The attribute `axis`, counted from 0; `Unfit` if the tensor has no such axis."""
        return self.within(self.int_attribute("axis", default), rank)

    def within(self, axis: int, rank: int) -> int:
        """An axis counted from 0; `Unfit` if the tensor has no such axis."""
        if not -rank <= axis < rank:
            raise Unfit(f"it is along axis {axis} of a tensor of rank {rank}")
        return axis % rank

    def has(self, index: int) -> bool:
        """Whether an optional input is there."""
        return index < len(self.node.inputs) and bool(self.node.inputs[index])

    def constant(self, index: int) -> list[int]:
        """Whole numbers that an input always is, such as axes; `Unfit` if computed, or many."""
        array = self._constant(index)
        if array is None:
            raise Unfit(f"its input {index} is computed")
        return [int(item) for item in array.ravel()]

    def _constant(self, index: int) -> np.ndarray | None:
        if not self.has(index):
            return None
        name = self.node.inputs[index]
        tensor = self.graph.initializers.get(name)
        maker = self.graph.producer(name)
        if tensor is None and maker is not None and maker.op_type == "Constant":
            attributes = maker.attributes
            tensor = attributes.get("value")
            if "value_ints" in attributes:
                return np.asarray(Site(self.graph, maker).int_list("value_ints"), np.int64)
        if not isinstance(tensor, TensorProto) or is_external(tensor) or error_of(tensor):
            return None
        if math.prod(tensor.dims) > _SMALL or tensor.data_type not in _INTEGERS:
            return None
        return numpy_helper.to_array(tensor)

    def axes(self, index: int, rank: int) -> list[int]:
        """Axes of an attribute or input, counted from 0; `Unfit` if they are computed."""
        attribute = self.int_list("axes")
        if attribute is None and self.has(index):
            attribute = self.constant(index)
        return [self.within(axis, rank) for axis in attribute or ()]


def _shape_at(shapes: Sequence[Dims | None], index: int, role: str) -> Dims:
    shape = shapes[index] if index < len(shapes) else None
    if shape is None:
        raise NoShape(f"the rank of its {role} {index} is not known")
    return shape


Rule = Callable[[Site], Factors]
_rules: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the rule of operators of ONNX's own domain."""

    def register(function: Rule) -> Rule:
        _rules.update(dict.fromkeys(names, function))
        return function

    return register


def rule_of(op_type: str, domain: str) -> Rule | None:
    """The rule of an operator, or None if there is none."""
    return _rules.get(op_type) if domain == "" else None


def named(prefix: str, rank: int) -> tuple[str, ...]:
    """One factor per axis: `named("a", 2)` is `("a0", "a1")`."""
    return tuple(f"{prefix}{axis}" for axis in range(rank))


def broadcast(shapes: Sequence[Dims], prefix: str = "a") -> tuple[list[Axes], Axes]:
    """Factors of tensors that are broadcast against each other.

    Example:
        >>> broadcast([("n", 1), (1, 4), (4,)])
        ([('a0', None), (None, 'a1'), ('a1',)], ('a0', 'a1'))
    """
    rank = max(map(len, shapes), default=0)
    names = named(prefix, rank)
    wide = [
        any(len(shape) >= rank - axis and shape[axis - rank] != 1 for shape in shapes)
        for axis in range(rank)
    ]
    axes = [
        tuple(
            names[axis] if shape[axis - rank] != 1 or not wide[axis] else None
            for axis in range(rank - len(shape), rank)
        )
        for shape in shapes
    ]
    return axes, names
