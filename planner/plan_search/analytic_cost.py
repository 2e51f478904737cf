"""What a choice costs, in a millisecond: the sum over kinds of operations and values.

A choice says for each mesh axis which dimensions it splits, in the order in which they count: of
each value it splits the first that the value has and that it divides. What divides a parameter, but
not a smaller value behind it, splits that by as many prime parts of the axis as divide it. Beside
that a parameter may rest split along a mesh axis that splits none of its dimensions: it is gathered
where it is used, and its gradient is scattered.

Where operands and results of an operation lie differently, the operation is split along the
dimension that is cheapest, and what that needs is counted: gathers of operands, sums of results,
exchanges. Virtual devices are given large temporaries anew in each step, which takes time, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from jax.sharding import Mesh

from ..costs.roofline import new_memory_seconds, overlaps
from ..machine.topologies import topology_of
from ..propagation.factors import ArraySharding
from .condensed_program import CondensedProgram, OpKind, ValueKind
from .named_dimensions import LeafGroup
from .op_costs import AxisParts, LinkRates, OpCost, OpCosts, placed

TINY = 1 << 18
"""Parameters of fewer bytes rest split only along what is computed split."""


def is_tiny(group: LeafGroup) -> bool:
    """Whether parameters are so small (biases, scales) that it saves nothing to keep them split."""
    sizes = zip(group.shape, group.dimensions, strict=True)
    return math.prod(size for size, dimension in sizes if dimension >= 0) * group.itemsize < TINY


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
        forced: Mapping[int, ArraySharding] | None = None,
    ) -> None:
        """Nothing is computed yet."""
        self.program = program
        self.mesh = mesh
        self.forced = dict(forced or {})
        self.sizes = tuple(mesh.shape[name] for name in mesh.axis_names)
        self.parts = AxisParts(mesh)
        self.rates = LinkRates(mesh)
        self.chip = topology_of(mesh).chip
        self._op_costs = OpCosts(program.values, self.parts, self.rates, self.chip)
        self._costs: list[dict[tuple[int, ...], OpCost]] = [{} for _ in program.ops]
        self._layouts: dict[tuple[int, object], int] = {}
        self._numbers: dict[ArraySharding, int] = {}
        self._known: list[ArraySharding] = []
        self._shares: list[int] = []
        self._bytes = [kind.bytes for kind in program.values]
        self._places = [placed(op) for op in program.ops]
        self._arrays = [(*op.operands, *op.results) for op in program.ops]
        self._none = self._number(())
        self._batch = {
            dimension
            for group in program.dimensions.groups
            if group.role == "input"
            for dimension in group.dimensions
        }
        self._spread = {
            (dimension, index)
            for group in program.dimensions.groups
            for dimension, full in zip(group.dimensions, group.shape, strict=True)
            for index, size in enumerate(self.sizes)
            if full % size == 0
        }

    def of(self, choice: Choice) -> ChoiceCost:
        """Evaluate a choice."""
        program = self.program
        groups = [self._group(n, choice) for n in range(len(program.dimensions.groups))]
        layouts = [self._value(n, kind, choice, groups) for n, kind in enumerate(program.values)]
        layouts.append(self._none)
        shares = self._shares
        each = [size / shares[layout] for size, layout in zip(self._bytes, layouts, strict=False)]
        busy = [
            sum(each[n] * count for n, count in use.items()) / self._op_costs.bandwidth
            for use in program.traffic
        ]
        talking, sent_in = dict[tuple[int, ...], float](), [0.0, 0.0]
        once: dict[tuple[int, tuple[int, ...], float], _Gather] = {}
        largest = 0.0

        def talk(op: OpKind, axes: tuple[int, ...], seconds: float) -> None:
            talking[axes] = talking.get(axes, 0.0) + seconds
            sent_in[op.looped] += seconds

        for index, op in enumerate(program.ops):
            mine = tuple([layouts[array] for array in self._arrays[index]])
            cost = self._costs[index].get(mine)
            if cost is None:
                costs = [self._known[one] for one in mine]
                cost = self._costs[index][mine] = self._op_costs.of(op, costs, self._places[index])
            times = program.times[index]
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
        alive = (sum(each[n] * count for n, count in moment.items()) for moment in program.moments)
        held = max(alive, default=0.0) + largest
        busy[0] += new_memory_seconds(held, self.chip)
        looped = max if overlaps(self.chip) else sum
        total = busy[0] + sent_in[0] + looped((busy[1], sent_in[1]))
        resting = sum(
            size / shares[group] for size, group in zip(program.resting, groups, strict=True)
        )
        return ChoiceCost(total, program.rest + resting + held, sum(busy), talking)

    def least_seconds(self) -> float:
        """What no choice can be faster than: all devices compute all the time."""
        total = 0.0
        for op, times in zip(self.program.ops, self.program.times, strict=True):
            total += times * op.flops / self._op_costs.peak(op.dtype)
        return total / math.prod(self.sizes)

    def group_layout(self, index: int, choice: Choice) -> ArraySharding:
        """How a group of parameters, or an array of the batch, rests."""
        layout = self.parts.joined(self._known[self._group(index, choice)])
        assert layout is not None
        return layout

    def output_layout(self, module: str, choice: Choice) -> ArraySharding | None:
        """How the output of a module lies; None: it is split by a part of a mesh axis."""
        index = self.program.modules[module]
        groups = [self._group(n, choice) for n in range(len(self.program.dimensions.groups))]
        value = self._value(index, self.program.values[index], choice, groups)
        return self.parts.joined(self._known[value])

    def _number(self, layout: ArraySharding) -> int:
        result = self._numbers.get(layout)
        if result is None:
            result = self._numbers[layout] = len(self._known)
            self._known.append(layout)
            sizes = self.parts.sizes
            self._shares.append(math.prod(sizes[axis] for split in layout for axis in split))
        return result

    def _group(self, index: int, choice: Choice) -> int:
        if index in self.forced:
            return self._number(self.parts.split(self.forced[index]))
        stored = tuple([index in one for one in choice.stored])
        key = (-1 - index, (choice.split, stored))
        result = self._layouts.get(key)
        if result is not None:
            return result
        group = self.program.dimensions.groups[index]
        order = tuple(sorted(range(len(group.shape)), key=lambda n: (group.strands[n], n)))
        split = choice.split
        if group.role != "input" and is_tiny(group):
            split = tuple(self._computed(axis) for axis in split)
        layout = self._chosen(group.shape, group.dimensions, order, split)
        used = {axis for split in layout for axis in split}
        rest = [n for n, current in enumerate(stored) if current and n not in used]
        if rest and group.role != "input":
            self._store(group, layout, rest)
        result = self._layouts[key] = self._number(self.parts.split(tuple(layout)))
        return result

    def _computed(self, split: tuple[int, ...]) -> tuple[int, ...]:
        """The dimensions that values with a batch are split along, too."""
        first = next((n for n, axis in enumerate(split) if axis in self._batch), len(split))
        return split[: first + 1]

    def _store(self, group: LeafGroup, layout: list[tuple[int, ...]], rest: Sequence[int]) -> None:
        """Let a group rest split along more mesh axes: all along one of its axes if it can."""
        together = self._largest(group, layout, math.prod(self.sizes[one] for one in rest))
        if together is not None:
            layout[together] = (*layout[together], *rest)
            return
        for one in rest:
            index = self._largest(group, layout, self.sizes[one])
            if index is not None:
                layout[index] = (*layout[index], one)

    def _largest(
        self, group: LeafGroup, layout: Sequence[tuple[int, ...]], size: int
    ) -> int | None:
        best = None
        for axis, full in enumerate(group.shape):
            before = math.prod(self.sizes[split] for split in layout[axis])
            if group.dimensions[axis] >= 0 and full % (before * size) == 0:
                key = (bool(layout[axis]), -full / before, axis)
                best = key if best is None else min(best, key)
        return None if best is None else best[2]

    def _chosen(
        self,
        shape: Sequence[int],
        dimensions: Sequence[int],
        order: Sequence[int],
        split: Sequence[Sequence[int]],
    ) -> list[tuple[int, ...]]:
        """What splits a group, by whole mesh axes."""
        layout: list[tuple[int, ...]] = [()] * len(shape)
        left = list(shape)
        for index, target in enumerate(split):
            for dimension in target:
                axis = self._whole(dimension, index, dimensions, order, left)
                if axis is not None:
                    layout[axis] += (index,)
                    left[axis] //= self.sizes[index]
                    break
        return layout

    def _whole(
        self,
        dimension: int,
        index: int,
        dimensions: Sequence[int],
        order: Sequence[int],
        left: Sequence[int],
    ) -> int | None:
        """The axis that a mesh axis divides, of those of one dimension."""
        size = self.sizes[index]
        return next((n for n in order if dimensions[n] == dimension and left[n] % size == 0), None)

    def _spread_to(self, kind: ValueKind, split: Sequence[Sequence[int]]) -> ArraySharding:
        """What splits a value, by parts of mesh axes."""
        layout: list[tuple[int, ...]] = [()] * len(kind.shape)
        left = list(kind.shape)
        sizes = self.parts.sizes
        for index, target in enumerate(split):
            for dimension in target:
                axis = self._whole(dimension, index, kind.dimensions, kind.order, left)
                axes = [] if axis is None else [axis]
                if axis is None and (dimension, index) in self._spread:
                    outer = [n for n in kind.order if kind.dimensions[n] == dimension]
                    inner = [n for n, one in enumerate(kind.inside) if dimension in one]
                    axes = [*outer[:1], *(n for n in inner if n not in outer)] if outer else []
                parts = list(self.parts.of[index])
                for current in axes:
                    while parts and left[current] % sizes[parts[0]] == 0:
                        left[current] //= sizes[parts[0]]
                        layout[current] += (parts.pop(0),)
                    if left[current] > 1:
                        break
                if axis is not None or len(parts) < len(self.parts.of[index]):
                    break
        return tuple(layout)

    def _value(self, index: int, kind: ValueKind, choice: Choice, groups: Sequence[int]) -> int:
        key = (index, groups[kind.group] if kind.group >= 0 else choice.split)
        value = self._layouts.get(key)
        if value is not None:
            return value
        if kind.group >= 0:
            full = self._known[groups[kind.group]]
            layout = tuple(
                full[index] if index >= 0 and size > 1 else ()
                for index, size in zip(kind.places, kind.shape, strict=True)
            )
        else:
            layout = self._spread_to(kind, choice.split)
        value = self._layouts[key] = self._number(layout)
        return value
