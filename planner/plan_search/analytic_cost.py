"""The cost of a choice, computed in a millisecond: a sum over kinds of operations and values.

A choice lists for each mesh axis the dimensions that it splits, in order: a value is split along
the first of them that it has and that the axis divides. Where an axis divides a parameter but not
a smaller value computed from it, as many prime factors of the axis as divide the value split it.
Besides, a parameter may be stored split along a mesh axis that splits none of its dimensions
(FSDP): it is gathered where it is used, and its gradient is scattered.

Where operands and results of an operation have different shardings, the operation is split along
the cheapest dimension, and its collectives are counted: gathers of operands, sums of results,
exchanges. Virtual devices allocate large temporaries anew in each step, which takes time, too.
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
from .op_costs import LinkRates, OpCost, OpCosts, SubAxes, factor_axes

TINY = 1 << 18
"""Parameters of fewer bytes are stored split only along dimensions that are computed split."""


def is_tiny(group: LeafGroup) -> bool:
    """Whether parameters are so small (biases, scales) that sharding them saves nothing."""
    sizes = zip(group.shape, group.dimensions, strict=True)
    return math.prod(size for size, dimension in sizes if dimension >= 0) * group.itemsize < TINY


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which dimensions each mesh axis splits.

    Attributes:
        split: for each mesh axis the dimensions that it splits, in order of precedence.
        stored: for each mesh axis the groups of parameters that are stored split along it.
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
        collectives: seconds of collectives, by the indices of the mesh axes.
    """

    seconds: float
    memory: float
    busy: float
    collectives: Mapping[tuple[int, ...], float]


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
        forced: shardings of groups that the user fixed.
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
        self.sub_axes = SubAxes(mesh)
        self.rates = LinkRates(mesh)
        self.chip = topology_of(mesh).chip
        self._op_costs = OpCosts(program.values, self.sub_axes, self.rates, self.chip)
        self._costs: list[dict[tuple[int, ...], OpCost]] = [{} for _ in program.ops]
        self._layouts: dict[tuple[int, object], int] = {}
        self._layout_ids: dict[ArraySharding, int] = {}
        self._interned: list[ArraySharding] = []
        self._shares: list[int] = []
        self._bytes = [kind.bytes for kind in program.values]
        self._factor_axes = [factor_axes(op) for op in program.ops]
        self._arrays = [(*op.operands, *op.results) for op in program.ops]
        self._none = self._intern(())
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
        collectives, collective_seconds = dict[tuple[int, ...], float](), [0.0, 0.0]
        gathers: dict[tuple[int, tuple[int, ...], float], _Gather] = {}
        largest = 0.0

        def add_collective(op: OpKind, axes: tuple[int, ...], seconds: float) -> None:
            collectives[axes] = collectives.get(axes, 0.0) + seconds
            collective_seconds[op.looped] += seconds

        for index, op in enumerate(program.ops):
            layout_ids = tuple([layouts[array] for array in self._arrays[index]])
            cost = self._costs[index].get(layout_ids)
            if cost is None:
                op_layouts = [self._interned[layout_id] for layout_id in layout_ids]
                cost = self._op_costs.of(op, op_layouts, self._factor_axes[index])
                self._costs[index][layout_ids] = cost
            times = program.times[index]
            busy[op.looped] += cost.busy * times
            for array, axes, seconds, nbytes in cost.moves:
                largest = max(largest, nbytes)
                if array < len(op.operands) and program.values[op.operands[array]].group < 0:
                    gather = (op.operands[array], axes, nbytes)
                    earlier = gathers.get(gather)
                    before = 0 if earlier is None else earlier.times
                    gathers[gather] = _Gather(op, seconds, before + times)
                else:
                    add_collective(op, axes, seconds * times)
        # A value that several operations need gathered alike is gathered once.
        for (kind, axes, _), use in gathers.items():
            add_collective(use.op, axes, use.seconds * min(use.times, program.counts[kind]))
        alive = (sum(each[n] * count for n, count in moment.items()) for moment in program.moments)
        temporaries = max(alive, default=0.0) + largest
        busy[0] += new_memory_seconds(temporaries, self.chip)
        looped = max if overlaps(self.chip) else sum
        total = busy[0] + collective_seconds[0] + looped((busy[1], collective_seconds[1]))
        resting = sum(
            size / shares[group] for size, group in zip(program.resting, groups, strict=True)
        )
        memory = program.rest + resting + temporaries
        return ChoiceCost(total, memory, sum(busy), collectives)

    def least_seconds(self) -> float:
        """A lower bound of all choices: every device computes all the time."""
        total = 0.0
        for op, times in zip(self.program.ops, self.program.times, strict=True):
            total += times * op.flops / self._op_costs.peak(op.dtype)
        return total / math.prod(self.sizes)

    def group_layout(self, index: int, choice: Choice) -> ArraySharding:
        """The sharding of a group of parameters, or of an array of the batch, between steps."""
        layout = self.sub_axes.joined(self._interned[self._group(index, choice)])
        assert layout is not None
        return layout

    def output_layout(self, module: str, choice: Choice) -> ArraySharding | None:
        """The sharding of a module's output; None: a sub-axis splits it: no spec has that."""
        index = self.program.modules[module]
        groups = [self._group(n, choice) for n in range(len(self.program.dimensions.groups))]
        layout_id = self._value(index, self.program.values[index], choice, groups)
        return self.sub_axes.joined(self._interned[layout_id])

    def _intern(self, layout: ArraySharding) -> int:
        layout_id = self._layout_ids.get(layout)
        if layout_id is None:
            layout_id = self._layout_ids[layout] = len(self._interned)
            self._interned.append(layout)
            sizes = self.sub_axes.sizes
            self._shares.append(math.prod(sizes[axis] for split in layout for axis in split))
        return layout_id

    def _group(self, index: int, choice: Choice) -> int:
        if index in self.forced:
            return self._intern(self.sub_axes.split(self.forced[index]))
        stored = tuple([index in groups for groups in choice.stored])
        key = (-1 - index, (choice.split, stored))
        layout_id = self._layouts.get(key)
        if layout_id is not None:
            return layout_id
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
        layout_id = self._layouts[key] = self._intern(self.sub_axes.split(tuple(layout)))
        return layout_id

    def _computed(self, split: tuple[int, ...]) -> tuple[int, ...]:
        """The dimensions along which values with a batch dimension are split, too."""
        first = next((n for n, axis in enumerate(split) if axis in self._batch), len(split))
        return split[: first + 1]

    def _store(self, group: LeafGroup, layout: list[tuple[int, ...]], rest: Sequence[int]) -> None:
        """Split a group along more mesh axes: one of its axes by all of them, if they divide it."""
        axis = self._largest(group, layout, math.prod(self.sizes[mesh_axis] for mesh_axis in rest))
        if axis is not None:
            layout[axis] = (*layout[axis], *rest)
            return
        for mesh_axis in rest:
            index = self._largest(group, layout, self.sizes[mesh_axis])
            if index is not None:
                layout[index] = (*layout[index], mesh_axis)

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
        """The mesh axes that split each axis of a group."""
        layout: list[tuple[int, ...]] = [()] * len(shape)
        left = list(shape)
        for index, target in enumerate(split):
            for dimension in target:
                axis = self._divisible_axis(dimension, index, dimensions, order, left)
                if axis is not None:
                    layout[axis] += (index,)
                    left[axis] //= self.sizes[index]
                    break
        return layout

    def _divisible_axis(
        self,
        dimension: int,
        index: int,
        dimensions: Sequence[int],
        order: Sequence[int],
        left: Sequence[int],
    ) -> int | None:
        """The first axis of a dimension that a mesh axis divides."""
        size = self.sizes[index]
        return next((n for n in order if dimensions[n] == dimension and left[n] % size == 0), None)

    def _spread_to(self, kind: ValueKind, split: Sequence[Sequence[int]]) -> ArraySharding:
        """The sub-axes that split each axis of a value."""
        layout: list[tuple[int, ...]] = [()] * len(kind.shape)
        left = list(kind.shape)
        sizes = self.sub_axes.sizes
        for index, target in enumerate(split):
            for dimension in target:
                axis = self._divisible_axis(dimension, index, kind.dimensions, kind.order, left)
                axes = [] if axis is None else [axis]
                if axis is None and (dimension, index) in self._spread:
                    outer = [n for n in kind.order if kind.dimensions[n] == dimension]
                    inner = [
                        n
                        for n, outer_dimensions in enumerate(kind.inside)
                        if dimension in outer_dimensions
                    ]
                    axes = [*outer[:1], *(n for n in inner if n not in outer)] if outer else []
                sub_axes = list(self.sub_axes.of[index])
                for current in axes:
                    while sub_axes and left[current] % sizes[sub_axes[0]] == 0:
                        left[current] //= sizes[sub_axes[0]]
                        layout[current] += (sub_axes.pop(0),)
                    if left[current] > 1:
                        break
                if axis is not None or len(sub_axes) < len(self.sub_axes.of[index]):
                    break
        return tuple(layout)

    def _value(self, index: int, kind: ValueKind, choice: Choice, groups: Sequence[int]) -> int:
        key = (index, groups[kind.group] if kind.group >= 0 else choice.split)
        layout_id = self._layouts.get(key)
        if layout_id is not None:
            return layout_id
        if kind.group >= 0:
            full = self._interned[groups[kind.group]]
            layout = tuple(
                full[index] if index >= 0 and size > 1 else ()
                for index, size in zip(kind.group_axes, kind.shape, strict=True)
            )
        else:
            layout = self._spread_to(kind, choice.split)
        layout_id = self._layouts[key] = self._intern(layout)
        return layout_id
