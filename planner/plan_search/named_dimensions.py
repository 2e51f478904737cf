"""Which axes of a program's values are one dimension, and which lie as one parameter does.

Two unions of axes are kept. A *dimension* joins all axes that some operation ties: the batch, the
features of a residual stream, the heads. A *strand* joins only axes that pass through operations
which keep a value as it is (element by element, transposed, stacked): a parameter, its gradient
and its optimizer state share strands, and what is computed with it does not. So a parameter can
rest split along an axis along which nothing is computed.

Layers that repeat are one: parameters whose names differ in numbers only, of one shape, share
dimensions and strands, as long as that makes no two axes of a parameter alike. Where it would (a
chain of square layers), every second one is merged, or none. A stack of layers counts as its rows.

>>> layer_pattern("layers.11.experts.3.up")
('layers.#.experts.#.up', (11, 3))
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterator, Sequence

from isoshard.core.runtime.jaxprs import is_elementwise
from isoshard.core.traced.traced_step import TracedStep
from isoshard.planner.axes.common_expressions import CONSTANT
from isoshard.planner.axes.flat_program import FlatOp, FlatProgram, flattened

from .step_listing import StepListing

WINDOWED = frozenset(
    "conv_general_dilated reduce_window reduce_window_sum reduce_window_max reduce_window_min "
    "select_and_scatter select_and_scatter_add select_and_gather_add".split()
)
"""Primitives along whose whole factors neighbours exchange rows, so that those may be split."""

_KEEPS = frozenset(
    "optimization_barrier device_put name sharding_constraint reshard transpose squeeze reshape "
    "expand_dims dynamic_slice dynamic_update_slice slice concatenate copy row edge stack".split()
)
_PERIODS = (1, 2)


class Union:
    """Sets of numbers that are joined.

    >>> union = Union(4)
    >>> union.join(3, 1)
    >>> union.find(3), union.find(2)
    (1, 2)
    """

    def __init__(self, size: int) -> None:
        """Each number is a set of its own."""
        self._parent = list(range(size))

    def find(self, one: int) -> int:
        """The smallest number of the set."""
        parent = self._parent
        while parent[one] != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        return one

    def join(self, one: int, other: int) -> None:
        """Make one set of two."""
        one, other = sorted((self.find(one), self.find(other)))
        self._parent[other] = one

    def copy(self) -> Union:
        """The same sets."""
        again = Union(0)
        again._parent = list(self._parent)
        return again


@dataclasses.dataclass(frozen=True)
class LeafGroup:
    """Parameters that are laid out alike, or one array of the batch.

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
        groups: what a plan lays out.
        first: of each value, the number of its first axis in the unions.
        dimension: of each axis of each value, by `first`; -1: nothing is to be split along it.
        strand: likewise.
        inside: dimensions of which an axis is an inner part: where a reshape splits features into
            heads and the elements of one, those are an inner part of the features.
        loops: strands of the leading axes of what loops take rows of, or stack.
    """

    listing: StepListing
    groups: tuple[LeafGroup, ...]
    first: tuple[int, ...]
    dimension: tuple[int, ...]
    strand: tuple[int, ...]
    inside: tuple[tuple[int, ...], ...]
    loops: frozenset[int]

    def axes(self, value: int) -> slice:
        """The numbers of a value's axes.

        Args:
            value: its number.
        """
        start = self.first[value]
        return slice(start, start + len(self.listing.flat.shapes[value]))


def named_dimensions(step: TracedStep) -> NamedDimensions:
    """Follow a step's program.

    Args:
        step: any; its layouts are not read.
    """
    listing = StepListing.of(flattened(step.program))
    flat = listing.flat
    first = [0]
    for shape in flat.shapes:
        first.append(first[-1] + len(shape))
    inner = [pair for listed in listing.ops for pair in _inner(listed.op, first)]
    tied, kept = Union(first[-1]), Union(first[-1])
    for listed in listing.ops:
        _tie(listed.op, first, tied, kept)
    inputs = _Inputs(step, flat, first)
    _follow(inputs, (tied, kept))
    members = _merged(inputs, tied, kept)
    loops = {kept.find(first[value]) for value in listing.rows}
    return _finished(inputs, listing, tied, kept, inner, loops, members)


class _Inputs:
    """The axes of a step's inputs as written: a stack has those of its rows."""

    def __init__(self, step: TracedStep, flat: FlatProgram, first: list[int]) -> None:
        self.step = step
        self.first = first
        self._starts = [
            first[value] + bool(one.layers)
            for one, value in zip(step.inputs, flat.inputs, strict=True)
        ]

    def axes(self, place: int) -> range:
        """The numbers of the axes of an input."""
        start = self._starts[place]
        return range(start, start + len(self.step.inputs[place].layer_shape))

    def apart(self, place: int, union: Union) -> int:
        """How many dimensions the axes of an input are of."""
        return len({union.find(axis) for axis in self.axes(place)})

    def join(self, places: Sequence[int], union: Union) -> None:
        """Join the axes of inputs, one by one."""
        for other in places[1:]:
            for one, two in zip(self.axes(places[0]), self.axes(other), strict=True):
                union.join(one, two)


