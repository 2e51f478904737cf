"""Factors (dimensions of an operation) and the sharding of its operands and results by factor.

A factor is one dimension of the operation, and each axis of an operand or result is a tuple of
factors, the outermost first. Most axes are one factor; a reshape splits and merges axes, so an axis
may be several there. It is Shardy's `OpShardingRule` in another notation.

>>> made = Factors([(8, 4)], [(8,)])
>>> made.tie({0: 0}, {0: 0}, 8), made.tie({0: 1}, {}, 4, reduced=True)
(0, 1)
>>> made.rule().operands, made.rule().results
((((0,), (1,)),), (((0,),),))

Mesh axes are ids here, and a sharding is a tuple that has for each axis of an array the ids of the
mesh axes that split it, the outermost first. Conflicts between operands and results are resolved as
by Shardy's `AggressiveFactorPropagation`: they agree on their common prefix; a mesh axis splits
only one factor of an array, that which comes from the largest array if several want it; what is
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
        whole: factors that cannot stay split: an operand split along one is gathered, or neighbours
            exchange rows.
    """

    operands: tuple[Axes, ...]
    results: tuple[Axes, ...]
    sizes: tuple[int, ...]
    reduced: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()


class Factors:
    """A rule in the making: factors are added, and tied to axes.

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
        self._whole: set[int] = set()

    def tie(
        self,
        operands: Mapping[int, int],
        results: Mapping[int, int],
        size: int,
        *,
        reduced: bool = False,
        whole: bool = False,
    ) -> int:
        """Add a factor."""
        number = len(self._sizes)
        self._sizes.append(int(size))
        if reduced:
            self._reduced.add(number)
        if whole:
            self._whole.add(number)
        for operand, axis in operands.items():
            self._operands[operand][axis] += (number,)
        for result, axis in results.items():
            self._results[result][axis] += (number,)
        return number

    def rule(self, *, rest_whole: bool = False) -> DimensionRule:
        """Finish: an axis without a factor gets one of its own."""
        for axes, shapes in (
            (self._operands, self.operand_shapes),
            (self._results, self.result_shapes),
        ):
            for mine, shape in zip(axes, shapes, strict=True):
                for axis, size in enumerate(shape):
                    if not mine[axis] and size != 1:
                        mine[axis] = (len(self._sizes),)
                        if rest_whole:
                            self._whole.add(len(self._sizes))
                        self._sizes.append(int(size))
        return DimensionRule(
            tuple(map(tuple, self._operands)),
            tuple(map(tuple, self._results)),
            tuple(self._sizes),
            frozenset(self._reduced),
            frozenset(self._whole),
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
        place, taken = 0, 1
        for factor in axis:
            splits[factor] = ()
        for number in split:
            size = mesh[number]
            while place < len(axis) - 1 and factors[axis[place]] == taken:
                place, taken = place + 1, 1
            fits = place < len(axis) and (
                place == len(axis) - 1 or factors[axis[place]] % (taken * size) == 0
            )
            if not fits:
                left_over.update(split[split.index(number) :])
                break
            splits[axis[place]] += (number,)
            taken *= size
    return splits, left_over


def by_axis(
    axes: Axes, splits: dict[int, Split], factors: Sequence[int], mesh: Sequence[int]
) -> ArraySharding:
    """The layout of one array of which each factor is split so.

    An inner factor is split only if those outside of it are split down to one element.
    """
    layout = []
    used: set[int] = set()
    for axis in axes:
        split: Split = ()
        for factor in axis:
            new = splits.get(factor, ())
            if any(number in used for number in new):
                break
            split += new
            used.update(new)
            count = 1
            for number in new:
                count *= mesh[number]
            if count != factors[factor]:
                break
        layout.append(split)
    return tuple(layout)


def _common(old: Split, new: Split, grow: bool) -> tuple[Split, bool]:
    """As far as both begin alike; the longer one if one begins the other and `grow`."""
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
    """Layouts of one operation's operands and results after each has told the others its own."""
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
    for mine, (splits, left_over), (layout, shut) in zip(axes, by_array, arrays, strict=True):
        closed = {factor for axis, fs in enumerate(mine) if shut >> axis & 1 for factor in fs}
        last = {fs[-1] for fs in mine if fs}
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
        new.append(by_axis(mine, splits, rule.sizes, mesh) if grown else layout)
    return tuple(new[:count]), tuple(new[count:])


def _by_source(
    rule: DimensionRule,
    axes: Sequence[Axes],
    by_array: Sequence[tuple[dict[int, Split], set[int]]],
    target: Sequence[Split],
) -> list[int]:
    """Factors in the order in which they are served: those that come from the largest array first.

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
    mine: Split,
    size: int,
    mesh: Sequence[int],
    others: set[int],
    *,
    closed: bool,
    innermost: bool,
) -> Split:
    """As much of what is wanted as one factor of one array can have."""
    if target[: len(mine)] != mine:
        return mine
    count = 1
    for n, number in enumerate(target):
        count *= mesh[number]
        if n < len(mine):
            continue
        fits = size % count == 0 or (innermost and size >= count)
        if closed or number in others or not fits:
            return target[:n]
    return target
