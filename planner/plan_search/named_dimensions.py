"""The dimensions of a step: which axes of its values must have the same sharding.

Two unions of axes are computed. A *dimension* joins all axes that some operation ties: the batch,
the features of a residual stream, the heads. A *strand* joins only axes that pass through
operations which preserve a value's elements (elementwise, transposed, stacked): a parameter, its
gradient and its optimizer state share strands, and what is computed with it does not. So a
parameter can be stored split along an axis along which nothing is computed.

Parameters of repeated layers, whose names differ in indices only, of one shape, share dimensions
and strands, unless that would join two axes of a parameter. Where it would (a chain of square
layers), every second one is merged, or none. A stack of layers counts as its rows.

>>> layer_pattern("layers.11.experts.3.up")
('layers.#.experts.#.up', (11, 3))

A step is listed as one sequence of operations: bodies of loops inline, with how often they run.
Each value has a range of that list in which it is alive. What XLA fuses (an elementwise operation
with one reader) has no memory: its operands are alive instead.

>>> import jax, jax.numpy as jnp
>>> from ..propagation.flat_program import flattened
>>> def step(w, xs):
...     return jax.lax.scan(lambda x, row: (jnp.tanh(w @ x) + row, None), xs[0], xs)[0]
>>> listing = StepListing.of(flattened(jax.make_jaxpr(step)(jnp.ones((4, 4)), jnp.ones((3, 4)))))
>>> [(one.op.name, one.times) for one in listing.ops if one.op.name == "dot_general"]
[('dot_general', 3)]
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from isoshard.core.kit import TracedStep, is_elementwise
from isoshard.planner.propagation.flat_program import (
    CONSTANT,
    BodyScope,
    FlatOp,
    FlatProgram,
    flattened,
)

WINDOWED = frozenset(
    "conv_general_dilated reduce_window reduce_window_sum reduce_window_max reduce_window_min "
    "select_and_scatter select_and_scatter_add select_and_gather_add".split()
)
"""Primitives whose unsharded factors may be split: neighbours exchange the rows at the edges."""

_PRESERVING = frozenset(
    "optimization_barrier device_put name sharding_constraint reshard transpose squeeze reshape "
    "expand_dims dynamic_slice dynamic_update_slice slice concatenate copy row edge stack".split()
)
_PERIODS = (1, 2)


class Union:
    """Disjoint sets of integers (union-find).

    >>> union = Union(4)
    >>> union.join(3, 1)
    >>> union.find(3), union.find(2)
    (1, 2)
    """

    def __init__(self, size: int) -> None:
        """Each integer is a set of its own."""
        self._parent = list(range(size))

    def find(self, index: int) -> int:
        """The smallest integer of the set."""
        parent = self._parent
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    def join(self, index: int, other: int) -> None:
        """Join two sets."""
        index, other = sorted((self.find(index), self.find(other)))
        self._parent[other] = index

    def copy(self) -> Union:
        """The same sets."""
        again = Union(0)
        again._parent = list(self._parent)
        return again


@dataclasses.dataclass(frozen=True)
class LeafGroup:
    """Parameters that get the same sharding, or one array of the batch.

    Attributes:
        names: of the inputs, as written.
        role: "parameter", "buffer", "input".
        shape: of each, as written.
        itemsize: bytes of an element.
        dimensions: of each axis; -1: it cannot be split.
        strands: of each axis.
    """

    names: tuple[str, ...]
    role: str
    shape: tuple[int, ...]
    itemsize: int
    dimensions: tuple[int, ...]
    strands: tuple[int, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class NamedDimensions:
    """The dimensions of a step.

    Attributes:
        listing: the program.
        groups: the leaves that a plan shards.
        first: of each value, the index of its first axis in the unions.
        dimension: of each axis of each value, by `first`; -1: it cannot be split.
        strand: likewise.
        inside: dimensions of which an axis is an inner factor: where a reshape splits features
            into heads and the elements of a head, those are an inner factor of the features.
        loops: strands of the leading axes of arrays that loops take rows of, or stack.
    """

    listing: StepListing
    groups: tuple[LeafGroup, ...]
    first: tuple[int, ...]
    dimension: tuple[int, ...]
    strand: tuple[int, ...]
    inside: tuple[tuple[int, ...], ...]
    loops: frozenset[int]

    def axes(self, value: int) -> slice:
        """The indices of a value's axes in the unions."""
        start = self.first[value]
        return slice(start, start + len(self.listing.flat.shapes[value]))


def named_dimensions(step: TracedStep) -> NamedDimensions:
    """The dimensions of a step's program.

    Args:
        step: the step; its shardings are not read.
    """
    listing = StepListing.of(flattened(step.program))
    flat = listing.flat
    first = [0]
    for shape in flat.shapes:
        first.append(first[-1] + len(shape))
    inner = [pair for listed in listing.ops for pair in _inner(listed.op, first)]
    tied, saved = Union(first[-1]), Union(first[-1])
    for listed in listing.ops:
        _tie(listed.op, first, tied, saved)
    inputs = _Inputs(step, flat, first)
    _follow(inputs, (tied, saved))
    members = _merged(inputs, tied, saved)
    loops = {saved.find(first[value]) for value in listing.rows}
    return _finished(inputs, listing, tied, saved, inner, loops, members)


