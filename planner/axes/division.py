"""How one operation is divided among devices: the layouts it takes and gives, and what it sums.

An elementwise operation is divided as its result is. Of a product, a reduction or an operation by
index each mesh axis divides the factor by which the fewest bytes are sent: gathering an operand,
moving an axis of one, or adding up terms of the result.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from .factor_layouts import ArrayLayout, Split, by_axis, by_factor
from .factors import DimensionRule

_FLOPS_PER_BYTE = 64.0
"""What is computed by all devices alike counts as a byte sent for so many operations."""


@dataclasses.dataclass(frozen=True)
class Division:
    """One operation on devices.

    Attributes:
        operands: the layouts it takes.
        results: the layouts it gives, before terms are added up.
        summed: mesh axes whose devices have terms of the results.
        neighbours: (operand, its axis, mesh axes) where rows of neighbours are needed.
        shares: by how much work is divided.
    """

    operands: tuple[ArrayLayout, ...]
    results: tuple[ArrayLayout, ...]
    summed: Split
    neighbours: tuple[tuple[int, int, Split], ...]
    shares: int


def divided(
    rule: DimensionRule,
    operands: Sequence[ArrayLayout | None],
    results: Sequence[ArrayLayout],
    sizes: Sequence[int],
    mesh: Sequence[int],
    *,
    follows: bool,
    windows: bool,
    lookup: bool,
    adds: bool,
    flops: float,
) -> Division:
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
    given = tuple(
        by_axis(axes, chosen, rule.sizes, mesh) if layout is not None else ()
        for axes, layout in zip(rule.operands, operands, strict=True)
    )
    summed = tuple(
        number for factor, split in chosen.items() if factor in rule.reduced for number in split
    )
    neighbours = tuple(
        (operand, axis, chosen[factor])
        for operand, axes in enumerate(rule.operands)
        for axis, factors in enumerate(axes)
        for factor in factors
        if factor in rule.whole and chosen.get(factor)
    )
    shares = math.prod([mesh[number] for split in chosen.values() for number in split])
    made = tuple(by_axis(axes, chosen, rule.sizes, mesh) for axes in rule.results)
    return Division(given, made, summed, neighbours, shares)


def _together(splits: Sequence[dict[int, Split]], mesh: Sequence[int]) -> list[Split]:
    """Mesh axes that split the same factor in each array, as groups; the largest first."""
    places: dict[int, list[int]] = {}
    for array, one in enumerate(splits):
        for factor, split in one.items():
            for number in split:
                places.setdefault(number, [-1] * len(splits))[array] = factor
    groups: dict[tuple[int, ...], Split] = {}
    for number in sorted(places):
        key = tuple(places[number])
        groups[key] = (*groups.get(key, ()), number)
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
    places = [
        next((factor for factor, split in one.items() if together[0] in split), None)
        for one in splits
    ]
    local = [
        size / math.prod([mesh[m] for split in one.values() for m in split if m not in together])
        for size, one in zip(sizes, splits, strict=True)
    ]
    for factor in rule.reduced:
        if count > 1 and all(place == factor for place in places[:2]):
            return factor  # operands agree on what is summed: the partitioner never gathers then
    kept = places[count:]
    if flops and places[0] != places[1]:
        for place in places[:count]:
            if place is not None and place in kept and place not in fixed:
                return place  # one operand lies as the result does: the other is gathered
    if adds and places[2] in rule.reduced and kept == [None]:
        return places[2]
    if lookup and places[0] in rule.reduced and set(places[1:]) == {None}:
        return places[0]
    best, least = None, flops / _FLOPS_PER_BYTE * (1 - 1 / ways)
    for place, bytes_ in zip(places[:count], local[:count], strict=True):
        least += bytes_ if place is not None else 0.0
    candidates = [
        place for place in dict.fromkeys(places) if place is not None and place not in fixed
    ]
    candidates = [one for one in candidates if rule.sizes[one] >= ways]
    for factor in candidates:
        cost = 0.0
        for place, bytes_, one in zip(places[:count], local[:count], splits[:count], strict=True):
            if place is not None and place != factor:
                cost += bytes_ / ways if factor in one else bytes_
        for place, bytes_, one in zip(places[count:], local[count:], splits[count:], strict=True):
            if factor in rule.reduced:
                cost += bytes_ * (2 if place is None else 1)
            elif place != factor and factor in one:
                cost += bytes_ if place is None else bytes_ / ways
        if cost < least or (best is None and cost <= least):
            best, least = factor, cost
    return best


def _as_found(split: Split, factor: int, order: Sequence[dict[int, Split]]) -> Split:
    """Mesh axes of a factor in the order in which an array already has them."""
    for one in order:
        found = one.get(factor, ())
        if set(split) <= set(found):
            return tuple(number for number in found if number in split)
    return split
