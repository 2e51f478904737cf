"""How an operation is partitioned among devices, and the collectives between two shardings.

>>> moves(((0,), ()), ((), (0,)), (8, 16), 4, (4, 2))
((ReshardingStep('all-to-all', (0,), 128),), 128)
>>> moves(((0,), (1,)), ((), (1,)), (8, 16), 4, (4, 2))
((ReshardingStep('all-gather', (0,), 256),), 256)

Resharding slices first, which sends nothing and makes the rest smaller. Then mesh axes move from
one axis of the array to another, and last axes are gathered.

An elementwise operation is partitioned as its result is. In a product, a reduction or an operation
by index each mesh axis splits the factor by which the fewest bytes are sent: gathering an operand,
moving an axis of one, or adding up partial results.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

from .factors import ArraySharding, DimensionRule, Split, by_axis, by_factor


@dataclasses.dataclass(frozen=True)
class ReshardingStep:
    """One collective.

    Attributes:
        kind: as HLO calls it.
        axes: numbers of the mesh axes along which devices talk.
        sent: bytes of its result on one device; of a reduce-scatter, of its operand.
        inner: of an all-gather, whether axes of the array lie outside the one that is gathered.
            The host's compiler puts the gathered axis outside first, and back afterwards.
    """

    kind: str
    axes: Split
    sent: int
    inner: bool = False

    def __repr__(self) -> str:
        """Short, as it is written."""
        return f"ReshardingStep({self.kind!r}, {self.axes}, {self.sent})"


def shard_shape(
    shape: Sequence[int], layout: ArraySharding, mesh: Sequence[int]
) -> tuple[int, ...]:
    """The shape of one device's block; of axes that do not divide the largest."""
    return _shard_shape(tuple(shape), layout, tuple(mesh))