class _Inputs:
    """The axes of a step's inputs as written: a stack has those of its rows."""

    def __init__(self, step: TracedStep, flat: FlatProgram, first: list[int]) -> None:
        self.step = step
        self.first = first
        self._starts = [
            first[value] + bool(leaf.layers)
            for leaf, value in zip(step.inputs, flat.inputs, strict=True)
        ]

    def axes(self, index: int) -> range:
        """The indices of the axes of an input."""
        start = self._starts[index]
        return range(start, start + len(self.step.inputs[index].layer_shape))

    def dimension_count(self, index: int, union: Union) -> int:
        """The number of different dimensions of an input's axes."""
        return len({union.find(axis) for axis in self.axes(index)})

    def join(self, positions: Sequence[int], union: Union) -> None:
        """Join the axes of inputs, axis by axis."""
        for other in positions[1:]:
            for axis, two in zip(self.axes(positions[0]), self.axes(other), strict=True):
                union.join(axis, two)


def _tie(op: FlatOp, first: Sequence[int], tied: Union, saved: Union) -> None:
    """Join the axes that an operation ties."""
    preserving = is_elementwise(op.name) or op.name in _PRESERVING
    windowed = op.name in WINDOWED
    for factor, axes in _by_factor(op, first).items():
        if len(axes) < 2 or (factor in op.rule.unsharded and not windowed):
            continue
        indices = [index for index, _ in axes]
        for index in indices[1:]:
            tied.join(indices[0], index)
        if preserving and len({size for _, size in axes}) == 1:
            for index in indices[1:]:
                saved.join(indices[0], index)


def layer_pattern(name: str) -> tuple[str, tuple[int, ...]]:
    """A name with `#` for its indices, and the indices."""
    indices = tuple(int(digits) for digits in re.findall(r"(?<![^.])\d+(?![^.])", name))
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name), indices


