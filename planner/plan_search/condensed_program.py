"""A step with equal operations counted, not repeated: 48 layers are as many kinds as one.

Two values are of one kind if they agree in shape, dtype, dimensions and the parameter whose
sharding they have; two operations, if their values do and they compute the same. The cost of a
choice is a sum over kinds.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping

from isoshard.core.kit import TracedStep, flops_of, is_elementwise, is_product
from isoshard.planner.propagation.factors import DimensionRule
from isoshard.planner.propagation.flat_program import CONSTANT, FlatOp

from .constrained_step import module_of
from .named_dimensions import NamedDimensions

_SILENT = frozenset(
    "optimization_barrier device_put name sharding_constraint transpose squeeze copy edge row "
    "iota random_bits".split()
)
_SAMPLES = 8
_DEVICES = 64


@dataclasses.dataclass(frozen=True)
class ValueKind:
    """A kind of values.

    Attributes:
        shape: the global shape.
        itemsize: bytes of an element.
        dtype: its name.
        dimensions: of each axis; -1: none.
        order: the axes in the order in which those of one dimension are split.
        inside: of each axis, the dimensions of which it is an inner factor.
        group: the index of the `LeafGroup` whose sharding it has; -1: none.
        group_axes: of a value with a group, the axis of the group for each of its axes.
    """

    shape: tuple[int, ...]
    itemsize: int
    dtype: str
    dimensions: tuple[int, ...]
    order: tuple[int, ...]
    inside: tuple[tuple[int, ...], ...]
    group: int = -1
    group_axes: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Of the global array."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class OpKind:
    """A kind of operations.

    Attributes:
        name: of the primitive.
        operands: indices of kinds of values; -1: a constant.
        results: likewise.
        rule: which axes must have the same sharding.
        flops: of one run on global arrays.
        dtype: in which it computes.
        moved: which operands and results go through memory.
        looped: whether it runs in a loop.
    """

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: DimensionRule
    flops: float
    dtype: str
    moved: tuple[int, ...]
    looped: bool


@dataclasses.dataclass(frozen=True, eq=False)
class CondensedProgram:
    """A step by kinds.

    Attributes:
        dimensions: whose program it is.
        values: kinds of values.
        counts: of each, how many a step computes.
        ops: kinds of operations, of those whose operands and results may differ in sharding.
        times: of each, how often a step runs it.
        traffic: outside and inside of loops, for kinds of values how many go through memory in the
            other operations.
        moments: positions of the step where memory may peak: kinds of values, and how many of
            them are alive there.
        resting: of each group, global bytes of parameters and of optimizer state.
        rest: bytes of inputs that are in no group; every device has them.
        modules: kinds of the outputs of modules, by name.
    """

    dimensions: NamedDimensions
    values: tuple[ValueKind, ...]
    counts: tuple[int, ...]
    ops: tuple[OpKind, ...]
    times: tuple[int, ...]
    traffic: tuple[Mapping[int, int], Mapping[int, int]]
    moments: tuple[Mapping[int, int], ...]
    resting: tuple[int, ...]
    rest: int
    modules: Mapping[str, int]

    @property
    def flops(self) -> float:
        """Of the whole step."""
        return sum(op.flops * times for op, times in zip(self.ops, self.times, strict=True))


def condensed(step: TracedStep, dimensions: NamedDimensions) -> CondensedProgram:
    """Count the equal operations and values of a step."""
    listing, flat = dimensions.listing, dimensions.listing.flat
    owner = _owners(dimensions)
    indices: dict[ValueKind, int] = {}
    kinds = [
        indices.setdefault(_value_kind(value, dimensions, owner), len(indices))
        for value in range(len(flat.shapes))
    ]
    values = tuple(indices)
    counts = [0] * len(values)
    op_counts = collections.Counter[OpKind]()
    traffic = (collections.Counter[int](), collections.Counter[int]())
    for value in flat.inputs:
        counts[kinds[value]] += 1
    modules: dict[str, int] = {}
    for listed in listing.ops:
        op = listed.op
        module = None if op.equation is None else module_of(op.equation)
        if module is not None:
            modules.setdefault(module, kinds[op.results[0]])
        for result in op.results:
            counts[kinds[result]] += listed.times
        if op.bodies or _is_stacked(op):
            continue
        looped = listed.times > 1
        moved = _moved(op, kinds, values, listing.materialized)
        if moved is None:
            read = () if op.name == "row" else op.operands  # of a stack one row is read, no more
            for array in (*read, *op.results):
                if array in listing.materialized:
                    traffic[looped][kinds[array]] += listed.times
        else:
            op_counts[_op_kind(op, kinds, values, moved, looped)] += listed.times
    updated = {array for result, array in zip(step.results, flat.results, strict=True)
             if result.replaces is not None}  # fmt: skip
    updated |= set(flat.inputs)
    moments = []
    for index in _fullest_positions(dimensions, kinds, values, updated):
        alive = (array for array in listing.alive(index) if array not in updated)
        moments.append(dict(collections.Counter(kinds[array] for array in alive)))
    resting, rest = _resting(step, dimensions)
    return CondensedProgram(
        dimensions, values, tuple(counts), tuple(op_counts), tuple(op_counts.values()), traffic,
        tuple(moments), resting, rest, modules,
    )  # fmt: skip


def _owners(dimensions: NamedDimensions) -> dict[int, tuple[int, int]]:
    """The group and axis of each strand that only one axis has."""
    axes_of_strand: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
    for index, group in enumerate(dimensions.groups):
        for axis, strand in enumerate(group.strands):
            axes_of_strand[strand].add((index, axis))
    return {strand: next(iter(of)) for strand, of in axes_of_strand.items() if len(of) == 1}


def _value_kind(
    value: int, dimensions: NamedDimensions, owner: Mapping[int, tuple[int, int]]
) -> ValueKind:
    flat = dimensions.listing.flat
    shape = flat.shapes[value]
    axes = dimensions.axes(value)
    axis_dimensions, strands = dimensions.dimension[axes], dimensions.strand[axes]
    order = tuple(sorted(range(len(shape)), key=lambda axis: (strands[axis], axis)))
    owned = [owner.get(strand, (-1, -1)) for strand in strands]
    groups = {
        group
        for (group, _), size, strand in zip(owned, shape, strands, strict=True)
        if size > 1 and strand not in dimensions.loops
    }
    group = groups.pop() if len(groups) == 1 else -1
    group_axes = tuple(axis if of == group else -1 for of, axis in owned) if group >= 0 else ()
    dims = tuple(
        -1 if size == 1 else dimension
        for dimension, size in zip(axis_dimensions, shape, strict=True)
    )
    inside = dimensions.inside[axes]
    return ValueKind(
        shape, flat.itemsizes[value], flat.dtypes[value], dims, order, inside, group, group_axes
    )


def _moved(
    op: FlatOp, kinds: list[int], values: tuple[ValueKind, ...], saved: set[int]
) -> tuple[int, ...] | None:
    """The indices of arrays that go through memory; None: all have the same sharding."""
    if is_elementwise(op.name) or op.name in _SILENT:
        return None
    if op.name == "broadcast_in_dim":
        grouped = any(
            operand != CONSTANT and values[kinds[operand]].group >= 0 for operand in op.operands
        )
        return () if grouped else None
    if op.name == "reshape":
        return ()
    return tuple(n for n, array in enumerate((*op.operands, *op.results)) if array != CONSTANT)


def _op_kind(
    op: FlatOp,
    kinds: list[int],
    values: tuple[ValueKind, ...],
    moved: tuple[int, ...],
    looped: bool,
) -> OpKind:
    operands = tuple(-1 if operand == CONSTANT else kinds[operand] for operand in op.operands)
    results = tuple(kinds[result] for result in op.results)
    flops = flops_of(op.equation) if is_product(op.name) else 0.0
    dtype = values[operands[0]].dtype if operands and operands[0] >= 0 else "float32"
    return OpKind(op.name, operands, results, op.rule, flops, dtype, moved, looped)


def _fullest_positions(
    dimensions: NamedDimensions, kinds: list[int], values: tuple[ValueKind, ...], updated: set[int]
) -> list[int]:
    """Where memory peaks if nothing is split, if the batch is, if parameters are too."""
    listing = dimensions.listing
    batch = {
        dimension
        for group in dimensions.groups
        if group.role == "input"
        for dimension in group.dimensions
    } - {-1}
    length = len(listing.ops) + 1
    positions = {length * n // (_SAMPLES + 1) for n in range(1, _SAMPLES + 1)}
    for split_batch, split_groups in ((False, False), (True, False), (True, True)):
        differences = [0.0] * (length + 1)
        for value in listing.materialized - updated:
            kind = values[kinds[value]]
            split = split_batch and batch & set(kind.dimensions)
            split = split or (split_groups and kind.group >= 0)
            weight = kind.bytes / (_DEVICES if split else 1)
            differences[listing.since[value]] += weight
            differences[listing.until.get(value, listing.since[value]) + 1] -= weight
        positions.add(_fullest(differences))
    return sorted(positions)


def _fullest(differences: Iterable[float]) -> int:
    best = now = 0.0
    where = 0
    for index, difference in enumerate(differences):
        now += difference
        if now > best:
            best, where = now, index
    return where


def _resting(step: TracedStep, dimensions: NamedDimensions) -> tuple[tuple[int, ...], int]:
    group_of = {name: n for n, group in enumerate(dimensions.groups) for name in group.names}
    group_of |= {
        leaf.name: group_of[leaf.layer_name] for leaf in step.inputs if leaf.layer_name in group_of
    }
    resting, rest = [0] * len(dimensions.groups), 0
    for leaf in step.inputs:
        group = group_of.get(leaf.name, group_of.get(leaf.follows or "", -1))
        if group < 0:
            rest += leaf.bytes
        else:
            resting[group] += leaf.bytes
    return tuple(resting), rest


def _is_stacked(op: FlatOp) -> bool:
    """Whether an operation stacks the results of a scan's iterations."""
    return op.name == "stack" and op.equation is not None and op.equation.primitive.name == "scan"
