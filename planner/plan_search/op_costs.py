"""Cost of one kind of operation for the shardings of its operands and results.

Mesh axes count as their prime parts: eight heads are split by eight of sixteen devices. A plan
names full axes; its shardings propagate to values whose axes are smaller, and XLA's partitioner
splits those by as many parts as divide them.

>>> from isoshard.planner.machine.topologies import topology
>>> parts = AxisParts(topology("v5e:16x16").mesh((64, 4), ("data", "model")))
>>> parts.of, parts.sizes
(((0, 1, 2, 3, 4, 5), (6, 7)), (2, 2, 2, 2, 2, 2, 2, 2))
>>> parts.split(((1,), (), (0,)))
((6, 7), (), (0, 1, 2, 3, 4, 5))
>>> parts.joined(((6, 7), ())), parts.joined(((6,), (7,)))
(((1,), ()), None)

Parts of mesh axes that are assigned alike everywhere split the factor by which least is sent and
computed. An operand with another sharding is gathered or exchanged, partial results are added up.
Seconds of collectives are cached: a search reads the same ones a million times.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import Mesh

from ..costs import collective_times
from ..costs.roofline import COMPUTE_REACH, MEMORY_REACH, busy_seconds
from ..machine.chips import Chip
from ..propagation.factors import ArraySharding, Axes, by_factor
from ..propagation.sharding_propagation import ArrayShardings
from .condensed_program import OpKind, ValueKind
from .named_dimensions import WINDOWED


class AxisParts:
    """The parts of the axes of one mesh.

    Args:
        mesh: it.

    Attributes:
        sizes: of each part.
        of: the parts of each mesh axis, the outermost first; an axis of one device has none.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Numbered in the mesh's order."""
        layouts = ArrayShardings(dict(mesh.shape))
        self.sizes = layouts.sizes
        self.of = tuple([layouts.sub_axes(name) for name in mesh.axis_names])
        self._owners = [index for index, parts in enumerate(self.of) for _ in parts]

    def axes(self, parts: Iterable[int]) -> tuple[int, ...]:
        """Numbers of the mesh axes that some parts are of, each once."""
        return tuple(dict.fromkeys([self._owners[chunk] for chunk in parts]))

    def split(self, layout: ArraySharding) -> ArraySharding:
        """A layout by parts."""
        return tuple([tuple([one for n in split for one in self.of[n]]) for split in layout])

    def joined(self, layout: ArraySharding) -> ArraySharding | None:
        """A layout by mesh axes; None: it splits by a part of one, which no spec says."""
        joined = tuple([self.axes(split) for split in layout])
        return joined if self.split(joined) == layout else None


_LARGE = 1 << 40