def _by_factor(op: FlatOp, first: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """The axes whose outermost factor it is, by factor: each axis' index and number of factors."""
    by_factor = collections.defaultdict[int, list[tuple[int, int]]](list)
    arrays = zip((*op.rule.operands, *op.rule.results), (*op.operands, *op.results), strict=True)
    for axes, value in arrays:
        if value != CONSTANT:
            for axis, factors in enumerate(axes):
                if factors:
                    by_factor[factors[0]].append((first[value] + axis, len(factors)))
    return by_factor


def _inner(op: FlatOp, first: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Pairs of an axis and the axis of another operand or result of which it is an inner factor."""
    axes_of_factor = None
    arrays = zip((*op.rule.operands, *op.rule.results), (*op.operands, *op.results), strict=True)
    for axes, value in arrays:
        for axis, factors in enumerate(axes if value != CONSTANT else ()):
            for factor in factors[1:]:
                axes_of_factor = axes_of_factor or _by_factor(op, first)
                for index, _ in axes_of_factor.get(factor, ()):
                    yield index, first[value] + axis


def _follow(inputs: _Inputs, unions: Sequence[Union]) -> None:
    """Join the axes of optimizer state with those of its parameter."""
    arguments = inputs.step.inputs
    positions = {argument.name: n for n, argument in enumerate(arguments)}
    for index, argument in enumerate(arguments):
        owner = positions.get(argument.follows) if argument.follows is not None else None
        if owner is not None and arguments[owner].layer_shape == argument.layer_shape:
            for union in unions:
                inputs.join((owner, index), union)


def _merged(inputs: _Inputs, tied: Union, saved: Union) -> list[list[int]]:
    """Join the dimensions of repeated parameters; returns the inputs of each group."""
    stacks = collections.defaultdict[str, list[tuple[str, tuple[int, ...], int]]](list)
    single: list[list[int]] = []
    arguments = inputs.step.inputs
    for index, argument in enumerate(arguments):
        if argument.role in ("parameter", "buffer"):
            pattern, indices = layer_pattern(argument.layer_name)
            if indices:
                stacks[pattern.partition("#")[0]].append((pattern, indices, index))
            else:
                single.append([index])
        elif argument.role == "input":
            single.append([index])
    groups: list[list[int]] = []
    for stack in stacks.values():
        for period in (*_PERIODS, 0):
            by_phase = collections.defaultdict[tuple[object, ...], list[int]](list)
            for pattern, indices, index in stack:
                phase: object = tuple(n % period for n in indices) if period else index
                argument = arguments[index]
                by_phase[pattern, argument.layer_shape, argument.dtype, phase].append(index)
            trial = tied.copy()
            for positions in by_phase.values():
                inputs.join(positions, trial)
            if all(
                inputs.dimension_count(n, tied) == inputs.dimension_count(n, trial)
                for _, _, n in stack
            ):
                for positions in by_phase.values():
                    inputs.join(positions, tied)
                    inputs.join(positions, saved)
                groups += by_phase.values()
                break
    return sorted([*single, *groups])


def _finished(
    inputs: _Inputs,
    listing: StepListing,
    tied: Union,
    saved: Union,
    inner: Sequence[tuple[int, int]],
    loops: set[int],
    members: list[list[int]],
) -> NamedDimensions:
    reached, first, arguments = set[int](), inputs.first, inputs.step.inputs
    for member in members:
        axes = inputs.axes(member[0])
        for axis, size in zip(axes, arguments[member[0]].layer_shape, strict=True):
            if size > 1 and saved.find(axis) not in loops:
                reached.add(tied.find(axis))
    indices = {root: index for index, root in enumerate(sorted(reached))}
    strand = tuple(saved.find(axis) for axis in range(first[-1]))
    dimension = tuple(
        -1 if strand[axis] in loops else indices.get(tied.find(axis), -1)
        for axis in range(first[-1])
    )
    inside = collections.defaultdict[int, set[int]](set)
    for axis, full in inner:
        if dimension[full] >= 0 and dimension[axis] != dimension[full]:
            inside[tied.find(axis)].add(dimension[full])
    of_root = {root: tuple(sorted(result)) for root, result in inside.items()}
    groups = []
    for member in members:
        leaf, axes = arguments[member[0]], inputs.axes(member[0])
        span = slice(axes.start, axes.stop)
        names = tuple(
            name for index in member for name in arguments[index].layers or (arguments[index].name,)
        )
        groups.append(
            LeafGroup(
                names,
                leaf.role,
                leaf.layer_shape,
                leaf.dtype.itemsize,
                dimension[span],
                strand[span],
            )
        )
    return NamedDimensions(
        listing,
        tuple(groups),
        tuple(first),
        dimension,
        strand,
        tuple(of_root.get(tied.find(axis), ()) for axis in range(first[-1])),
        frozenset(loops),
    )


_FUSED = frozenset(
    "broadcast_in_dim reshape squeeze expand_dims transpose copy iota name sharding_constraint "
    "slice pad rev edge row optimization_barrier".split()
)


@dataclasses.dataclass(frozen=True)
class ListedOp:
    """One operation and how often a step runs it.

    Attributes:
        op: the operation.
        times: how often.
    """

    op: FlatOp
    times: int


@dataclasses.dataclass
class StepListing:
    """Operations in the order in which they run.

    Attributes:
        flat: the program.
        ops: its operations.
        since: of values, the position from which they are alive.
        until: of values, the last position at which they are read.
        materialized: values with memory of their own.
        rows: values of which a loop takes rows, or which it stacks: their leading axis is its own.
    """

    flat: FlatProgram
    ops: list[ListedOp]
    since: dict[int, int]
    until: dict[int, int]
    materialized: set[int]
    rows: set[int]

    @classmethod
    def of(cls, flat: FlatProgram) -> StepListing:
        """List a program."""
        listing = cls(flat, [], dict.fromkeys(flat.inputs, 0), {}, set(), set())
        listing._add(flat.scope, 1)
        listing._needed(flat.results)
        listing._fuse()
        return listing

    def alive(self, index: int) -> Iterator[int]:
        """The values alive at a position of the list."""
        for value in self.materialized:
            if self.since[value] <= index <= self.until.get(value, -1):
                yield value

    def _needed(self, values: Iterable[int]) -> None:
        self.until.update(dict.fromkeys(values, len(self.ops)))

    def _add(self, scope: BodyScope, times: int) -> None:
        for op in scope.ops:
            self.since.update(
                (result, len(self.ops)) for result in op.results if result not in self.since
            )
            self._needed(op.operands)
            if op.name in ("row", "stack") and op.equation.primitive.name == "scan":
                self.rows.add(op.operands[0] if op.name == "row" else op.results[0])
            self.ops.append(ListedOp(op, times))
            for body in op.bodies:
                if body.kind != "condition":
                    self._add(body, times * body.times)
                    self._needed(body.results)
            if op.bodies:
                self._needed(op.operands)

    def _fuse(self) -> None:
        readers = collections.Counter(
            operand for listed in self.ops for operand in set(listed.op.operands)
        )
        results = set(self.flat.results)
        for listed in reversed(self.ops):
            op = listed.op
            light = is_elementwise(op.name) or op.name in _FUSED
            for result in op.results:
                if result not in self.until:
                    continue
                cast = op.name == "convert_element_type" and op.operands[0] in self.flat.inputs
                if (
                    light
                    and result not in results
                    and (readers[result] == 1 or cast or not op.operands)
                ):
                    for operand in op.operands:
                        if operand != CONSTANT:
                            self.until[operand] = max(self.until[operand], self.until[result])
                elif not op.bodies or op.name not in ("edge",):
                    self.materialized.add(result)
