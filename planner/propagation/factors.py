"""Factors (dimensions of an operation) and the sharding of its operands and results by factor.

A factor is one dimension of the operation, and each axis of an operand or result is a tuple of
factors, the outermost first. Most axes are one factor; a reshape splits and merges axes, so an axis
may be several there. It is Shardy's `OpShardingRule` in another notation.

>>> factors = Factors([(8, 4)], [(8,)])
>>> factors.tie({0: 0}, {0: 0}, 8), factors.tie({0: 1}, {}, 4, reduced=True)
(0, 1)
>>> factors.rule().operands, factors.rule().results
((((0,), (1,)),), (((0,),),))

Mesh axes are ids here, and a sharding is a tuple that has for each axis of an array the ids of the
mesh axes that split it, the outermost first. Conflicts between operands and results are resolved as
by Shardy's `AggressiveFactorPropagation`: they agree on their common prefix; a mesh axis splits
only one factor of an array, the one from the largest array if several are candidates; what is
closed does not change; a factor is split by what divides it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

Axes = tuple[tuple[int, ...], ...]
"""Of one operand or result: for each axis its factors."""

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class DimensionRule:
    """How the axes of one equation belong together.

    Attributes:
        operands: of each operand, for each of its axes the factors, outermost first; () of an axis
            of size 1 that is tied to nothing.
        results: likewise.
        sizes: of each factor.
        reduced: factors that are summed or contracted, or that a table is looked up along; devices
            that split one have terms of the result.
        unsharded: factors that need replication: an operand split along one is gathered, or
            neighbours exchange rows.
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    sizes: tuple[int, ...]
    reduced: frozenset[int] = frozenset()
    unsharded: frozenset[int] = frozenset()


class Factors:
    """Builder of a rule: factors are added, and tied to axes.

    Args:
        operands: shapes.
        results: shapes.
    """

    def __init__(self, operands: Iterable[Shape], results: Iterable[Shape]) -> None:
        """No factor is tied to any axis yet."""
        self.operand_shapes = tuple(operands)
        self.result_shapes = tuple(results)
        self._operands: list[list[tuple[int, ...]]] = [[()] * len(s) for s in self.operand_shapes]
        self._results: list[list[tuple[int, ...]]] = [[()] * len(s) for s in self.result_shapes]
        self._sizes: list[int] = []
        self._reduced: set[int] = set()
        self._unsharded: set[int] = set()

    def tie(
        self,
        operands: Mapping[int, int],
        results: Mapping[int, int],
        size: int,
        *,
        reduced: bool = False,
        unsharded: bool = False,
    ) -> int:
        """Add a factor."""
        factor = len(self._sizes)
        self._sizes.append(int(size))
        if reduced:
            self._reduced.add(factor)
        if unsharded:
            self._unsharded.add(factor)
        for operand, axis in operands.items():
            self._operands[operand][axis] += (factor,)
        for result, axis in results.items():
            self._results[result][axis] += (factor,)
        return factor

    def rule(self, *, rest_unsharded: bool = False) -> DimensionRule:
        """Finish: an axis without a factor gets one of its own."""
        for axes, shapes in (
            (self._operands, self.operand_shapes),
            (self._results, self.result_shapes),
        ):
            for factors, shape in zip(axes, shapes, strict=True):
                for axis, size in enumerate(shape):
                    if not factors[axis] and size != 1:
                        factors[axis] = (len(self._sizes),)
                        if rest_unsharded:
                            self._unsharded.add(len(self._sizes))
                        self._sizes.append(int(size))
        return DimensionRule(
            tuple(map(tuple, self._operands)),
            tuple(map(tuple, self._results)),
            tuple(self._sizes),
            frozenset(self._reduced),
            frozenset(self._unsharded),
        )


Split = tuple[int, ...]
"""Mesh axes that split one axis of an array, or one factor."""

ArraySharding = tuple[Split, ...]
"""Of an array: for each of its axes what splits it."""

NONE, FORWARD, BACKWARD, BOTH = 0, 1, 2, 3


def by_factor(
    axes: Axes, layout: ArraySharding, factors: Sequence[int], mesh: Sequence[int]
) -> tuple[dict[int, Split], set[int]]:
    """What splits each factor of one array.

    Returns:
        The mesh axes of each factor of the array; and those that fit no factor.
    """
    splits: dict[int, Split] = {}
    left_over: set[int] = set()
    for axis, split in zip(axes, layout, strict=True):
        position, taken = 0, 1
        for factor in axis:
            splits[factor] = ()
        for mesh_axis in split:
            size = mesh[mesh_axis]
            while position < len(axis) - 1 and factors[axis[position]] == taken:
                position, taken = position + 1, 1
            fits = position < len(axis) and (
                position == len(axis) - 1 or factors[axis[position]] % (taken * size) == 0
            )
            if not fits:
                left_over.update(split[split.index(mesh_axis) :])
                break
            splits[axis[position]] += (mesh_axis,)
            taken *= size
    return splits, left_over