@functools.lru_cache(maxsize=1 << 14)
def _shard_shape(
    shape: tuple[int, ...], layout: ArraySharding, mesh: tuple[int, ...]
) -> tuple[int, ...]:
    return tuple(
        [
            size if not split else -(-size // math.prod([mesh[one] for one in split]))
            for size, split in zip(shape, layout, strict=True)
        ]
    )


def shard_bytes(
    shape: Sequence[int], layout: ArraySharding, itemsize: int, mesh: Sequence[int]
) -> int:
    """Bytes of one device's block."""
    return math.prod(shard_shape(shape, layout, mesh)) * itemsize


def moves(
    before: ArraySharding,
    after: ArraySharding,
    shape: Sequence[int],
    itemsize: int,
    mesh: Sequence[int],
) -> tuple[tuple[ReshardingStep, ...], int]:
    """The collectives from one layout to another.

    Returns:
        The collectives in their order, and the bytes of one device's block at the end.
    """
    end = shard_bytes(shape, after, itemsize, mesh)
    if before == after:
        return (), end
    had = {one: axis for axis, split in enumerate(before) for one in split}
    has = {one: axis for axis, split in enumerate(after) for one in split}
    now = [list(split) for split in before]
    for one, axis in has.items():
        if one not in had:
            now[axis].append(one)
    result: list[ReshardingStep] = []

    def size() -> int:
        return shard_bytes(shape, tuple(map(tuple, now)), itemsize, mesh)

    moved: dict[tuple[int, int], list[int]] = {}
    for one, axis in had.items():
        if one in has and has[one] != axis:
            moved.setdefault((axis, has[one]), []).append(one)
    for (old, new), several in moved.items():
        for one in several:
            now[old].remove(one)
            now[new].append(one)
        result.append(ReshardingStep("all-to-all", tuple(several), size()))
    for axis in range(len(before)):
        gone = [one for one in before[axis] if one not in has]
        if gone:
            for one in gone:
                now[axis].remove(one)
            inner = math.prod(shard_shape(shape[:axis], tuple(map(tuple, now[:axis])), mesh)) > 1
            result.append(ReshardingStep("all-gather", tuple(gone), size(), inner))
    turned = [one for axis, split in enumerate(after) if tuple(now[axis]) != split for one in split]
    if turned:
        result.append(ReshardingStep("collective-permute", tuple(turned), end))
    return tuple(result), end


_FLOPS_PER_BYTE = 64.0
"""What is computed by all devices alike counts as a byte sent for so many operations."""


@dataclasses.dataclass(frozen=True)
class OpPartition:
    """One operation on devices.

    Attributes:
        operands: the layouts it takes.
        results: the layouts it gives, before terms are added up.
        summed: mesh axes whose devices have terms of the results.
        neighbours: (operand, its axis, mesh axes) where rows of neighbours are needed.
        shares: by how much work is divided.
    """

    operands: tuple[ArraySharding, ...]
    results: tuple[ArraySharding, ...]
    summed: Split
    neighbours: tuple[tuple[int, int, Split], ...]
    shares: int


def partition_op(
    rule: DimensionRule,
    operands: Sequence[ArraySharding | None],
    results: Sequence[ArraySharding],
    sizes: Sequence[int],
    mesh: Sequence[int],
    *,
    follows: bool,
    windows: bool,
    lookup: bool,
    adds: bool,
    flops: float,
) -> OpPartition:
    """Divide one operation.

    Args:
        rule: which axes belong together.
        operands: layouts that there are; None of constants.
        results: layouts that are wanted.
        sizes: bytes of operands, then results, whole.
        mesh: sizes of the mesh axes.
        follows: it is divided as its result is.
        windows: whole factors are divided, too, with rows of the neighbours.
        lookup: rows of the first operand are looked up; it is never gathered for that alone.
        adds: rows are added to the first operand; for a whole result they are never gathered.
        flops: of the whole.
    """
    count = len(operands)
    splits = [
        {} if layout is None else by_factor(axes, layout, rule.sizes, mesh)[0]
        for axes, layout in zip((*rule.operands, *rule.results), (*operands, *results), strict=True)
    ]
    fixed = frozenset() if windows else rule.whole
    order = [*splits[count:], *splits[:count]]
    chosen: dict[int, Split] = {}
    if follows:
        for one in order[: len(results)]:
            for factor, split in one.items():
                if factor not in fixed and factor not in chosen:
                    chosen[factor] = split
    else:
        for together in _together(splits, mesh):
            factor = _cheapest(
                rule, splits, count, sizes, mesh, together, fixed, flops, lookup, adds
            )
            if factor is not None:
                chosen[factor] = (*chosen.get(factor, ()), *together)
        for factor, split in chosen.items():
            if len(split) > 1:
                chosen[factor] = _as_found(split, factor, order)
    arguments = tuple(
        by_axis(axes, chosen, rule.sizes, mesh) if layout is not None else ()
        for axes, layout in zip(rule.operands, operands, strict=True)
    )
    summed = tuple(
        index for factor, split in chosen.items() if factor in rule.reduced for index in split
    )
    neighbours = tuple(
        (operand, axis, chosen[factor])
        for operand, axes in enumerate(rule.operands)
        for axis, factors in enumerate(axes)
        for factor in factors
        if factor in rule.whole and chosen.get(factor)
    )
    shares = math.prod([mesh[index] for split in chosen.values() for index in split])
    new = tuple(by_axis(axes, chosen, rule.sizes, mesh) for axes in rule.results)
    return OpPartition(arguments, new, summed, neighbours, shares)


def _together(splits: Sequence[dict[int, Split]], mesh: Sequence[int]) -> list[Split]:
    """Mesh axes that split the same factor in each array, as groups; the largest first."""
    positions: dict[int, list[int]] = {}
    for array, one in enumerate(splits):
        for factor, split in one.items():
            for index in split:
                positions.setdefault(index, [-1] * len(splits))[array] = factor
    groups: dict[tuple[int, ...], Split] = {}
    for index in sorted(positions):
        key = tuple(positions[index])
        groups[key] = (*groups.get(key, ()), index)
    return sorted(groups.values(), key=lambda one: -math.prod([mesh[n] for n in one]))


def _cheapest(
    rule: DimensionRule,
    splits: Sequence[dict[int, Split]],
    count: int,
    sizes: Sequence[int],
    mesh: Sequence[int],
    together: Split,
    fixed: frozenset[int],
    flops: float,
    lookup: bool,
    adds: bool,
) -> int | None:
    """The factor that mesh axes divide; None: all their devices do the same."""
    ways = math.prod([mesh[one] for one in together])
    cheapest = [
        next((factor for factor, split in one.items() if together[0] in split), None)
        for one in splits
    ]
    local = [
        size / math.prod([mesh[m] for split in one.values() for m in split if m not in together])
        for size, one in zip(sizes, splits, strict=True)
    ]
    for factor in rule.reduced:
        if count > 1 and all(index == factor for index in cheapest[:2]):
            return factor  # operands agree on what is summed: the partitioner never gathers then
    rest = cheapest[count:]
    if flops and cheapest[0] != cheapest[1]:
        for index in cheapest[:count]:
            if index is not None and index in rest and index not in fixed:
                return index  # one operand lies as the result does: the other is gathered
    if adds and cheapest[2] in rule.reduced and rest == [None]:
        return cheapest[2]
    if lookup and cheapest[0] in rule.reduced and set(cheapest[1:]) == {None}:
        return cheapest[0]
    best, least = None, flops / _FLOPS_PER_BYTE * (1 - 1 / ways)
    for index, bytes_ in zip(cheapest[:count], local[:count], strict=True):
        least += bytes_ if index is not None else 0.0
    candidates = [
        index for index in dict.fromkeys(cheapest) if index is not None and index not in fixed
    ]
    candidates = [one for one in candidates if rule.sizes[one] >= ways]
    for factor in candidates:
        cost = 0.0
        for index, bytes_, one in zip(cheapest[:count], local[:count], splits[:count], strict=True):
            if index is not None and index != factor:
                cost += bytes_ / ways if factor in one else bytes_
        for index, bytes_, one in zip(cheapest[count:], local[count:], splits[count:], strict=True):
            if factor in rule.reduced:
                cost += bytes_ * (2 if index is None else 1)
            elif index != factor and factor in one:
                cost += bytes_ if index is None else bytes_ / ways
        if cost < least or (best is None and cost <= least):
            best, least = factor, cost
    return best


def _as_found(split: Split, factor: int, order: Sequence[dict[int, Split]]) -> Split:
    """Mesh axes of a factor in the order in which an array already has them."""
    for one in order:
        result = one.get(factor, ())
        if set(split) <= set(result):
            return tuple(index for index in result if index in split)
    return split
