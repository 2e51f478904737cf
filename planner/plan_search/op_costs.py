"""What one kind of operation costs if its operands and results lie so.

Parts of mesh axes that lie alike everywhere split the factor by which least is sent and computed.
An operand that lies otherwise is gathered or exchanged, terms of a sum are added up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from ..axes.factor_layouts import ArrayLayout, by_factor
from ..axes.factors import Axes
from ..costs.roofline import COMPUTE_REACH, MEMORY_REACH, busy_seconds
from ..machine.chips import Chip
from .axis_parts import AxisParts
from .condensed_program import OpKind, ValueKind
from .link_rates import LinkRates
from .named_dimensions import WINDOWED


@dataclasses.dataclass(frozen=True)
class OpCost:
    """What one run of an operation costs on one device.

    Attributes:
        busy: seconds of computing, or of moving bytes between memory and cores.
        moves: collectives: the operand or result, mesh axes, seconds, bytes.
    """

    busy: float
    moves: tuple[tuple[int, tuple[int, ...], float, float], ...]  # array, axes, seconds, bytes


@dataclasses.dataclass(frozen=True)
class FactorPlaces:
    """Of one operation.

    Attributes:
        arrays: of each operand, then each result: for each axis its factors.
        axis: of each array, the axis that has a factor, of those that may be split.
        outside: of inner factors, those that are split down to one element before them.
    """

    arrays: tuple[Axes, ...]
    axis: tuple[Mapping[int, int], ...]
    outside: Mapping[int, frozenset[int]]


@dataclasses.dataclass(frozen=True)
class _Picked:
    """Parts of mesh axes that lie alike in all arrays, and the factor that they split; -1: none."""

    parts: tuple[int, ...]
    ways: int
    factor: int


@dataclasses.dataclass(frozen=True)
class _Lies:
    """The factor of an array that each part of a mesh axis splits, and how many blocks there are.

    A part that fits no factor has -1.
    """

    factors: Mapping[int, int]
    blocks: int


_NOWHERE = _Lies({}, 1)
_ORDER = ("all-gather", "all-to-all", "reduce-scatter", "all-reduce")


class OpCosts:
    """The costs of operations on one mesh.

    Args:
        values: kinds of values, by number.
        parts: of the mesh's axes.
        rates: of its links.
        chip: of its devices.
    """

    def __init__(
        self, values: Sequence[ValueKind], parts: AxisParts, rates: LinkRates, chip: Chip
    ) -> None:
        """Nothing is computed yet."""
        self._values = values
        self._parts = parts
        self._rates = rates
        self._chip = chip
        self._known: dict[tuple[Axes, tuple[int, ...], ArrayLayout], _Lies] = {}
        self.bandwidth = chip.bandwidth * MEMORY_REACH[chip.platform]

    def peak(self, dtype: str) -> float:
        """Operations a second that large products reach.

        Args:
            dtype: in which they compute.
        """
        return self._chip.rate(dtype) * COMPUTE_REACH.get(self._chip.platform, 1.0)

    def of(self, op: OpKind, layouts: Sequence[ArrayLayout], place: FactorPlaces) -> OpCost:
        """One run of an operation.

        Args:
            op: its kind.
            layouts: of its operands, then its results, by parts of mesh axes.
            place: by `placed`.
        """
        kinds = [self._values[n] if n >= 0 else None for n in (*op.operands, *op.results)]
        sizes = op.rule.sizes
        whole = op.flops / self.peak(op.dtype)
        where = [
            _NOWHERE if kind is None else self._lies(axes, sizes, layout)
            for kind, axes, layout in zip(kinds, place.arrays, layouts, strict=True)
        ]
        done: dict[int, int] = {}
        picked: list[_Picked] = []
        for places, parts in self._together(where).items():
            ways = self._count(parts)
            asked = sorted(
                one
                for one in {one for one in places if one is not None and one >= 0}
                if any(one in axes for axes in place.axis)
                and sizes[one] % (done.get(one, 1) * ways) == 0
                and all(done.get(other) == sizes[other] for other in place.outside.get(one, ()))
            )
            agreed = any(
                all(
                    here in (None, one if one in place.axis[n] else None)
                    for n, here in enumerate(places[: len(op.operands)])
                )
                for one in asked
            )
            # XLA never gathers operands that lie alike, however small they are.
            ways_out = [_Picked(parts, ways, one) for one in (asked if agreed else (*asked, -1))]
            best = ways_out[0]
            if len(ways_out) > 1:
                share = math.prod(done.values())
                best = min(
                    ways_out,
                    key=lambda one: (
                        whole / share / (one.ways if one.factor >= 0 else 1)
                        + sum(move[2] for move in self._moves(op, kinds, where, place, [one]))
                    ),
                )
            picked.append(best)
            if best.factor >= 0:
                done[best.factor] = done.get(best.factor, 1) * ways
        moves = self._moves(op, kinds, where, place, picked)
        moved = 0.0
        for n in op.moved:
            kind = kinds[n]
            if kind is not None:
                mine = math.prod([one.ways for one in picked if one.factor in place.axis[n]])
                moved += kind.bytes / mine
        computing = whole / math.prod(done.values())
        busy = busy_seconds(computing, moved / self.bandwidth, self._chip.platform)
        return OpCost(busy, tuple(moves))

    def _lies(self, axes: Axes, sizes: tuple[int, ...], layout: ArrayLayout) -> _Lies:
        key = (axes, sizes, layout)
        found = self._known.get(key)
        if found is None:
            splits, rest = by_factor(axes, layout, sizes, self._parts.sizes)
            factors = {part: factor for factor, split in splits.items() for part in split}
            blocks = self._count([one for split in layout for one in split])
            found = self._known[key] = _Lies(factors | dict.fromkeys(rest, -1), blocks)
        return found

    def _together(self, where: Sequence[_Lies]) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """Parts of mesh axes by what they split in each array."""
        found: dict[tuple[int | None, ...], tuple[int, ...]] = {}
        for part in sorted({part for one in where for part in one.factors}):
            places = tuple([one.factors.get(part) for one in where])
            found[places] = (*found.get(places, ()), part)
        return found

    def _moves(
        self,
        op: OpKind,
        kinds: Sequence[ValueKind | None],
        where: Sequence[_Lies],
        place: FactorPlaces,
        picked: Sequence[_Picked],
    ) -> list[tuple[int, tuple[int, ...], float, float]]:
        """The collectives of an operation that is split so by some parts of mesh axes."""
        found: list[tuple[int, tuple[int, ...], float, float]] = []
        count = len(op.operands)

        def add(n: int, how: str, parts: Sequence[int], sent: float) -> None:
            axes = tuple(sorted(self._parts.axes(parts)))
            found.append((n, axes, self._rates.seconds(how, axes, sent), sent))

        for n, kind in enumerate(kinds):
            if kind is None:
                continue
            parts: dict[str, tuple[int, ...]] = {}
            joined = scattered = 1
            edges: list[tuple[_Picked, int]] = []
            for one in picked:
                here = where[n].factors.get(one.parts[0])
                there = one.factor if one.factor in place.axis[n] else None
                how = None
                if n >= count and there is None and one.factor in op.rule.reduced:
                    how = "all-reduce" if here is None else "reduce-scatter"
                elif here is not None and there is None:
                    how = "all-gather"
                elif here is None and there is not None and n >= count:
                    how = "all-gather"
                elif here is not None and here != there:
                    how = "all-to-all"
                if how is not None:
                    parts[how] = (*parts.get(how, ()), *one.parts)
                    scattered *= one.ways if how == "reduce-scatter" else 1
                    joined *= one.ways if here is not None and how != "all-to-all" else 1
                if n < count and there is not None and there in op.rule.whole:
                    edges.append((one, kind.shape[place.axis[n][there]]))
            sent = kind.bytes / where[n].blocks * joined
            for how in _ORDER:
                if how in parts:
                    add(n, how, parts[how], sent / (scattered if how == "all-reduce" else 1))
            for one, rows in edges:
                shard = sent / scattered
                add(n, "collective-permute", one.parts, 2 * shard * one.ways / rows)
        return found

    def _count(self, parts: Iterable[int]) -> int:
        """How many devices some parts of mesh axes have."""
        return math.prod([self._parts.sizes[one] for one in parts])


def placed(op: OpKind) -> FactorPlaces:
    """Where an operation has its factors.

    Args:
        op: its kind.
    """
    arrays = (*op.rule.operands, *op.rule.results)
    fixed = frozenset() if op.name in WINDOWED else op.rule.whole
    axis = tuple(
        {one: n for n, mine in enumerate(axes) for one in mine if one not in fixed}
        for axes in arrays
    )
    outside: dict[int, frozenset[int]] = {}
    for axes in arrays:
        for mine in axes:
            for n, one in enumerate(mine[1:], 1):
                outside[one] = outside.get(one, frozenset()) | set(mine[:n])
    return FactorPlaces(arrays, axis, outside)
