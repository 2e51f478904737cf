"""What one kind of operation costs if its operands and results lie so.

Each mesh axis splits the factor by which least is sent and computed. An operand that lies
otherwise is gathered or exchanged, terms of a sum are added up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ..axes.factor_layouts import ArrayLayout
from ..costs.roofline import COMPUTE_REACH, MEMORY_REACH, busy_seconds
from ..machine.chips import Chip
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
        outermost: of each array, for each axis its outermost factor; -1: none.
        axis: of each array, the axis of which a factor is the outermost.
        free: factors that may be split.
    """

    outermost: tuple[tuple[int, ...], ...]
    axis: tuple[Mapping[int, int], ...]
    free: frozenset[int]


class OpCosts:
    """The costs of operations on one mesh.

    Args:
        values: kinds of values, by number.
        sizes: of the mesh axes.
        rates: of its links.
        chip: of its devices.
    """

    def __init__(
        self, values: Sequence[ValueKind], sizes: Sequence[int], rates: LinkRates, chip: Chip
    ) -> None:
        """Nothing is computed yet."""
        self._values = values
        self._sizes = sizes
        self._rates = rates
        self._chip = chip
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
            layouts: of its operands, then its results.
            place: by `placed`.
        """
        kinds = [self._values[n] if n >= 0 else None for n in (*op.operands, *op.results)]
        whole = op.flops / self.peak(op.dtype)
        where = [{m: axis for axis, split in enumerate(one) for m in split} for one in layouts]
        parts: dict[int, int] = {}
        picked: dict[int, int | None] = {}
        for number, size in enumerate(self._sizes):
            asked = {
                place.outermost[n][axis]
                for n, one in enumerate(where)
                if (axis := one.get(number)) is not None and kinds[n] is not None
            }
            asked = {
                one
                for one in asked
                if one in place.free and op.rule.sizes[one] % (parts.get(one, 1) * size) == 0
            }
            if not any(number in one for one in where):
                continue
            done = math.prod(parts.values())
            best: tuple[float, int] | None = None
            operands = range(len(op.operands))
            agreed = any(
                all(where[n].get(number) in (None, place.axis[n].get(one)) for n in operands)
                for one in asked
            )
            # XLA never gathers operands that lie alike, however small they are.
            for factor in sorted(asked) if agreed else (*sorted(asked), -1):
                seconds = whole / done / (size if factor >= 0 else 1)
                moves = self._moves(op, kinds, layouts, where, place, {number: factor})
                seconds += sum(move[2] for move in moves)
                if best is None or seconds < best[0]:
                    best = (seconds, factor)
            assert best is not None
            picked[number] = best[1] if best[1] >= 0 else None
            if best[1] >= 0:
                parts[best[1]] = parts.get(best[1], 1) * size
        moves = self._moves(
            op, kinds, layouts, where, place, {m: -1 if f is None else f for m, f in picked.items()}
        )
        count = math.prod(parts.values())
        moved = 0.0
        for n in op.moved:
            kind = kinds[n]
            if kind is not None:
                mine = math.prod(
                    self._sizes[m]
                    for m, factor in picked.items()
                    if factor is not None and factor in place.axis[n]
                )
                moved += kind.bytes / mine
        busy = busy_seconds(whole / count, moved / self.bandwidth, self._chip.platform)
        return OpCost(busy, tuple(moves))

    def _moves(
        self,
        op: OpKind,
        kinds: Sequence[ValueKind | None],
        layouts: Sequence[ArrayLayout],
        where: Sequence[Mapping[int, int]],
        place: FactorPlaces,
        picked: Mapping[int, int],
    ) -> list[tuple[int, tuple[int, ...], float, float]]:
        """The collectives of an operation that is split so along some mesh axes."""
        found: list[tuple[int, tuple[int, ...], float, float]] = []
        count = len(op.operands)

        def add(n: int, kind: str, axes: Sequence[int], sent: float) -> None:
            seconds = self._rates.seconds(kind, axes, sent)
            found.append((n, tuple(sorted(axes)), seconds, sent))

        for n, kind in enumerate(kinds):
            if kind is None:
                continue
            gathered, exchanged, summed, scattered, edges = [], [], [], [], []
            for number, factor in picked.items():
                here, there = where[n].get(number), place.axis[n].get(factor)
                if n >= count and factor in op.rule.reduced and there is None:
                    (summed if here is None else scattered).append(number)
                elif here is not None and there is None:
                    gathered.append(number)
                elif here is not None and there is not None and here != there:
                    exchanged.append(number)
                elif n >= count and here is None and there is not None:
                    gathered.append(number)
                if n < count and there is not None and factor in op.rule.whole:
                    edges.append((number, kind.shape[there]))
            mine = self._parts(layouts[n]) / math.prod(
                self._sizes[m] for m in (*gathered, *scattered) if m in where[n]
            )
            sent = kind.bytes / mine
            if gathered:
                add(n, "all-gather", gathered, sent)
            if exchanged:
                add(n, "all-to-all", exchanged, sent)
            if scattered:
                add(n, "reduce-scatter", scattered, sent)
                sent /= math.prod(self._sizes[m] for m in scattered)
            if summed:
                add(n, "all-reduce", summed, sent)
            for number, rows in edges:
                add(n, "collective-permute", [number], 2 * sent * self._sizes[number] / rows)
        return found

    def _parts(self, layout: ArrayLayout) -> int:
        return math.prod(self._sizes[one] for split in layout for one in split)


def placed(op: OpKind) -> FactorPlaces:
    """Where an operation has its factors.

    Args:
        op: its kind.
    """
    arrays = (*op.rule.operands, *op.rule.results)
    outermost = tuple(tuple(mine[0] if mine else -1 for mine in axes) for axes in arrays)
    inner = {factor for axes in arrays for mine in axes for factor in mine[1:]}
    free = set(range(len(op.rule.sizes))) - inner
    if op.name not in WINDOWED:
        free -= op.rule.whole
    axis = tuple(
        {mine[0]: n for n, mine in enumerate(axes) if mine and mine[0] in free} for axes in arrays
    )
    return FactorPlaces(outermost, axis, frozenset(free))
