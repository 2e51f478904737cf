"""Layouts of one operation by factor: who splits which dimension, and what follows for the others.

Mesh axes are numbers here, and a layout is a tuple that has for each axis of an array the numbers
of the mesh axes that split it, the outermost first. What operands and results of an operation say
of a factor is made to agree as Shardy's aggressive propagation does: they agree as far as they
begin alike; a mesh axis splits only one factor of an array, that which comes from the largest array
if several want it; what is closed does not change; a factor is split by what divides it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .factors import Axes, DimensionRule

Split = tuple[int, ...]
"""Mesh axes that split one axis of an array, or one factor."""

ArrayLayout = tuple[Split, ...]
"""Of an array: for each of its axes what splits it."""

NONE, FORWARD, BACKWARD, BOTH = 0, 1, 2, 3


def by_factor(
    axes: Axes, layout: ArrayLayout, factors: Sequence[int], mesh: Sequence[int]
) -> tuple[dict[int, Split], set[int]]:
    """What splits each factor of one array.

    Args:
        axes: the array's, by their factors.
        layout: the array's.
        factors: sizes of all factors.
        mesh: sizes of the mesh axes.

    Returns:
        The mesh axes of each factor of the array; and those that fit no factor.
    """
    splits: dict[int, Split] = {}
    left_over: set[int] = set()
    for mine, split in zip(axes, layout, strict=True):
        place, taken = 0, 1
        for factor in mine:
            splits[factor] = ()
        for number in split:
            size = mesh[number]
            while place < len(mine) - 1 and factors[mine[place]] == taken:
                place, taken = place + 1, 1
            fits = place < len(mine) and (
                place == len(mine) - 1 or factors[mine[place]] % (taken * size) == 0
            )
            if not fits:
                left_over.update(split[split.index(number) :])
                break
            splits[mine[place]] += (number,)
            taken *= size
    return splits, left_over


def by_axis(
    axes: Axes, splits: dict[int, Split], factors: Sequence[int], mesh: Sequence[int]
) -> ArrayLayout:
    """The layout of one array of which each factor is split so.

    An inner factor is split only if those outside of it are split down to one element.

    Args:
        axes: the array's, by their factors.
        splits: by factor.
        factors: sizes of all factors.
        mesh: sizes of the mesh axes.
    """
    layout = []
    used: set[int] = set()
    for mine in axes:
        split: Split = ()
        for factor in mine:
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
    operands: Sequence[tuple[ArrayLayout, int]],
    results: Sequence[tuple[ArrayLayout, int]],
    mesh: Sequence[int],
) -> tuple[tuple[ArrayLayout, ...], tuple[ArrayLayout, ...]]:
    """Layouts of one operation's operands and results after each has told the others its own.

    Args:
        rule: of the operation.
        directions: of each factor, whether results learn from operands, operands from results.
        operands: layouts, and as bits which axes are closed.
        results: likewise.
        mesh: sizes of the mesh axes.

    Returns:
        Layouts of operands and of results.
    """
    arrays = [*operands, *results]
    axes = [*rule.operands, *rule.results]
    count = len(operands)
    known = [
        by_factor(mine, layout, rule.sizes, mesh)
        for mine, (layout, _) in zip(axes, arrays, strict=True)
    ]
    wanted: list[Split] = []
    for factor, direction in enumerate(directions):
        split: Split = ()
        if direction != NONE:
            grow = True
            first, second = known[:count], known[count:]
            if direction == BACKWARD:
                first, second = second, first
            for splits, _ in first:
                if factor in splits:
                    split, grow = _common(split, splits[factor], grow)
            grow = grow and direction == BOTH
            for splits, _ in second:
                if factor in splits:
                    split, grow = _common(split, splits[factor], grow)
        wanted.append(split)
    if not any(wanted):
        return tuple(layout for layout, _ in operands), tuple(layout for layout, _ in results)
    order = _by_source(rule, axes, known, wanted)
    new = []
    for mine, (splits, left_over), (layout, shut) in zip(axes, known, arrays, strict=True):
        closed = {factor for axis, fs in enumerate(mine) if shut >> axis & 1 for factor in fs}
        last = {fs[-1] for fs in mine if fs}
        grown = False
        for factor in order:
            if factor not in splits or len(wanted[factor]) <= len(splits[factor]):
                continue
            others = left_over.union(*(splits[one] for one in splits if one != factor))
            split = _within(
                wanted[factor], splits[factor], rule.sizes[factor], mesh, others,
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
    known: Sequence[tuple[dict[int, Split], set[int]]],
    wanted: Sequence[Split],
) -> list[int]:
    """Factors in the order in which they are served: those that come from the largest array first.

    Of arrays of one size the first, of one array the first factor.
    """
    found = []
    sizes = [
        math.prod([rule.sizes[factor] for factors in mine for factor in factors]) for mine in axes
    ]
    for factor, split in enumerate(wanted):
        if split:
            source = min(
                (
                    (-sizes[n], n)
                    for n, (splits, _) in enumerate(known)
                    if splits.get(factor) == split
                ),
                default=(0, 0),
            )
            found.append((source, factor))
    return [factor for _, factor in sorted(found)]


def _within(
    wanted: Split,
    mine: Split,
    size: int,
    mesh: Sequence[int],
    others: set[int],
    *,
    closed: bool,
    innermost: bool,
) -> Split:
    """As much of what is wanted as one factor of one array can have."""
    if wanted[: len(mine)] != mine:
        return mine
    count = 1
    for n, number in enumerate(wanted):
        count *= mesh[number]
        if n < len(mine):
            continue
        fits = size % count == 0 or (innermost and size >= count)
        if closed or number in others or not fits:
            return wanted[:n]
    return wanted
