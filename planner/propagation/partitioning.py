"""How an operation is partitioned among devices, and the collectives between two shardings.

>>> resharding_steps(((0,), ()), ((), (0,)), (8, 16), 4, (4, 2))
((ReshardingStep('all-to-all', (0,), 128),), 128)
>>> resharding_steps(((0,), (1,)), ((), (1,)), (8, 16), 4, (4, 2))
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
        axes: ids of the mesh axes along which devices communicate.
        sent: bytes of its result on one device; of a reduce-scatter, of its operand.
        inner: of an all-gather, whether the gathered axis is not the outermost split one.
            The host's compiler transposes the gathered axis to the front, and back afterwards.
    """

    kind: str
    axes: Split
    sent: int
    inner: bool = False

    def __repr__(self) -> str:
        """Short: kind, axes and bytes."""
        return f"ReshardingStep({self.kind!r}, {self.axes}, {self.sent})"


def shard_shape(
    shape: Sequence[int], layout: ArraySharding, mesh: Sequence[int]
) -> tuple[int, ...]:
    """The shape of one device's shard; the largest if axes are uneven."""
    return _shard_shape(tuple(shape), layout, tuple(mesh))


@functools.lru_cache(maxsize=1 << 14)
def _shard_shape(
    shape: tuple[int, ...], layout: ArraySharding, mesh: tuple[int, ...]
) -> tuple[int, ...]:
    return tuple(
        [
            size if not split else -(-size // math.prod([mesh[mesh_axis] for mesh_axis in split]))
            for size, split in zip(shape, layout, strict=True)
        ]
    )


def shard_bytes(
    shape: Sequence[int], layout: ArraySharding, itemsize: int, mesh: Sequence[int]
) -> int:
    """Bytes of one device's shard."""
    return math.prod(shard_shape(shape, layout, mesh)) * itemsize


def resharding_steps(
    before: ArraySharding,
    after: ArraySharding,
    shape: Sequence[int],
    itemsize: int,
    mesh: Sequence[int],
) -> tuple[tuple[ReshardingStep, ...], int]:
    """The collectives from one sharding to another.

    Returns:
        The collectives in their order, and the bytes of one device's shard at the end.
    """
    end = shard_bytes(shape, after, itemsize, mesh)
    if before == after:
        return (), end
    axis_before = {mesh_axis: axis for axis, split in enumerate(before) for mesh_axis in split}
    axis_after = {mesh_axis: axis for axis, split in enumerate(after) for mesh_axis in split}
    now = [list(split) for split in before]
    for mesh_axis, axis in axis_after.items():
        if mesh_axis not in axis_before:
            now[axis].append(mesh_axis)
    steps: list[ReshardingStep] = []

    def size() -> int:
        return shard_bytes(shape, tuple(map(tuple, now)), itemsize, mesh)

    moved: dict[tuple[int, int], list[int]] = {}
    for mesh_axis, axis in axis_before.items():
        if mesh_axis in axis_after and axis_after[mesh_axis] != axis:
            moved.setdefault((axis, axis_after[mesh_axis]), []).append(mesh_axis)
    for (old, new), several in moved.items():
        for mesh_axis in several:
            now[old].remove(mesh_axis)
            now[new].append(mesh_axis)
        steps.append(ReshardingStep("all-to-all", tuple(several), size()))
    for axis in range(len(before)):
        gathered = [mesh_axis for mesh_axis in before[axis] if mesh_axis not in axis_after]
        if gathered:
            for mesh_axis in gathered:
                now[axis].remove(mesh_axis)
            inner = math.prod(shard_shape(shape[:axis], tuple(map(tuple, now[:axis])), mesh)) > 1
            steps.append(ReshardingStep("all-gather", tuple(gathered), size(), inner))
    permuted = [
        mesh_axis
        for axis, split in enumerate(after)
        if tuple(now[axis]) != split
        for mesh_axis in split
    ]
    if permuted:
        steps.append(ReshardingStep("collective-permute", tuple(permuted), end))
    return tuple(steps), end


_FLOPS_PER_BYTE = 64.0
"""Work that all devices repeat is weighed against communication: so many operations as a byte."""


@dataclasses.dataclass(frozen=True)
class OpPartition:
    """How one operation is partitioned.

    Attributes:
        operands: the shardings it reads.
        results: the shardings of its results, before terms are added up.
        summed: mesh axes whose devices have terms of the results.
        neighbours: (operand, its axis, mesh axes) of each halo exchange.
        shares: number of devices that share the work.
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
    """Partition one operation.

    Args:
        rule: which axes belong together.
        operands: shardings of the operands; None of constants.
        results: required shardings.
        sizes: bytes of operands, then results, unsharded.
        mesh: sizes of the mesh axes.
        follows: it is partitioned as its result is.
        windows: unsharded factors are partitioned, too, with a halo.
        lookup: rows of the first operand are looked up; only for that it is never gathered.
        adds: rows are added to the first operand; for an unsharded result they are never gathered.
        flops: of the unsharded operation.
    """
    count = len(operands)
    splits = [
        {} if layout is None else by_factor(axes, layout, rule.sizes, mesh)[0]
        for axes, layout in zip((*rule.operands, *rule.results), (*operands, *results), strict=True)
    ]
    fixed = frozenset() if windows else rule.unsharded
    order = [*splits[count:], *splits[:count]]
    chosen: dict[int, Split] = {}
    if follows:
        for by_factors in order[: len(results)]:
            for factor, split in by_factors.items():
                if factor not in fixed and factor not in chosen:
                    chosen[factor] = split
    else:
        for group in _axis_groups(splits, mesh):
            factor = _cheapest(rule, splits, count, sizes, mesh, group, fixed, flops, lookup, adds)
            if factor is not None:
                chosen[factor] = (*chosen.get(factor, ()), *group)
        for factor, split in chosen.items():
            if len(split) > 1:
                chosen[factor] = _in_present_order(split, factor, order)
    operand_layouts = tuple(
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
        if factor in rule.unsharded and chosen.get(factor)
    )
    shares = math.prod([mesh[index] for split in chosen.values() for index in split])
    result_layouts = tuple(by_axis(axes, chosen, rule.sizes, mesh) for axes in rule.results)
    return OpPartition(operand_layouts, result_layouts, summed, neighbours, shares)


def _axis_groups(splits: Sequence[dict[int, Split]], mesh: Sequence[int]) -> list[Split]:
    """Mesh axes that split the same factor in each array, as groups; the largest first."""
    positions: dict[int, list[int]] = {}
    for array, by_factors in enumerate(splits):
        for factor, split in by_factors.items():
            for index in split:
                positions.setdefault(index, [-1] * len(splits))[array] = factor
    groups: dict[tuple[int, ...], Split] = {}
    for index in sorted(positions):
        key = tuple(positions[index])
        groups[key] = (*groups.get(key, ()), index)
    return sorted(groups.values(), key=lambda group: -math.prod([mesh[n] for n in group]))


def _cheapest(
    rule: DimensionRule,
    splits: Sequence[dict[int, Split]],
    count: int,
    sizes: Sequence[int],
    mesh: Sequence[int],
    group: Split,
    fixed: frozenset[int],
    flops: float,
    lookup: bool,
    adds: bool,
) -> int | None:
    """The factor that mesh axes split with the fewest bytes; None: their devices do the same."""
    ways = math.prod([mesh[mesh_axis] for mesh_axis in group])
    divided = [
        next((factor for factor, split in by_factors.items() if group[0] in split), None)
        for by_factors in splits
    ]
    local = [
        size
        / math.prod([mesh[m] for split in by_factors.values() for m in split if m not in group])
        for size, by_factors in zip(sizes, splits, strict=True)
    ]
    for factor in rule.reduced:
        if count > 1 and all(index == factor for index in divided[:2]):
            return factor  # operands agree on what is summed: the partitioner never gathers then
    rest = divided[count:]
    if flops and divided[0] != divided[1]:
        for index in divided[:count]:
            if index is not None and index in rest and index not in fixed:
                return index  # one operand is sharded as the result is: the other is gathered
    if adds and divided[2] in rule.reduced and rest == [None]:
        return divided[2]
    if lookup and divided[0] in rule.reduced and set(divided[1:]) == {None}:
        return divided[0]
    best, least = None, flops / _FLOPS_PER_BYTE * (1 - 1 / ways)
    for index, bytes_ in zip(divided[:count], local[:count], strict=True):
        least += bytes_ if index is not None else 0.0
    candidates = [
        index for index in dict.fromkeys(divided) if index is not None and index not in fixed
    ]
    candidates = [candidate for candidate in candidates if rule.sizes[candidate] >= ways]
    for factor in candidates:
        cost = 0.0
        for index, bytes_, by_factors in zip(
            divided[:count], local[:count], splits[:count], strict=True
        ):
            if index is not None and index != factor:
                cost += bytes_ / ways if factor in by_factors else bytes_
        for index, bytes_, by_factors in zip(
            divided[count:], local[count:], splits[count:], strict=True
        ):
            if factor in rule.reduced:
                cost += bytes_ * (2 if index is None else 1)
            elif index != factor and factor in by_factors:
                cost += bytes_ if index is None else bytes_ / ways
        if cost < least or (best is None and cost <= least):
            best, least = factor, cost
    return best


def _in_present_order(split: Split, factor: int, order: Sequence[dict[int, Split]]) -> Split:
    """Mesh axes of a factor in the order in which an array already has them."""
    for by_factors in order:
        present = by_factors.get(factor, ())
        if set(split) <= set(present):
            return tuple(index for index in present if index in split)
    return split