def by_axis(
    axes: Axes, splits: dict[int, Split], factors: Sequence[int], mesh: Sequence[int]
) -> ArraySharding:
    """The sharding of one array by the splits of its factors.

    An inner factor is split only if those outside of it are split down to one element.
    """
    layout = []
    used: set[int] = set()
    for axis in axes:
        split: Split = ()
        for factor in axis:
            new = splits.get(factor, ())
            if any(mesh_axis in used for mesh_axis in new):
                break
            split += new
            used.update(new)
            count = 1
            for mesh_axis in new:
                count *= mesh[mesh_axis]
            if count != factors[factor]:
                break
        layout.append(split)
    return tuple(layout)


def _common(old: Split, new: Split, grow: bool) -> tuple[Split, bool]:
    """The common prefix; the longer one if it extends the other and `grow`."""
    shorter = min(len(old), len(new))
    if old[:shorter] != new[:shorter]:
        at = next(n for n in range(shorter) if old[n] != new[n])
        return old[:at], False
    if len(new) > len(old) and grow:
        return new, grow
    return old, grow


def agreed(
    rule: DimensionRule,
    directions: Sequence[int],
    operands: Sequence[tuple[ArraySharding, int]],
    results: Sequence[tuple[ArraySharding, int]],
    mesh: Sequence[int],
) -> tuple[tuple[ArraySharding, ...], tuple[ArraySharding, ...]]:
    """Shardings of one operation's operands and results, propagated between them."""
    arrays = [*operands, *results]
    axes = [*rule.operands, *rule.results]
    count = len(operands)
    by_array = [
        by_factor(axis, layout, rule.sizes, mesh)
        for axis, (layout, _) in zip(axes, arrays, strict=True)
    ]
    target: list[Split] = []
    for factor, direction in enumerate(directions):
        split: Split = ()
        if direction != NONE:
            grow = True
            first, second = by_array[:count], by_array[count:]
            if direction == BACKWARD:
                first, second = second, first
            for splits, _ in first:
                if factor in splits:
                    split, grow = _common(split, splits[factor], grow)
            grow = grow and direction == BOTH
            for splits, _ in second:
                if factor in splits:
                    split, grow = _common(split, splits[factor], grow)
        target.append(split)
    if not any(target):
        return tuple(layout for layout, _ in operands), tuple(layout for layout, _ in results)
    order = _by_source(rule, axes, by_array, target)
    new = []
    for array_axes, (splits, left_over), (layout, shut) in zip(axes, by_array, arrays, strict=True):
        closed = {factor for axis, fs in enumerate(array_axes) if shut >> axis & 1 for factor in fs}
        last = {fs[-1] for fs in array_axes if fs}
        grown = False
        for factor in order:
            if factor not in splits or len(target[factor]) <= len(splits[factor]):
                continue
            others = left_over.union(*(splits[split] for split in splits if split != factor))
            split = _within(
                target[factor], splits[factor], rule.sizes[factor], mesh, others,
                closed=factor in closed or bool(left_over), innermost=factor in last,
            )  # fmt: skip
            if len(split) > len(splits[factor]):
                splits[factor] = split
                grown = True
        new.append(by_axis(array_axes, splits, rule.sizes, mesh) if grown else layout)
    return tuple(new[:count]), tuple(new[count:])


def _by_source(
    rule: DimensionRule,
    axes: Sequence[Axes],
    by_array: Sequence[tuple[dict[int, Split], set[int]]],
    target: Sequence[Split],
) -> list[int]:
    """Factors in the order in which they are split: those that come from the largest array first.

    Of arrays of one size the first, of one array the first factor.
    """
    by_source = []
    sizes = [
        math.prod([rule.sizes[factor] for factors in axis for factor in factors]) for axis in axes
    ]
    for factor, split in enumerate(target):
        if split:
            source = min(
                (
                    (-sizes[n], n)
                    for n, (splits, _) in enumerate(by_array)
                    if splits.get(factor) == split
                ),
                default=(0, 0),
            )
            by_source.append((source, factor))
    return [factor for _, factor in sorted(by_source)]


def _within(
    target: Split,
    split: Split,
    size: int,
    mesh: Sequence[int],
    others: set[int],
    *,
    closed: bool,
    innermost: bool,
) -> Split:
    """The longest prefix of `target` that a factor of one array can be split by."""
    if target[: len(split)] != split:
        return split
    count = 1
    for n, mesh_axis in enumerate(target):
        count *= mesh[mesh_axis]
        if n < len(split):
            continue
        fits = size % count == 0 or (innermost and size >= count)
        if closed or mesh_axis in others or not fits:
            return target[:n]
    return target
