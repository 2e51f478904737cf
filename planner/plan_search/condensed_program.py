"""A step in which what is equal stands once, with a count: 48 layers are as many kinds as one.

Two values are of one kind if shape, dtype, dimensions and the parameter that they lie like are the
same; two operations, if their values are and they compute the same. The cost of a layout is a sum
over kinds.
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
    """Values that are alike.

    Attributes:
        shape: the global one.
        itemsize: bytes of an element.
        dtype: its name.
        dimensions: of each axis; -1: none.
        order: axes, the one that comes first where two are of one dimension first.
        inside: of each axis, the dimensions of which it is an inner part.
        group: the number of the `LeafGroup` that it lies like; -1: none.
        places: of a value that lies like a group, the axis of the group for each of its axes.
    """

    shape: tuple[int, ...]
    itemsize: int
    dtype: str
    dimensions: tuple[int, ...]
    order: tuple[int, ...]
    inside: tuple[tuple[int, ...], ...]
    group: int = -1
    places: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Of the whole."""
        return math.prod(self.shape) * self.itemsize


@dataclasses.dataclass(frozen=True)
class OpKind:
    """Operations that are alike.

    Attributes:
        name: of the primitive.
        operands: numbers of kinds of values; -1: a constant.
        results: likewise.
        rule: how axes belong together.
        flops: of one run, of the whole.
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
        counts: of each, how many a step makes.
        ops: kinds of operations, of those alone whose operands and results can lie differently.
        times: of each, how often a step runs it.
        traffic: outside and inside of loops, for kinds of values how many go through memory in the
            other operations.
        moments: places of the step where memory may be fullest: kinds of values, and how many of
            them take memory there.
        resting: of each group, bytes of parameters and of optimizer state, of the whole.
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
    """Count what is equal."""
    listing, flat = dimensions.listing, dimensions.listing.flat
    owner = _owners(dimensions)
    indices: dict[ValueKind, int] = {}
    kinds = [
        indices.setdefault(_value_kind(value, dimensions, owner), len(indices))
        for value in range(len(flat.shapes))
    ]
    values = tuple(indices)
    counts = [0] * len(values)
    found = collections.Counter[OpKind]()
    traffic = (collections.Counter[int](), collections.Counter[int]())
    for value in flat.inputs:
        counts[kinds[value]] += 1
    modules: dict[str, int] = {}
    for listed in listing.ops:
        op = listed.op
        module = None if op.equation is None else module_of(op.equation)
        if module is not None:
            modules.setdefault(module, kinds[op.results[0]])
        for one in op.results:
            counts[kinds[one]] += listed.times
        if op.bodies or _is_stacked(op):
            continue
        looped = listed.times > 1
        moved = _moved(op, kinds, values, listing.kept)
        if moved is None:
            read = () if op.name == "row" else op.operands  # of a stack one row is read, no more
            for one in (*read, *op.results):
                if one in listing.kept:
                    traffic[looped][kinds[one]] += listed.times
        else:
            found[_op_kind(op, kinds, values, moved, looped)] += listed.times
    taken = {one for result, one in zip(step.results, flat.results, strict=True)
             if result.replaces is not None}  # fmt: skip
    taken |= set(flat.inputs)
    moments = []
    for index in _places(dimensions, kinds, values, taken):
        alive = (one for one in listing.alive(index) if one not in taken)
        moments.append(dict(collections.Counter(kinds[one] for one in alive)))
    resting, rest = _resting(step, dimensions)
    return CondensedProgram(
        dimensions, values, tuple(counts), tuple(found), tuple(found.values()), traffic,
        tuple(moments), resting, rest, modules,
    )  # fmt: skip


def _owners(dimensions: NamedDimensions) -> dict[int, tuple[int, int]]:
    """Strands that one axis of one group alone has: the group and the axis."""
    defaultdict: dict[int, set[tuple[int, int]]] = collections.defaultdict(set)
    for index, group in enumerate(dimensions.groups):
        for axis, strand in enumerate(group.strands):
            defaultdict[strand].add((index, axis))
    return {strand: next(iter(of)) for strand, of in defaultdict.items() if len(of) == 1}


def _value_kind(
    value: int, dimensions: NamedDimensions, owner: Mapping[int, tuple[int, int]]
) -> ValueKind:
    flat = dimensions.listing.flat
    shape = flat.shapes[value]
    axes = dimensions.axes(value)
    mine, strands = dimensions.dimension[axes], dimensions.strand[axes]
    order = tuple(sorted(range(len(shape)), key=lambda axis: (strands[axis], axis)))
    owned = [owner.get(one, (-1, -1)) for one in strands]
    groups = {
        group
        for (group, _), size, strand in zip(owned, shape, strands, strict=True)
        if size > 1 and strand not in dimensions.loops
    }
    group = groups.pop() if len(groups) == 1 else -1
    value_kind = tuple(axis if of == group else -1 for of, axis in owned) if group >= 0 else ()
    dims = tuple(-1 if size == 1 else one for one, size in zip(mine, shape, strict=True))
    inside = dimensions.inside[axes]
    return ValueKind(
        shape, flat.itemsizes[value], flat.dtypes[value], dims, order, inside, group, value_kind
    )


def _moved(
    op: FlatOp, kinds: list[int], values: tuple[ValueKind, ...], saved: set[int]
) -> tuple[int, ...] | None:
    """Which operands and results go through memory; None: all lie alike."""
    if is_elementwise(op.name) or op.name in _SILENT:
        return None
    if op.name == "broadcast_in_dim":
        grouped = any(one != CONSTANT and values[kinds[one]].group >= 0 for one in op.operands)
        return () if grouped else None
    if op.name == "reshape":
        return ()
    return tuple(n for n, one in enumerate((*op.operands, *op.results)) if one != CONSTANT)


def _op_kind(
    op: FlatOp,
    kinds: list[int],
    values: tuple[ValueKind, ...],
    moved: tuple[int, ...],
    looped: bool,
) -> OpKind:
    operands = tuple(-1 if one == CONSTANT else kinds[one] for one in op.operands)
    results = tuple(kinds[one] for one in op.results)
    flops = flops_of(op.equation) if is_product(op.name) else 0.0
    dtype = values[operands[0]].dtype if operands and operands[0] >= 0 else "float32"
    return OpKind(op.name, operands, results, op.rule, flops, dtype, moved, looped)


def _places(
    dimensions: NamedDimensions, kinds: list[int], values: tuple[ValueKind, ...], taken: set[int]
) -> list[int]:
    """Where memory is fullest if all lies whole, if the batch is split, if parameters are too."""
    listing = dimensions.listing
    batch = {
        one for group in dimensions.groups if group.role == "input" for one in group.dimensions
    } - {-1}
    length = len(listing.ops) + 1
    found = {length * n // (_SAMPLES + 1) for n in range(1, _SAMPLES + 1)}
    for split_batch, split_groups in ((False, False), (True, False), (True, True)):
        change = [0.0] * (length + 1)
        for value in listing.kept - taken:
            kind = values[kinds[value]]
            split = split_batch and batch & set(kind.dimensions)
            split = split or (split_groups and kind.group >= 0)
            weight = kind.bytes / (_DEVICES if split else 1)
            change[listing.since[value]] += weight
            change[listing.until.get(value, listing.since[value]) + 1] -= weight
        found.add(_fullest(change))
    return sorted(found)


def _fullest(change: Iterable[float]) -> int:
    best = now = 0.0
    where = 0
    for index, one in enumerate(change):
        now += one
        if now > best:
            best, where = now, index
    return where


def _resting(step: TracedStep, dimensions: NamedDimensions) -> tuple[tuple[int, ...], int]:
    group_of = {name: n for n, group in enumerate(dimensions.groups) for name in group.names}
    group_of |= {
        one.name: group_of[one.layer_name] for one in step.inputs if one.layer_name in group_of
    }
    resting, rest = [0] * len(dimensions.groups), 0
    for one in step.inputs:
        group = group_of.get(one.name, group_of.get(one.follows or "", -1))
        if group < 0:
            rest += one.bytes
        else:
            resting[group] += one.bytes
    return tuple(resting), rest


def _is_stacked(op: FlatOp) -> bool:
    """Whether an operation only stacks what the iterations of a scan give."""
    return op.name == "stack" and op.equation is not None and op.equation.primitive.name == "scan"
