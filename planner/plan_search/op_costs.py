"""Cost of one kind of operation for the shardings of its operands and results.

Mesh axes are factored into sub-axes of prime size: eight heads are split by eight of sixteen
devices. A plan names full axes; its shardings propagate to values whose axes are smaller, and
XLA's partitioner splits those by as many sub-axes as divide them.

>>> from isoshard.planner.machine.topologies import topology
>>> sub_axes = SubAxes(topology("v5e:16x16").mesh((64, 4), ("data", "model")))
>>> sub_axes.of, sub_axes.sizes
(((0, 1, 2, 3, 4, 5), (6, 7)), (2, 2, 2, 2, 2, 2, 2, 2))
>>> sub_axes.split(((1,), (), (0,)))
((6, 7), (), (0, 1, 2, 3, 4, 5))
>>> sub_axes.joined(((6, 7), ())), sub_axes.joined(((6,), (7,)))
(((1,), ()), None)

Sub-axes that split the same factors in all arrays split the factor of an operation by which least
is sent and computed. An operand with another sharding is gathered or exchanged, unreduced results
are summed. Seconds of collectives are cached: a search reads the same ones a million times.
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


class SubAxes:
    """The sub-axes of a mesh: its axes, factored into primes.

    Args:
        mesh: the mesh.

    Attributes:
        sizes: of each sub-axis.
        of: the sub-axes of each mesh axis, the outermost first; an axis of one device has none.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Numbered in the mesh's order."""
        layouts = ArrayShardings(dict(mesh.shape))
        self.sizes = layouts.sizes
        self.of = tuple([layouts.sub_axes(name) for name in mesh.axis_names])
        self._owners = [index for index, sub_axes in enumerate(self.of) for _ in sub_axes]

    def axes(self, sub_axes: Iterable[int]) -> tuple[int, ...]:
        """Indices of the mesh axes that some sub-axes belong to, each once."""
        return tuple(dict.fromkeys([self._owners[sub_axis] for sub_axis in sub_axes]))

    def split(self, layout: ArraySharding) -> ArraySharding:
        """A sharding by sub-axes."""
        return tuple(
            [tuple([sub_axis for n in split for sub_axis in self.of[n]]) for split in layout]
        )

    def joined(self, layout: ArraySharding) -> ArraySharding | None:
        """A sharding by mesh axes; None: it splits by a sub-axis, which no spec expresses."""
        joined = tuple([self.axes(split) for split in layout])
        return joined if self.split(joined) == layout else None


_LARGE = 1 << 40