class LinkRates:
    """Seconds of collectives on one mesh: a line for each kind and each set of axes.

    Args:
        mesh: it.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
        >>> rates = LinkRates(mesh)
        >>> whole = collective_times.seconds("all-gather", 10**8, ("model",), mesh)
        >>> abs(rates.seconds("all-gather", (1,), 1e8) / whole - 1) < 1e-6
        True
    """

    def __init__(self, mesh: Mesh) -> None:
        """Nothing asked yet."""
        self.mesh = mesh
        self.names = tuple(mesh.axis_names)
        self._lines: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}

    def seconds(self, kind: str, axes: Sequence[int], sent: float) -> float:
        """How long one collective takes.

        Args:
            kind: as HLO calls it.
            axes: numbers of the mesh axes along which devices talk.
            sent: bytes of its result on one device; of a reduce-scatter of its operand.
        """
        key = (kind, tuple(sorted(axes)))
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._line(*key)
        return line[0] + line[1] * sent if sent else 0.0

    def alike(self, value: int, other: int) -> bool:
        """Whether two mesh axes are of one size and equally fast."""
        sizes = tuple(self.mesh.shape.values())
        kinds = ("all-gather", "all-to-all")
        return sizes[value] == sizes[other] and all(
            abs(self.seconds(kind, (value,), 1e9) / self.seconds(kind, (other,), 1e9) - 1) < 1e-6
            for kind in kinds
        )

    def _line(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        names = tuple(self.names[axis] for axis in axes)
        first, second = (
            collective_times.seconds(kind, sent, names, self.mesh) for sent in (_LARGE, 2 * _LARGE)
        )
        each = (second - first) / _LARGE
        return max(0.0, first - each * _LARGE), each


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
        self._known: dict[tuple[Axes, tuple[int, ...], ArraySharding], _Lies] = {}
        self.bandwidth = chip.bandwidth * MEMORY_REACH[chip.platform]

    def peak(self, dtype: str) -> float:
        """Operations a second that large products reach."""
        return self._chip.rate(dtype) * COMPUTE_REACH.get(self._chip.platform, 1.0)

    def of(self, op: OpKind, layouts: Sequence[ArraySharding], index: FactorPlaces) -> OpCost:
        """One run of an operation."""
        kinds = [self._values[n] if n >= 0 else None for n in (*op.operands, *op.results)]
        sizes = op.rule.sizes
        seconds_full = op.flops / self.peak(op.dtype)
        where = [
            _NOWHERE if kind is None else self._lies(axes, sizes, layout)
            for kind, axes, layout in zip(kinds, index.arrays, layouts, strict=True)
        ]
        done: dict[int, int] = {}
        picked: list[_Picked] = []
        for positions, parts in self._together(where).items():
            ways = self._count(parts)
            requested = sorted(
                place
                for place in {
                    position for position in positions if position is not None and position >= 0
                }
                if any(place in axes for axes in index.axis)
                and sizes[place] % (done.get(place, 1) * ways) == 0
                and all(done.get(other) == sizes[other] for other in index.outside.get(place, ()))
            )
            agreed = any(
                all(
                    current in (None, one if one in index.axis[n] else None)
                    for n, current in enumerate(positions[: len(op.operands)])
                )
                for one in requested
            )
            # XLA never gathers operands that lie alike, however small they are.
            ways_out = [
                _Picked(parts, ways, one) for one in (requested if agreed else (*requested, -1))
            ]
            best = ways_out[0]
            if len(ways_out) > 1:
                share = math.prod(done.values())
                best = min(
                    ways_out,
                    key=lambda one: (
                        seconds_full / share / (one.ways if one.factor >= 0 else 1)
                        + sum(move[2] for move in self._moves(op, kinds, where, index, [one]))
                    ),
                )
            picked.append(best)
            if best.factor >= 0:
                done[best.factor] = done.get(best.factor, 1) * ways
        moves = self._moves(op, kinds, where, index, picked)
        moved = 0.0
        for n in op.moved:
            kind = kinds[n]
            if kind is not None:
                mine = math.prod([one.ways for one in picked if one.factor in index.axis[n]])
                moved += kind.bytes / mine
        computing = seconds_full / math.prod(done.values())
        busy = busy_seconds(computing, moved / self.bandwidth, self._chip.platform)
        return OpCost(busy, tuple(moves))

    def _lies(self, axes: Axes, sizes: tuple[int, ...], layout: ArraySharding) -> _Lies:
        key = (axes, sizes, layout)
        result = self._known.get(key)
        if result is None:
            splits, rest = by_factor(axes, layout, sizes, self._parts.sizes)
            factors = {chunk: factor for factor, split in splits.items() for chunk in split}
            blocks = self._count([axis for split in layout for axis in split])
            result = self._known[key] = _Lies(factors | dict.fromkeys(rest, -1), blocks)
        return result

    def _together(self, where: Sequence[_Lies]) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """Parts of mesh axes by what they split in each array."""
        result: dict[tuple[int | None, ...], tuple[int, ...]] = {}
        for chunk in sorted({chunk for one in where for chunk in one.factors}):
            positions = tuple([one.factors.get(chunk) for one in where])
            result[positions] = (*result.get(positions, ()), chunk)
        return result

    def _moves(
        self,
        op: OpKind,
        kinds: Sequence[ValueKind | None],
        where: Sequence[_Lies],
        index: FactorPlaces,
        picked: Sequence[_Picked],
    ) -> list[tuple[int, tuple[int, ...], float, float]]:
        """The collectives of an operation that is split so by some parts of mesh axes."""
        moves: list[tuple[int, tuple[int, ...], float, float]] = []
        count = len(op.operands)

        def add(n: int, how: str, parts: Sequence[int], sent: float) -> None:
            axes = tuple(sorted(self._parts.axes(parts)))
            moves.append((n, axes, self._rates.seconds(how, axes, sent), sent))

        for n, kind in enumerate(kinds):
            if kind is None:
                continue
            parts: dict[str, tuple[int, ...]] = {}
            joined = scattered = 1
            edges: list[tuple[_Picked, int]] = []
            for one in picked:
                current = where[n].factors.get(one.parts[0])
                there = one.factor if one.factor in index.axis[n] else None
                how = None
                if n >= count and there is None and one.factor in op.rule.reduced:
                    how = "all-reduce" if current is None else "reduce-scatter"
                elif current is not None and there is None:
                    how = "all-gather"
                elif current is None and there is not None and n >= count:
                    how = "all-gather"
                elif current is not None and current != there:
                    how = "all-to-all"
                if how is not None:
                    parts[how] = (*parts.get(how, ()), *one.parts)
                    scattered *= one.ways if how == "reduce-scatter" else 1
                    joined *= one.ways if current is not None and how != "all-to-all" else 1
                if n < count and there is not None and there in op.rule.unsharded:
                    edges.append((one, kind.shape[index.axis[n][there]]))
            sent = kind.bytes / where[n].blocks * joined
            for how in _ORDER:
                if how in parts:
                    add(n, how, parts[how], sent / (scattered if how == "all-reduce" else 1))
            for one, rows in edges:
                shard = sent / scattered
                add(n, "collective-permute", one.parts, 2 * shard * one.ways / rows)
        return moves

    def _count(self, parts: Iterable[int]) -> int:
        """How many devices some parts of mesh axes have."""
        return math.prod([self._parts.sizes[chunk] for chunk in parts])


def placed(op: OpKind) -> FactorPlaces:
    """Where an operation has its factors."""
    arrays = (*op.rule.operands, *op.rule.results)
    fixed = frozenset() if op.name in WINDOWED else op.rule.unsharded
    axis = tuple(
        {one: n for n, axis in enumerate(axes) for one in axis if one not in fixed}
        for axes in arrays
    )
    outside: dict[int, frozenset[int]] = {}
    for axes in arrays:
        for mine in axes:
            for n, one in enumerate(mine[1:], 1):
                outside[one] = outside.get(one, frozenset()) | set(mine[:n])
    return FactorPlaces(arrays, axis, outside)