def _tie(op: FlatOp, first: Sequence[int], tied: Union, kept: Union) -> None:
    """Join the axes that an operation ties."""
    keeps = is_elementwise(op.name) or op.name in _KEEPS
    windowed = op.name in WINDOWED
    for factor, axes in _by_factor(op, first).items():
        if len(axes) < 2 or (factor in op.rule.whole and not windowed):
            continue
        numbers = [number for number, _ in axes]
        for one in numbers[1:]:
            tied.join(numbers[0], one)
        if keeps and len({size for _, size in axes}) == 1:
            for one in numbers[1:]:
                kept.join(numbers[0], one)


def layer_pattern(name: str) -> tuple[str, tuple[int, ...]]:
    """A name without its numbers, and the numbers.

    Args:
        name: of a parameter.
    """
    numbers = tuple(int(one) for one in re.findall(r"(?<![^.])\d+(?![^.])", name))
    return re.sub(r"(?<![^.])\d+(?![^.])", "#", name), numbers


def _by_factor(op: FlatOp, first: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Of each factor the axes of which it is the outermost: their number, and their factors."""
    found = collections.defaultdict[int, list[tuple[int, int]]](list)
    arrays = zip((*op.rule.operands, *op.rule.results), (*op.operands, *op.results), strict=True)
    for axes, value in arrays:
        if value != CONSTANT:
            for axis, factors in enumerate(axes):
                if factors:
                    found[factors[0]].append((first[value] + axis, len(factors)))
    return found


def _inner(op: FlatOp, first: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Axes that are an inner part of another operand's or result's axis, each with that one."""
    outermost = None
    arrays = zip((*op.rule.operands, *op.rule.results), (*op.operands, *op.results), strict=True)
    for axes, value in arrays:
        for axis, factors in enumerate(axes if value != CONSTANT else ()):
            for factor in factors[1:]:
                outermost = outermost or _by_factor(op, first)
                for number, _ in outermost.get(factor, ()):
                    yield number, first[value] + axis


def _follow(inputs: _Inputs, unions: Sequence[Union]) -> None:
    """Optimizer state lies as its parameter."""
    given = inputs.step.inputs
    places = {one.name: n for n, one in enumerate(given)}
    for place, one in enumerate(given):
        owner = places.get(one.follows) if one.follows is not None else None
        if owner is not None and given[owner].layer_shape == one.layer_shape:
            for union in unions:
                inputs.join((owner, place), union)


def _merged(inputs: _Inputs, tied: Union, kept: Union) -> list[list[int]]:
    """Join the dimensions of parameters that repeat; gives the inputs that are one group."""
    stacks = collections.defaultdict[str, list[tuple[str, tuple[int, ...], int]]](list)
    single: list[list[int]] = []
    given = inputs.step.inputs
    for place, one in enumerate(given):
        if one.role in ("parameter", "buffer"):
            pattern, numbers = layer_pattern(one.layer_name)
            if numbers:
                stacks[pattern.partition("#")[0]].append((pattern, numbers, place))
            else:
                single.append([place])
        elif one.role == "input":
            single.append([place])
    groups: list[list[int]] = []
    for stack in stacks.values():
        for period in (*_PERIODS, 0):
            found = collections.defaultdict[tuple[object, ...], list[int]](list)
            for pattern, numbers, place in stack:
                phase: object = tuple(n % period for n in numbers) if period else place
                one = given[place]
                found[pattern, one.layer_shape, one.dtype, phase].append(place)
            trial = tied.copy()
            for places in found.values():
                inputs.join(places, trial)
            if all(inputs.apart(n, tied) == inputs.apart(n, trial) for _, _, n in stack):
                for places in found.values():
                    inputs.join(places, tied)
                    inputs.join(places, kept)
                groups += found.values()
                break
    return sorted([*single, *groups])


def _finished(
    inputs: _Inputs,
    listing: StepListing,
    tied: Union,
    kept: Union,
    inner: Sequence[tuple[int, int]],
    loops: set[int],
    members: list[list[int]],
) -> NamedDimensions:
    reached, first, given = set[int](), inputs.first, inputs.step.inputs
    for places in members:
        axes = inputs.axes(places[0])
        for axis, size in zip(axes, given[places[0]].layer_shape, strict=True):
            if size > 1 and kept.find(axis) not in loops:
                reached.add(tied.find(axis))
    numbers = {root: number for number, root in enumerate(sorted(reached))}
    strand = tuple(kept.find(axis) for axis in range(first[-1]))
    dimension = tuple(
        -1 if strand[axis] in loops else numbers.get(tied.find(axis), -1)
        for axis in range(first[-1])
    )
    inside = collections.defaultdict[int, set[int]](set)
    for axis, whole in inner:
        if dimension[whole] >= 0 and dimension[axis] != dimension[whole]:
            inside[tied.find(axis)].add(dimension[whole])
    of_root = {root: tuple(sorted(found)) for root, found in inside.items()}
    groups = []
    for places in members:
        one, axes = given[places[0]], inputs.axes(places[0])
        mine = slice(axes.start, axes.stop)
        names = tuple(
            name for place in places for name in given[place].layers or (given[place].name,)
        )
        groups.append(
            LeafGroup(
                names, one.role, one.layer_shape, one.dtype.itemsize, dimension[mine], strand[mine]
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
