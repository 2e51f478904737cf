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
from ..machine.chips import Chip
from ..machine.topologies import topology_of
from .condensed_program import CondensedProgram, OpKind, ValueKind
from .link_rates import LinkRates
from .named_dimensions import WINDOWED

OVERLAP = 0.5
"""The part of collectives that runs beside computing."""


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
        self._ops: dict[tuple[int, tuple[ArrayLayout, ...]], _OpCost] = {}
        self._layouts: dict[tuple[int, object], ArrayLayout] = {}
        self._places = [_placed(op) for op in program.ops]

    def of(self, choice: Choice) -> ChoiceCost:
        """Evaluate a choice.

        Args:
            choice: over this mesh's axes.
        """
        program = self.program
        groups = [self.group_layout(n, choice) for n in range(len(program.dimensions.groups))]
        layouts = [
            self._value_layout(n, kind, choice, groups) for n, kind in enumerate(program.values)
        ]
        busy, talking = 0.0, dict[tuple[int, ...], float]()
        once: dict[tuple[object, ...], list[float]] = {}
        largest = 0.0
        for number, (op, times) in enumerate(zip(program.ops, program.times, strict=True)):
            mine = tuple(layouts[one] if one >= 0 else () for one in (*op.operands, *op.results))
            key = (number, mine)
            cost = self._ops.get(key)
            if cost is None:
                cost = self._ops[key] = self._op(op, mine, self._places[number])
            busy += cost.busy * times
            for array, axes, seconds, sent in cost.moves:
                largest = max(largest, sent)
                if array < len(op.operands):
                    kind = op.operands[array]
                    if program.values[kind].group < 0:
                        held = once.setdefault((kind, axes, sent), [axes, seconds, 0, kind])  # type: ignore[list-item]
                        held[2] += times
                        continue
                talking[axes] = talking.get(axes, 0.0) + seconds * times
        for axes, seconds, times, kind in once.values():
            count = min(times, program.counts[int(kind)])
            talking[axes] = talking.get(axes, 0.0) + seconds * count  # type: ignore[index]
        talk = sum(talking.values())
        seconds = busy + talk - OVERLAP * min(busy, talk)
        memory = self._memory(groups, layouts) + largest
        return ChoiceCost(seconds, memory, busy, talking)

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
        if number in self.forced:
            return self.forced[number]
        group = self.program.dimensions.groups[number]
        stored = tuple(number in one for one in choice.stored)
        key = (-1 - number, (choice.split, stored))
        found = self._layouts.get(key)
        if found is not None:
            return found
        order = tuple(sorted(range(len(group.shape)), key=lambda n: (group.strands[n], n)))
        layout = list(self._chosen(group.shape, group.dimensions, order, choice.split))
        used = {one for split in layout for one in split}
        for axis, here in enumerate(stored):
            if here and axis not in used and group.role != "input":
                place = self._largest(group.shape, group.dimensions, layout, self.sizes[axis])
                if place is not None:
                    layout[place] = tuple(sorted((*layout[place], axis)))
        self._layouts[key] = tuple(layout)
        return tuple(layout)

    def _largest(
        self,
        shape: Sequence[int],
        dimensions: Sequence[int],
        layout: Sequence[tuple[int, ...]],
        size: int,
    ) -> int | None:
        best = None
        for axis, whole in enumerate(shape):
            before = math.prod(self.sizes[one] for one in layout[axis])
            if dimensions[axis] >= 0 and whole % (before * size) == 0:
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

    def _value_layout(
        self, number: int, kind: ValueKind, choice: Choice, groups: Sequence[ArrayLayout]
    ) -> ArrayLayout:
        if kind.group >= 0:
            whole = groups[kind.group]
            return tuple(
                whole[place] if place >= 0 and size > 1 else ()
                for place, size in zip(kind.places, kind.shape, strict=True)
            )
        key = (number, choice.split)
        found = self._layouts.get(key)
        if found is None:
            found = self._chosen(kind.shape, kind.dimensions, kind.order, choice.split)
            self._layouts[key] = found
        return found

    def _memory(self, groups: Sequence[ArrayLayout], layouts: Sequence[ArrayLayout]) -> float:
        program = self.program
        total = float(program.rest)
        for size, layout in zip(program.resting, groups, strict=True):
            total += size / self._parts(layout)
        each = [
            kind.bytes / self._parts(layout)
            for kind, layout in zip(program.values, layouts, strict=True)
        ]
        alive = (sum(each[n] * count for n, count in one.items()) for one in program.moments)
        return total + max(alive, default=0.0)

    def _parts(self, layout: ArrayLayout) -> int:
        return math.prod(self.sizes[one] for split in layout for one in split)

    def _peak(self, dtype: str) -> float:
        return self._chip.flops.get(dtype, self._chip.flops["float32"])

    def _op(self, op: OpKind, layouts: Sequence[ArrayLayout], place: _Places) -> _OpCost:
        kinds = [self.program.values[n] if n >= 0 else None for n in (*op.operands, *op.results)]
        if not op.talks:
            moved = sum(kinds[n].bytes / self._parts(layouts[n]) for n in op.moved if kinds[n])
            return _OpCost(moved / self._chip.bandwidth, ())
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
            for factor in (*sorted(asked), -1):
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
        busy = max(whole / count, moved / self._chip.bandwidth)
        return _OpCost(busy, tuple(moves))

    def _moves(
        self,
        op: OpKind,
        kinds: Sequence[ValueKind | None],
        layouts: Sequence[ArrayLayout],
        where: Sequence[Mapping[int, int]],
        place: _Places,
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
            mine = self._parts(layouts[n]) / math.prod(
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
class _Places:
    """Of one operation.

    Attributes:
        outermost: of each array, for each axis its outermost factor; -1: none.
        axis: of each array, the axis of which a factor is the outermost.
        free: factors that may be split.
    """

    outermost: tuple[tuple[int, ...], ...]
    axis: tuple[Mapping[int, int], ...]
    free: frozenset[int]


def _placed(op: OpKind) -> _Places:
    arrays = (*op.rule.operands, *op.rule.results)
    outermost = tuple(tuple(mine[0] if mine else -1 for mine in axes) for axes in arrays)
    inner = {factor for axes in arrays for mine in axes for factor in mine[1:]}
    free = set(range(len(op.rule.sizes))) - inner
    if op.name not in WINDOWED:
        free -= op.rule.whole
    axis = tuple(
        {mine[0]: n for n, mine in enumerate(axes) if mine and mine[0] in free} for axes in arrays
    )
    return _Places(outermost, axis, frozenset(free))
