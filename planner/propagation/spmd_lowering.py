"""SPMD lowering: the program of one device, with the collectives between its operations.

Each operation of a flat program is partitioned (`partitioning`); where an operand is not sharded as
its operation reads it, a collective comes before, and where partial results have to be added up,
one comes after. An operand is resharded once to each sharding in a scope, as the partitioner does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from isoshard.core.kit import flops_of, is_elementwise, is_product

from .factors import ArraySharding, Split
from .flat_program import CONSTANT, BodyScope, FlatOp, FlatProgram
from .local_program import LocalOp, LocalProgram, LocalScope, exchange_op
from .partitioning import (
    OpPartition,
    ReshardingStep,
    partition_op,
    resharding_steps,
    shard_bytes,
    shard_shape,
)
from .sharding_propagation import ArrayShardings
from .target_rules import TargetRules

_FOLLOWS = frozenset(
    "reshape transpose squeeze expand_dims broadcast_in_dim sharding_constraint reshard name copy "
    "optimization_barrier device_put iota random_bits random_wrap random_unwrap random_split "
    "bitcast_convert_type slice pad rev concatenate split select_and_gather_add result".split()
)
_WINDOWS = frozenset(
    "conv_general_dilated slice pad split concatenate reduce_window reduce_window_sum "
    "reduce_window_max reduce_window_min select_and_scatter select_and_scatter_add".split()
)
_MANUAL = {
    "psum": "all-reduce",
    "psum2": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ragged_all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""Collectives inside of a `shard_map`, by primitive."""


def spmd_lowered(
    flat: FlatProgram,
    layouts: ArrayShardings,
    sharding: Sequence[ArraySharding],
    target: Sequence[ArraySharding | None],
    rules: TargetRules,
) -> LocalProgram:
    """The program of one device.

    Args:
        flat: the program.
        layouts: of the mesh.
        sharding: the layout of each value.
        target: of the program's results; None leaves one as it is.
        rules: of the machine: how terms are added up.
    """
    return _Lowering(flat, layouts, sharding, rules).write(target)