class LinkRates:
    """Seconds of collectives on one mesh: a line for each kind and each set of axes.

    Args:
        mesh: the mesh.

    Example:
        >>> from isoshard.planner.machine.topologies import topology
        >>> mesh = topology("v5e:4x4").mesh((4, 4), ("data", "model"))
        >>> rates = LinkRates(mesh)
        >>> exact = collective_times.seconds("all-gather", 10**8, ("model",), mesh)
        >>> abs(rates.seconds("all-gather", (1,), 1e8) / exact - 1) < 1e-6
        True
    """

    def __init__(self, mesh: Mesh) -> None:
        """Nothing is computed yet."""
        self.mesh = mesh
        self.names = tuple(mesh.axis_names)
        self._lines: dict[tuple[str, tuple[int, ...]], tuple[float, float]] = {}

    def seconds(self, kind: str, axes: Sequence[int], nbytes: float) -> float:
        """How long one collective takes.

        Args:
            kind: as HLO calls it.
            axes: indices of its mesh axes.
            nbytes: of its result on one device; of a reduce-scatter of its operand.
        """
        key = (kind, tuple(sorted(axes)))
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._line(*key)
        return line[0] + line[1] * nbytes if nbytes else 0.0

    def interchangeable(self, index: int, other: int) -> bool:
        """Whether two mesh axes are of one size and equally fast."""
        sizes = tuple(self.mesh.shape.values())
        kinds = ("all-gather", "all-to-all")
        return sizes[index] == sizes[other] and all(
            abs(self.seconds(kind, (index,), 1e9) / self.seconds(kind, (other,), 1e9) - 1) < 1e-6
            for kind in kinds
        )

    def _line(self, kind: str, axes: tuple[int, ...]) -> tuple[float, float]:
        names = tuple(self.names[axis] for axis in axes)
        first, second = (
            collective_times.seconds(kind, nbytes, names, self.mesh)
            for nbytes in (_LARGE, 2 * _LARGE)
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
class FactorAxes:
    """Which axes of an operation's operands and results have which factors.

    Attributes:
        arrays: of each operand, then each result: for each axis its factors.
        axis: of each array, the axis of each factor that may be split.
        outside: of inner factors, the factors of the same axis outside of them: these are split
            down to one element first.
    """

    arrays: tuple[Axes, ...]
    axis: tuple[Mapping[int, int], ...]
    outside: Mapping[int, frozenset[int]]


@dataclasses.dataclass(frozen=True)
class _Picked:
    """Sub-axes that split the same factors in all arrays, and the factor chosen; -1: none."""

    sub_axes: tuple[int, ...]
    ways: int
    factor: int


@dataclasses.dataclass(frozen=True)
class _FactorSplits:
    """The factor of an array that each sub-axis splits, -1 for none, and the number of blocks."""

    factors: Mapping[int, int]
    blocks: int


_UNSPLIT = _FactorSplits({}, 1)
_ORDER = ("all-gather", "all-to-all", "reduce-scatter", "all-reduce")


class OpCosts:
    """The costs of operations on one mesh.

    Args:
        values: kinds of values, by id.
        sub_axes: of the mesh.
        rates: of its links.
        chip: of its devices.
    """

    def __init__(
        self, values: Sequence[ValueKind], sub_axes: SubAxes, rates: LinkRates, chip: Chip
    ) -> None:
        """Nothing is computed yet."""
        self._values = values
        self._sub_axes = sub_axes
        self._rates = rates
        self._chip = chip
        self._cache: dict[tuple[Axes, tuple[int, ...], ArraySharding], _FactorSplits] = {}
        self.bandwidth = chip.bandwidth * MEMORY_REACH[chip.platform]

    def peak(self, dtype: str) -> float:
        """Operations a second that large products reach."""
        return self._chip.rate(dtype) * COMPUTE_REACH.get(self._chip.platform, 1.0)

    def of(self, op: OpKind, layouts: Sequence[ArraySharding], index: FactorAxes) -> OpCost:
        """One run of an operation."""
        kinds = [self._values[n] if n >= 0 else None for n in (*op.operands, *op.results)]
        sizes = op.rule.sizes
        seconds_full = op.flops / self.peak(op.dtype)
        splits = [
            _UNSPLIT if kind is None else self._splits_of(axes, sizes, layout)
            for kind, axes, layout in zip(kinds, index.arrays, layouts, strict=True)
        ]
        done: dict[int, int] = {}
        picked: list[_Picked] = []
        for positions, sub_axes in self._by_factors(splits).items():
            ways = self._count(sub_axes)
            requested = sorted(
                factor
                for factor in {n for n in positions if n is not None and n >= 0}
                if any(factor in axes for axes in index.axis)
                and sizes[factor] % (done.get(factor, 1) * ways) == 0
                and all(done.get(other) == sizes[other] for other in index.outside.get(factor, ()))
            )
            agreed = any(
                all(
                    current in (None, factor if factor in index.axis[n] else None)
                    for n, current in enumerate(positions[: len(op.operands)])
                )
                for factor in requested
            )
            # XLA never gathers operands of equal shardings, however small they are.
            factors = requested if agreed else (*requested, -1)
            options = [_Picked(sub_axes, ways, factor) for factor in factors]
            best = options[0]
            if len(options) > 1:
                share = math.prod(done.values())
                best = min(
                    options,
                    key=lambda option: (
                        seconds_full / share / (option.ways if option.factor >= 0 else 1)
                        + sum(move[2] for move in self._moves(op, kinds, splits, index, [option]))
                    ),
                )
            picked.append(best)
            if best.factor >= 0:
                done[best.factor] = done.get(best.factor, 1) * ways
        moves = self._moves(op, kinds, splits, index, picked)
        moved = 0.0
        for n in op.moved:
            kind = kinds[n]
            if kind is not None:
                blocks = math.prod([pick.ways for pick in picked if pick.factor in index.axis[n]])
                moved += kind.bytes / blocks
        computing = seconds_full / math.prod(done.values())
        busy = busy_seconds(computing, moved / self.bandwidth, self._chip.platform)
        return OpCost(busy, tuple(moves))

    def _splits_of(
        self, axes: Axes, sizes: tuple[int, ...], layout: ArraySharding
    ) -> _FactorSplits:
        key = (axes, sizes, layout)
        cached = self._cache.get(key)
        if cached is None:
            splits, rest = by_factor(axes, layout, sizes, self._sub_axes.sizes)
            factors = {chunk: factor for factor, split in splits.items() for chunk in split}
            blocks = self._count([axis for split in layout for axis in split])
            cached = self._cache[key] = _FactorSplits(factors | dict.fromkeys(rest, -1), blocks)
        return cached

    def _by_factors(
        self, splits: Sequence[_FactorSplits]
    ) -> dict[tuple[int | None, ...], tuple[int, ...]]:
        """The sub-axes by the factors that they split in each array."""
        result: dict[tuple[int | None, ...], tuple[int, ...]] = {}
        for sub_axis in sorted({sub_axis for split in splits for sub_axis in split.factors}):
            positions = tuple([split.factors.get(sub_axis) for split in splits])
            result[positions] = (*result.get(positions, ()), sub_axis)
        return result

    def _moves(
        self,
        op: OpKind,
        kinds: Sequence[ValueKind | None],
        splits: Sequence[_FactorSplits],
        index: FactorAxes,
        picked: Sequence[_Picked],
    ) -> list[tuple[int, tuple[int, ...], float, float]]:
        """The collectives of an operation that some sub-axes split along chosen factors."""
        moves: list[tuple[int, tuple[int, ...], float, float]] = []
        count = len(op.operands)

        def add(n: int, collective: str, sub_axes: Sequence[int], nbytes: float) -> None:
            axes = tuple(sorted(self._sub_axes.axes(sub_axes)))
            moves.append((n, axes, self._rates.seconds(collective, axes, nbytes), nbytes))

        for n, kind in enumerate(kinds):
            if kind is None:
                continue
            by_collective: dict[str, tuple[int, ...]] = {}
            joined = scattered = 1
            edges: list[tuple[_Picked, int]] = []
            for pick in picked:
                current = splits[n].factors.get(pick.sub_axes[0])
                target = pick.factor if pick.factor in index.axis[n] else None
                collective = None
                if n >= count and target is None and pick.factor in op.rule.reduced:
                    collective = "all-reduce" if current is None else "reduce-scatter"
                elif current is not None and target is None:
                    collective = "all-gather"
                elif current is None and target is not None and n >= count:
                    collective = "all-gather"
                elif current is not None and current != target:
                    collective = "all-to-all"
                if collective is not None:
                    by_collective[collective] = (*by_collective.get(collective, ()), *pick.sub_axes)
                    scattered *= pick.ways if collective == "reduce-scatter" else 1
                    joined *= pick.ways if current is not None and collective != "all-to-all" else 1
                if n < count and target is not None and target in op.rule.unsharded:
                    edges.append((pick, kind.shape[index.axis[n][target]]))
            nbytes = kind.bytes / splits[n].blocks * joined
            for collective in _ORDER:
                if collective in by_collective:
                    add(
                        n,
                        collective,
                        by_collective[collective],
                        nbytes / (scattered if collective == "all-reduce" else 1),
                    )
            for pick, rows in edges:
                shard = nbytes / scattered
                add(n, "collective-permute", pick.sub_axes, 2 * shard * pick.ways / rows)
        return moves

    def _count(self, sub_axes: Iterable[int]) -> int:
        """The number of devices along some sub-axes."""
        return math.prod([self._sub_axes.sizes[sub_axis] for sub_axis in sub_axes])


def factor_axes(op: OpKind) -> FactorAxes:
    """The axes of an operation's factors."""
    arrays = (*op.rule.operands, *op.rule.results)
    fixed = frozenset() if op.name in WINDOWED else op.rule.unsharded
    axis = tuple(
        {factor: n for n, axis in enumerate(axes) for factor in axis if factor not in fixed}
        for axes in arrays
    )
    outside: dict[int, frozenset[int]] = {}
    for axes in arrays:
        for factors in axes:
            for n, factor in enumerate(factors[1:], 1):
                outside[factor] = outside.get(factor, frozenset()) | set(factors[:n])
    return FactorAxes(arrays, axis, outside)
