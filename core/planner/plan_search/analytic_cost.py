"""What a choice costs, in a millisecond: the sum over kinds of operations and values.

A choice says for each mesh axis which dimensions it splits, in the order in which they count: of
each value it splits the first that the value has and that it divides. Beside that a parameter may
rest split along a mesh axis that splits none of its dimensions: it is gathered where it is used,
and its gradient is scattered.

Where operands and results of an operation lie differently, the operation is split along the
dimension that is cheapest, and what that needs is counted: gathers of operands, sums of results,
exchanges.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from ..axes.factor_layouts import ArrayLayout
from ..costs.roofline import COMPUTE_REACH, MEMORY_REACH
from ..machine.chips import Chip
from ..machine.topologies import topology_of
from .condensed_program import CondensedProgram, OpKind, ValueKind
from .link_rates import LinkRates
from .named_dimensions import WINDOWED, LeafGroup

TINY = 1 << 18
"""Parameters of fewer bytes rest split only along what is computed split."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """What is split along which mesh axis.

    Attributes:
        split: for each mesh axis the dimensions that it splits, those that count first first.
        stored: for each mesh axis the groups of parameters that rest split along it.
    """

    split: tuple[tuple[int, ...], ...]
    stored: tuple[frozenset[int], ...]


@dataclasses.dataclass(frozen=True)
class ChoiceCost:
    """What a choice costs.

    Attributes:
        seconds: of a step.
        memory: bytes on one device.
        busy: seconds of computing and of moving bytes between memory and cores.
        talking: seconds of collectives, by the numbers of the mesh axes.
    """

    seconds: float
    memory: float
    busy: float
    talking: Mapping[tuple[int, ...], float]


@dataclasses.dataclass(frozen=True)
class _OpCost:
    busy: float
    moves: tuple[tuple[int, tuple[int, ...], float, float], ...]  # array, axes, seconds, bytes


@dataclasses.dataclass(frozen=True)
class _Gather:
    op: OpKind
    seconds: float
    times: int


class AnalyticCost:
    """The cost function of one step on one mesh.

    Args:
        program: the step by kinds.
        mesh: the mesh.
        forced: groups whose layout is given.
    """

    def __init__(
        self,
        program: CondensedProgram,
        mesh: Mesh,
        forced: Mapping[int, ArrayLayout] | None = None,
    ) -> None:
        """Nothing is computed yet."""
        self.program = program
        self.mesh = mesh
        self.forced = dict(forced or {})
        self.sizes = tuple(mesh.shape[name] for name in mesh.axis_names)
        self.rates = LinkRates(mesh)
        self._chip: Chip = topology_of(mesh).chip
        self._bandwidth = self._chip.bandwidth * MEMORY_REACH[self._chip.platform]
        self._costs: list[dict[tuple[int, ...], _OpCost]] = [{} for _ in program.ops]
        self._layouts: dict[tuple[int, object], int] = {}
        self._numbers: dict[ArrayLayout, int] = {}
        self._known: list[ArrayLayout] = []
        self._parts: list[int] = []
        self._bytes = [kind.bytes for kind in program.values]
        self._places = [_placed(op) for op in program.ops]
        self._arrays = [(*op.operands, *op.results) for op in program.ops]
        self._none = self._number(())
        self._batch = {
            dimension
            for group in program.dimensions.groups
            if group.role == "input"
            for dimension in group.dimensions
        }

    def of(self, choice: Choice) -> ChoiceCost:
        """Evaluate a choice.

        Args:
            choice: over this mesh's axes.
        """
        program = self.program
        groups = [self._group(n, choice) for n in range(len(program.dimensions.groups))]
        layouts = [self._value(n, kind, choice, groups) for n, kind in enumerate(program.values)]
        layouts.append(self._none)
        parts = self._parts
        each = [size / parts[one] for size, one in zip(self._bytes, layouts, strict=False)]
        busy = [
            sum(each[n] * count for n, count in one.items()) / self._bandwidth
            for one in program.traffic
        ]
        talking, sent_in = dict[tuple[int, ...], float](), [0.0, 0.0]
        once: dict[tuple[int, tuple[int, ...], float], _Gather] = {}
        largest = 0.0

        def talk(op: OpKind, axes: tuple[int, ...], seconds: float) -> None:
            talking[axes] = talking.get(axes, 0.0) + seconds
            sent_in[op.looped] += seconds

        for number, op in enumerate(program.ops):
            mine = tuple([layouts[one] for one in self._arrays[number]])
            cost = self._costs[number].get(mine)
            if cost is None:
                known = [self._known[one] for one in mine]
                cost = self._costs[number][mine] = self._op(op, known, self._places[number])
            times = program.times[number]
            busy[op.looped] += cost.busy * times
            for array, axes, seconds, sent in cost.moves:
                largest = max(largest, sent)
                if array < len(op.operands) and program.values[op.operands[array]].group < 0:
                    gather = (op.operands[array], axes, sent)
                    held = once.get(gather)
                    before = 0 if held is None else held.times
                    once[gather] = _Gather(op, seconds, before + times)
                else:
                    talk(op, axes, seconds * times)
        for (kind, axes, _), held in once.items():
            talk(held.op, axes, held.seconds * min(held.times, program.counts[kind]))
        total = busy[0] + sent_in[0] + max(busy[1], sent_in[1])
        alive = (sum(each[n] * count for n, count in one.items()) for one in program.moments)
        resting = sum(size / parts[one] for size, one in zip(program.resting, groups, strict=True))
        memory = program.rest + resting + max(alive, default=0.0) + largest
        return ChoiceCost(total, memory, sum(busy), talking)

    def least_seconds(self) -> float:
        """What no choice can be faster than: all devices compute all the time."""
        total = 0.0
        for op, times in zip(self.program.ops, self.program.times, strict=True):
            total += times * op.flops / self._peak(op.dtype)
        return total / math.prod(self.sizes)

    def group_layout(self, number: int, choice: Choice) -> ArrayLayout:
        """How a group of parameters, or an array of the batch, rests.

        Args:
            number: of the group.
            choice: what is chosen.
        """
        return self._known[self._group(number, choice)]

    def output_layout(self, module: str, choice: Choice) -> ArrayLayout:
        """How the output of a module lies.

        Args:
            module: its name.
            choice: what is chosen.
        """
        number = self.program.modules[module]
        groups = [self._group(n, choice) for n in range(len(self.program.dimensions.groups))]
        return self._known[self._value(number, self.program.values[number], choice, groups)]

    def _number(self, layout: ArrayLayout) -> int:
        number = self._numbers.get(layout)
        if number is None:
            number = self._numbers[layout] = len(self._known)
            self._known.append(layout)
            self._parts.append(math.prod(self.sizes[one] for split in layout for one in split))
        return number

    def _group(self, number: int, choice: Choice) -> int:
        if number in self.forced:
            return self._number(self.forced[number])
        stored = tuple([number in one for one in choice.stored])
        key = (-1 - number, (choice.split, stored))
        found = self._layouts.get(key)
        if found is not None:
            return found
        group = self.program.dimensions.groups[number]
        order = tuple(sorted(range(len(group.shape)), key=lambda n: (group.strands[n], n)))
        split = choice.split
        sizes = zip(group.shape, group.dimensions, strict=True)
        one = math.prod(size for size, dimension in sizes if dimension >= 0)
        if group.role != "input" and one * group.itemsize < TINY:
            split = tuple(self._computed(one) for one in split)
        layout = list(self._chosen(group.shape, group.dimensions, order, split))
        used = {one for split in layout for one in split}
        rest = [n for n, here in enumerate(stored) if here and n not in used]
        if rest and group.role != "input":
            self._store(group, layout, rest)
        found = self._layouts[key] = self._number(tuple(layout))
        return found

    def _computed(self, split: tuple[int, ...]) -> tuple[int, ...]:
        """The dimensions that values with a batch are split along, too."""
        first = next((n for n, one in enumerate(split) if one in self._batch), len(split))
        return split[: first + 1]

    def _store(self, group: LeafGroup, layout: list[tuple[int, ...]], rest: Sequence[int]) -> None:
        """Let a group rest split along more mesh axes: all along one of its axes if it can."""
        together = self._largest(group, layout, math.prod(self.sizes[one] for one in rest))
        if together is not None:
            layout[together] = (*layout[together], *rest)
            return
        for one in rest:
            place = self._largest(group, layout, self.sizes[one])
            if place is not None:
                layout[place] = (*layout[place], one)

    def _largest(
        self, group: LeafGroup, layout: Sequence[tuple[int, ...]], size: int
    ) -> int | None:
        best = None
        for axis, whole in enumerate(group.shape):
            before = math.prod(self.sizes[one] for one in layout[axis])
            if group.dimensions[axis] >= 0 and whole % (before * size) == 0:
                key = (bool(layout[axis]), -whole / before, axis)
                best = key if best is None else min(best, key)
        return None if best is None else best[2]

    def _chosen(
        self,
        shape: Sequence[int],
        dimensions: Sequence[int],
        order: Sequence[int],
        split: Sequence[Sequence[int]],
    ) -> ArrayLayout:
        layout: list[tuple[int, ...]] = [()] * len(shape)
        left = list(shape)
        for number, wanted in enumerate(split):
            size = self.sizes[number]
            for dimension in wanted:
                axis = next(
                    (n for n in order if dimensions[n] == dimension and left[n] % size == 0), None
                )
                if axis is not None:
                    layout[axis] += (number,)
                    left[axis] //= size
                    break
        return tuple(layout)

    def _value(self, number: int, kind: ValueKind, choice: Choice, groups: Sequence[int]) -> int:
        key = (number, groups[kind.group] if kind.group >= 0 else choice.split)
        found = self._layouts.get(key)
        if found is not None:
            return found
        if kind.group >= 0:
            whole = self._known[groups[kind.group]]
            layout = tuple(
                whole[place] if place >= 0 and size > 1 else ()
                for place, size in zip(kind.places, kind.shape, strict=True)
            )
        else:
            layout = self._chosen(kind.shape, kind.dimensions, kind.order, choice.split)
        found = self._layouts[key] = self._number(layout)
        return found

    def _peak(self, dtype: str) -> float:
        return self._chip.rate(dtype) * COMPUTE_REACH.get(self._chip.platform, 1.0)

    def _op(self, op: OpKind, layouts: Sequence[ArrayLayout], place: _FactorPlaces) -> _OpCost:
        kinds = [self.program.values[n] if n >= 0 else None for n in (*op.operands, *op.results)]
        whole = op.flops / self._peak(op.dtype)
        where = [{m: axis for axis, split in enumerate(one) for m in split} for one in layouts]
        parts: dict[int, int] = {}
        picked: dict[int, int | None] = {}
        for number, size in enumerate(self.sizes):
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
                    self.sizes[m]
                    for m, factor in picked.items()
                    if factor is not None and factor in place.axis[n]
                )
                moved += kind.bytes / mine
        busy = max(whole / count, moved / self._bandwidth)
        return _OpCost(busy, tuple(moves))

    def _moves(
        self,
        op: OpKind,
        kinds: Sequence[ValueKind | None],
        layouts: Sequence[ArrayLayout],
        where: Sequence[Mapping[int, int]],
        place: _FactorPlaces,
        picked: Mapping[int, int],
    ) -> list[tuple[int, tuple[int, ...], float, float]]:
        """The collectives of an operation that is split so along some mesh axes."""
        found: list[tuple[int, tuple[int, ...], float, float]] = []
        count = len(op.operands)

        def add(n: int, kind: str, axes: Sequence[int], sent: float) -> None:
            seconds = self.rates.seconds(kind, axes, sent)
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
            mine = self._parts[self._number(layouts[n])] / math.prod(
                self.sizes[m] for m in (*gathered, *scattered) if m in where[n]
            )
            sent = kind.bytes / mine
            if gathered:
                add(n, "all-gather", gathered, sent)
            if exchanged:
                add(n, "all-to-all", exchanged, sent)
            if scattered:
                add(n, "reduce-scatter", scattered, sent)
                sent /= math.prod(self.sizes[m] for m in scattered)
            if summed:
                add(n, "all-reduce", summed, sent)
            for number, rows in edges:
                add(n, "collective-permute", [number], 2 * sent * self.sizes[number] / rows)
        return found


@dataclasses.dataclass(frozen=True)
class _FactorPlaces:
    """Of one operation.

    Attributes:
        outermost: of each array, for each axis its outermost factor; -1: none.
        axis: of each array, the axis of which a factor is the outermost.
        free: factors that may be split.
    """

    outermost: tuple[tuple[int, ...], ...]
    axis: tuple[Mapping[int, int], ...]
    free: frozenset[int]


def _placed(op: OpKind) -> _FactorPlaces:
    arrays = (*op.rule.operands, *op.rule.results)
    outermost = tuple(tuple(mine[0] if mine else -1 for mine in axes) for axes in arrays)
    inner = {factor for axes in arrays for mine in axes for factor in mine[1:]}
    free = set(range(len(op.rule.sizes))) - inner
    if op.name not in WINDOWED:
        free -= op.rule.whole
    axis = tuple(
        {mine[0]: n for n, mine in enumerate(axes) if mine and mine[0] in free} for axes in arrays
    )
    return _FactorPlaces(outermost, axis, frozenset(free))