class _Lowering:
    def __init__(
        self,
        flat: FlatProgram,
        layouts: ArrayShardings,
        sharding: Sequence[ArraySharding],
        rules: TargetRules,
    ) -> None:
        self.flat = flat
        self.sharding = sharding
        self.layouts = layouts
        self.mesh = layouts.sizes
        self.rules = rules
        self.local = LocalProgram()
        self.local_ids: dict[int, int] = {}
        self.partitions: dict[Any, OpPartition] = {}
        self.steps: dict[Any, tuple[tuple[ReshardingStep, ...], int]] = {}
        self.sums: dict[int, int] = {}

    def write(self, target: Sequence[ArraySharding | None]) -> LocalProgram:
        flat, local = self.flat, self.local
        local.inputs = tuple(self._local_id(value) for value in flat.inputs)
        self._scope(flat.scope, local.scope)
        results = []
        cache: dict[tuple[int, ArraySharding], int] = {}
        for value, layout in zip(flat.results, target, strict=True):
            if value == CONSTANT:
                results.append(CONSTANT)
            elif layout is None:
                results.append(self._local_id(value))
            else:
                results.append(self._resharded(value, layout, local.scope, cache, None))
        local.results = local.scope.results = tuple(results)
        return local

    def _local_id(self, value: int) -> int:
        if value == CONSTANT:
            return CONSTANT
        local_id = self.local_ids.get(value)
        if local_id is None:
            flat = self.flat
            shape = shard_shape(flat.shapes[value], self.sharding[value], self.mesh)
            local_id = self.local.value(shape, flat.itemsizes[value], flat.dtypes[value])
            self.local_ids[value] = local_id
        return local_id

    def _scope(self, flat: BodyScope, scope: LocalScope) -> None:
        cache: dict[tuple[int, ArraySharding], int] = {}
        for op in flat.ops:
            if op.name == "edge":
                if op.results[0] not in flat.arguments:
                    self._edge(op, scope, scope, cache, None)
            elif op.bodies:
                self._bodies(op, scope, cache)
            elif op.name in _MANUAL and op.operands[0] in self.flat.manual:
                self._manual(op, scope)
            else:
                self._op(op, scope, cache)

    def _add(self, scope: LocalScope, op: LocalOp) -> None:
        scope.ops.append(op)
        for result in op.results:
            if self.local.makers[result] is None:
                self.local.makers[result] = op

    def _op(
        self, op: FlatOp, scope: LocalScope, cache: dict[tuple[int, ArraySharding], int]
    ) -> None:
        partition = self._partition(op)
        operands = [
            self._resharded(value, layout, scope, cache, op.equation)
            for value, layout in zip(op.operands, partition.operands, strict=True)
        ]
        for operand, axis, split in partition.neighbours:
            if op.operands[operand] != CONSTANT:
                self._neighbours(op, operand, axis, split, operands, scope)
        flops = self._flops(op) / partition.shares
        results = [self._local_id(value) for value in op.results]
        new = []
        pending: list[LocalOp] = []
        for value, result, layout in zip(op.results, results, partition.results, strict=True):
            new.append(self._unreduced_result(op, value, result, layout, partition.summed, pending))
        self._add(scope, LocalOp(op.name, op.equation, tuple(operands), tuple(new), flops))
        for collective in pending:
            self._add(scope, collective)

    def _flops(self, op: FlatOp) -> float:
        """Of all devices; a broadcast that an equation implies computes nothing."""
        equation = op.equation
        same = equation is not None and equation.primitive.name == op.name
        return flops_of(equation) if same else 0.0

    def _partition(self, op: FlatOp) -> OpPartition:
        flat = self.flat
        operands = tuple(
            [None if value == CONSTANT else self.sharding[value] for value in op.operands]
        )
        results = tuple([self.sharding[value] for value in op.results])
        sizes = tuple(
            [
                0 if value == CONSTANT else flat.itemsizes[value]
                for value in (*op.operands, *op.results)
            ]
        )
        key = (op.name, id(op.rule), operands, results, sizes)  # equal rules are one object
        partition = self.partitions.get(key)
        if partition is None:
            flops = self._flops(op) if is_product(op.name) else 0.0
            partition = self.partitions[key] = partition_op(
                op.rule,
                operands,
                results,
                [
                    0 if value == CONSTANT else flat.size(value) * flat.itemsizes[value]
                    for value in (*op.operands, *op.results)
                ],
                self.mesh,
                follows=op.name in _FOLLOWS or is_elementwise(op.name),
                windows=op.name in _WINDOWS,
                lookup=op.name == "gather",
                adds=op.name.startswith("scatter"),
                flops=flops,
            )
        return partition

    def _between(
        self, before: ArraySharding, after: ArraySharding, shape: tuple[int, ...], itemsize: int
    ) -> tuple[ReshardingStep, ...]:
        key = (before, after, shape, itemsize)
        between = self.steps.get(key)
        if between is None:
            between = self.steps[key] = resharding_steps(before, after, shape, itemsize, self.mesh)
        return between[0]

    def _resharded(
        self,
        value: int,
        layout: ArraySharding,
        scope: LocalScope,
        cache: dict[tuple[int, ArraySharding], int],
        equation: Any,
    ) -> int:
        """A value in a sharding, by collectives if need be."""
        if value == CONSTANT:
            return CONSTANT
        index = self._local_id(value)
        if self.sharding[value] == layout:
            return index
        key = (value, layout)
        if key in cache:
            return cache[key]
        flat, shape = self.flat, self.flat.shapes[value]
        for move in self._between(self.sharding[value], layout, shape, flat.itemsizes[value]):
            index = self._collective(move, index, equation, scope)
        end = shard_shape(shape, layout, self.mesh)
        if self.local.shapes[index] != end:
            last = self.local.value(end, flat.itemsizes[value], flat.dtypes[value])
            self._add(scope, LocalOp("slice", equation, (index,), (last,)))
            index = last
        cache[key] = index
        return index

    def _collective(
        self, move: ReshardingStep, index: int, equation: Any, scope: LocalScope
    ) -> int:
        local = self.local
        itemsize = max(1, local.bytes[index] // max(1, math.prod(local.shapes[index])))
        new = local.value((move.sent // itemsize,), itemsize, local.dtypes[index])
        self._add(scope, exchange_op(move, equation, index, new))
        return new

    def _unreduced_result(
        self,
        op: FlatOp,
        value: int,
        index: int,
        layout: ArraySharding,
        summed: Split,
        pending: list[LocalOp],
    ) -> int:
        """The result before its reductions and reshardings, which are added to `pending`."""
        target = self.sharding[value]
        if not summed and layout == target:
            return index
        flat = self.flat
        shape, itemsize, dtype = flat.shapes[value], flat.itemsizes[value], flat.dtypes[value]
        first = self.local.value(shard_shape(shape, layout, self.mesh), itemsize, dtype)
        steps: list[ReshardingStep] = []
        reduced = layout
        if summed:
            steps, reduced = self._reductions(layout, target, summed, shape, itemsize)
        moved, _ = resharding_steps(reduced, target, shape, itemsize, self.mesh)
        steps += moved
        last = first
        end = shard_bytes(shape, target, itemsize, self.mesh)
        for step in steps:
            current = index
            size = end if step.kind == "reduce-scatter" else step.sent
            if step != steps[-1] or size != end:
                current = self.local.value((size // max(1, itemsize),), itemsize, dtype)
            pending.append(exchange_op(step, op.equation, last, current))
            last = current
        if last != index:
            pending.append(LocalOp("slice", op.equation, (last,), (index,)))
        return first

    def _reductions(
        self,
        layout: ArraySharding,
        target: ArraySharding,
        summed: Split,
        shape: tuple[int, ...],
        itemsize: int,
    ) -> tuple[list[ReshardingStep], ArraySharding]:
        """The collectives that add up terms, and the sharding after them."""
        sent = shard_bytes(shape, layout, itemsize, self.mesh)
        scattered = [
            (axis, mesh_axis)
            for axis, split in enumerate(target)
            for mesh_axis in split
            if mesh_axis in summed and self.rules.scatters
        ]
        steps: list[ReshardingStep] = []
        now = [list(split) for split in layout]
        for axis, mesh_axis in scattered:
            now[axis].append(mesh_axis)
        if scattered:
            split = tuple(mesh_axis for _, mesh_axis in scattered)
            steps.append(ReshardingStep("reduce-scatter", split, sent))
        end = tuple(map(tuple, now))
        rest = tuple(
            mesh_axis
            for mesh_axis in summed
            if mesh_axis not in {mesh_axis for _, mesh_axis in scattered}
        )
        if rest:
            sent = shard_bytes(shape, end, itemsize, self.mesh)
            steps.append(ReshardingStep("all-reduce", rest, sent))
        return steps, end

    def _neighbours(
        self,
        op: FlatOp,
        operand: int,
        axis: int,
        split: Split,
        operands: list[int],
        scope: LocalScope,
    ) -> None:
        """Halo exchanges, from each side that an operation reads."""
        local, index = self.local, operands[operand]
        rows = local.shapes[index][axis] if axis < len(local.shapes[index]) else 1
        row = local.bytes[index] // max(1, rows)
        for reach in _reach(op, axis):
            if reach:
                sent = row * int(min(reach, max(1, rows)))
                new = local.value((sent,), 1, local.dtypes[index])
                self._add(
                    scope,
                    LocalOp("collective-permute", op.equation, (index,), (new,), 0.0, split, sent),
                )

    def _edge(
        self,
        op: FlatOp,
        body: LocalScope,
        scope: LocalScope,
        cache: dict[tuple[int, ArraySharding], int],
        equation: Any,
    ) -> None:
        """A value inside of a loop that is one outside, resharded before it if need be."""
        (value,), (same,) = op.operands, op.results
        if value != CONSTANT:
            before = self._resharded(value, self.sharding[same], scope, cache, equation)
            body.outside[self._local_id(same)] = before

    def _bodies(
        self, op: FlatOp, scope: LocalScope, cache: dict[tuple[int, ArraySharding], int]
    ) -> None:
        operands = [self._local_id(value) for value in op.operands]
        scopes = []
        if op.bodies[0].kind == "manual":
            specs = op.equation.params["in_specs"]
            for n, (value, spec) in enumerate(zip(op.operands, specs, strict=True)):
                if value != CONSTANT and isinstance(spec, PartitionSpec):
                    layout = self.layouts.of_spec(spec, len(self.flat.shapes[value]))
                    sharding = self.layouts.by_id[layout][0]
                    operands[n] = self._resharded(value, sharding, scope, cache, op.equation)
        for body in op.bodies:
            inner = LocalScope([], body.kind, body.times)
            for index, value in body.inputs:
                inner.outside[self._local_id(value)] = operands[index]
            for edge in body.ops:
                # An argument of a loop is resharded once, before it.
                if edge.name == "edge" and edge.operands[0] in op.operands:
                    self._edge(edge, inner, scope, cache, op.equation)
            self._scope(body, inner)
            inner.results = tuple(self._local_id(result) for result in body.results)
            inner.carried = tuple((self._local_id(a), self._local_id(b)) for a, b in body.carried)
            scopes.append(inner)
        results = tuple(self._local_id(result) for result in op.results)
        new = LocalOp(op.name, op.equation, tuple(operands), results, bodies=tuple(scopes))
        self._add(scope, new)
        for local_result in results:
            self.local.makers[local_result] = new

    def _manual(self, op: FlatOp, scope: LocalScope) -> None:
        """A collective of a `shard_map`."""
        params = op.equation.params
        names = params.get("axes", params.get("axis_name", ()))
        names = (names,) if isinstance(names, str) else tuple(names)
        axes = tuple(sub_axis for name in names for sub_axis in self.layouts.sub_axes(name))
        kind = _MANUAL[op.name]
        for value, new in zip(op.operands, op.results, strict=False):
            if value == CONSTANT:
                continue
            index, result = self._local_id(value), self._local_id(new)
            sent = self.local.bytes[index if kind == "reduce-scatter" else result]
            self._add(scope, LocalOp(kind, op.equation, (index,), (result,), 0.0, axes, sent))


def _reach(op: FlatOp, axis: int) -> tuple[float, float]:
    """The halo: how many rows before and after its own an operation reads along an axis."""
    params = op.equation.params
    if op.name in ("split", "concatenate"):
        return math.inf, 0  # each part is sharded over all devices again: all rows move
    if "dimension_numbers" in params:
        spatial = params["dimension_numbers"].lhs_spec[2:].index(axis)
        low, high = params["padding"][spatial]
        return max(0, low), max(0, high)
    if "padding" in params:
        low, high = params["padding"][axis]
        return max(0, low), max(0, high)
    if "padding_config" in params:
        low, high, _ = params["padding_config"][axis]
        return abs(low), abs(high) if not low else 0
    start = params.get("start_indices", (0,) * (axis + 1))[axis]
    return start, 0
