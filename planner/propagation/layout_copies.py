"""Memory layouts (orders of axes) of operands, and the copies that they take on hosts and GPUs.

The host's kernels read the left operand with what is summed last, and images with their features
last (`CpuLayoutAssignment`); other operands are copied first. TPUs read operands in any layout.

GPUs (`GpuLayoutAssignment`): products read operands with what is summed last, and write their
result in the order of its axes. Those with batch axes read an operand in place if batch, free and
summed axes are each contiguous in their order, the batch outermost; else the left one with what is
summed last, the right one with what is free last. A transposition is no copy: it views the same
bytes, so what is computed element by element of it has its layout, too. Where two operands have
different layouts, the later one is copied, and what is computed of it reads the copy. What a loop
reads row by row is copied before all others; the full stack is, before the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from isoshard.core.kit import is_elementwise, is_product

from .flat_program import CONSTANT
from .local_program import LocalOp, LocalProgram, LocalScope, as_read

REORDER = "reorder"
"""Name of the operation that copies an operand into another order."""


def reorder(program: LocalProgram) -> None:
    """Copy operands and results of products into the order that the host's kernels read.

    Args:
        program: of one device; it is changed.
    """
    _reorder(program, program.scope)


def _reorder(program: LocalProgram, scope: LocalScope) -> None:
    ops: list[LocalOp] = []
    for op in scope.ops:
        for body in op.bodies:
            _reorder(program, body)
        lhs, rhs, out = _unordered(program, op)
        operands = list(op.operands)
        for index, target in enumerate((lhs, rhs)):
            if target and operands[index] != CONSTANT:
                operands[index] = _copy(program, ops, op, operands[index])
        new = dataclasses.replace(op, operands=tuple(operands)) if lhs or rhs or out else op
        ops.append(new)
        if out:
            (result,) = op.results
            new.results = (program.copy(result),)
            program.makers[new.results[0]] = new
            ops.append(LocalOp(REORDER, op.equation, new.results, (result,)))
            program.makers[result] = ops[-1]
        elif new is not op:
            for value in op.results:
                program.makers[value] = new
    scope.ops = ops


def _copy(program: LocalProgram, ops: list[LocalOp], op: LocalOp, value: int) -> int:
    new = program.copy(value)
    ops.append(LocalOp(REORDER, op.equation, (value,), (new,)))
    program.makers[new] = ops[-1]
    return new


def _unordered(program: LocalProgram, op: LocalOp) -> tuple[bool, bool, bool]:
    """Whether the left operand, the right one and the result are stored in another order."""
    if op.name == "dot_general":
        ((left, _), (batch, _)) = op.equation.params["dimension_numbers"]
        rank = len(program.shapes[op.operands[0]]) if op.operands[0] != CONSTANT else 0
        last = tuple(range(rank - len(left), rank))
        in_order = tuple(sorted(left)) == last and tuple(batch) == tuple(range(len(batch)))
        return not in_order, False, False
    if op.name == "conv_general_dilated":
        dims = op.equation.params["dimension_numbers"]
        rank = len(dims.lhs_spec)
        inner = tuple(range(1, rank - 1))
        return (
            dims.lhs_spec != (0, rank - 1, *inner),
            dims.rhs_spec != (rank - 1, rank - 2, *range(rank - 2)),
            dims.out_spec != (0, rank - 1, *inner),
        )
    return False, False, False


Order = tuple[int, ...]
"""Axes of an array that have more than one element, the outermost in memory first."""

_KEPT = frozenset(
    "name optimization_barrier copy sharding_constraint reshard stop_gradient device_put "
    "layout_constraint result slice pad rev dynamic_update_slice concatenate".split()
)
_ANY = frozenset("broadcast_in_dim iota".split())


def copy_gpu_operands(program: LocalProgram) -> None:
    """Copy values into the orders in which they are read.

    Args:
        program: of one device; it is changed.
    """
    _Orders(program).scope(program.scope, None)


class _Orders:
    def __init__(self, program: LocalProgram) -> None:
        self.program = program
        self.orders: dict[int, Order | None] = {}
        """Value -> its order, where that is not the order of its axes; None: any."""
        self.copies: dict[tuple[int, Order], int] = {}
        self.rows: set[int] = set()
        """Values in the order of the rows of a loop's stacks."""
        self.latest: dict[int, int] = {}
        """Value -> its last copy for an elementwise operation, which later ones read too."""

    def scope(self, scope: LocalScope, above: Callable[[int, Order], int] | None) -> None:
        ops: list[LocalOp] = []
        rows: dict[int, LocalOp] = {}
        for inner, outer in scope.outside.items():
            if outer in self.orders:
                self.orders[inner] = self.orders[outer]

        def copied(value: int, order: Order, reader: LocalOp) -> int:
            """A value in an order, by a copy if need be."""
            row = rows.get(value)
            if row is not None and above is not None:
                outer = above(row.operands[0], (0, *(axis + 1 for axis in order)))
                row.operands = (outer,)
                scope.outside[outer] = outer
                self.orders[value] = order
                return value
            copy = self.copies.get((value, order))
            if copy is None:
                copy = self.program.copy(value)
                self.copies[value, order] = copy
                if is_elementwise(reader.name):
                    self.latest[value] = copy
                self.orders[copy] = order
                ops.append(LocalOp(REORDER, reader.equation, (value,), (copy,)))
                self.program.makers[copy] = ops[-1]
            return copy

        for op in scope.ops:
            for body in op.bodies:
                loop = body.kind in ("scan", "while")
                self.scope(
                    body, (lambda value, order, op=op: copied(value, order, op)) if loop else None
                )
            if op.bodies:
                ops.append(as_read(op))
                continue
            if op.name == "row":
                rows[op.results[0]] = op
            if is_elementwise(op.name):
                # What was copied is read from its copy.
                now = tuple([self.latest.get(operand, operand) for operand in op.operands])
                op = op if now == op.operands else dataclasses.replace(op, operands=now)
            target = self._read_orders(op)
            operands = tuple(
                [
                    operand if order is None or self._order(operand) in (order, None) else
                    copied(operand, order, op)
                    for operand, order in zip(op.operands, target, strict=True)
                ]
            )  # fmt: skip
            new = op if operands == op.operands else dataclasses.replace(op, operands=operands)
            ops.append(new)
            if new is not op:
                for result in op.results:
                    self.program.makers[result] = new
            self._note(new)
        scope.ops = ops

    def _order(self, value: int) -> Order | None:
        """The order in which a value is stored; None if it may be any."""
        if value == CONSTANT:
            return None
        return self.orders.get(value, self._default(value))

    def _default(self, value: int) -> Order:
        return tuple([axis for axis, size in enumerate(self.program.shapes[value]) if size != 1])

    def _read_orders(self, op: LocalOp) -> tuple[Order | None, ...]:
        """The order in which an operation reads each operand; None: as it is stored."""
        if op.name == "dot_general":
            summed, batch = op.equation.params["dimension_numbers"]
            return tuple(
                [
                    self._readable(*operand_axes, right=bool(index))
                    for index, operand_axes in enumerate(
                        zip(op.operands, summed, batch, strict=True)
                    )
                ]
            )
        if is_elementwise(op.name):
            shape = self.program.shapes[op.results[0]]
            is_full_size = [
                operand != CONSTANT and self.program.shapes[operand] == shape
                for operand in op.operands
            ]
            order = self._order_of_first(
                [
                    operand
                    for operand, is_full in zip(op.operands, is_full_size, strict=True)
                    if is_full
                ]
            )
            return tuple([order if is_full else None for is_full in is_full_size])
        if op.name == "reshape" and not self._same_sizes(op):
            return tuple(
                [self._default(operand) if operand != CONSTANT else None for operand in op.operands]
            )
        return (None,) * len(op.operands)

    def _readable(
        self, value: int, summed: tuple[int, ...], batch: tuple[int, ...], *, right: bool
    ) -> Order | None:
        """The order in which a product reads an operand; None: as it is stored."""
        order = self._order(value)
        if order is None:
            return None
        first = tuple([axis for axis in batch if axis in order])
        last = tuple([axis for axis in summed if axis in order])
        free = tuple([axis for axis in sorted(order) if axis not in batch and axis not in summed])
        if not batch:
            return None if order == (*free, *last) else (*free, *sorted(last))
        either = (*first, *free, *last), (*first, *last, *free)
        return None if order in either else either[right]

    def _order_of_first(self, values: Sequence[int]) -> Order | None:
        """The order of the value that is computed first: the others are copied into it.

        What a loop reads row by row comes last: its full stack is copied.
        """
        candidates = [
            (value in self.rows, value) for value in values if self._order(value) is not None
        ]
        return self._order(min(candidates)[1]) if candidates else None

    def _same_sizes(self, op: LocalOp) -> bool:
        """Whether a reshape only adds or drops axes of size 1."""
        (before,), (after,) = op.operands, op.results
        shapes = self.program.shapes
        sizes = [[size for size in shapes[value] if size != 1] for value in (before, after)]
        return before != CONSTANT and sizes[0] == sizes[1]

    def _note(self, op: LocalOp) -> None:
        """Note the order of an operation's results."""
        if not op.results or not op.operands:
            return
        result, first = op.results[0], op.operands[0]
        ordered = [operand for operand in op.operands if self._order(operand) is not None]
        if op.name == "row" or (
            ordered and not is_product(op.name) and self.rows.issuperset(ordered)
        ):
            self.rows.add(result)
        if op.name in _ANY or op.name.startswith("reduce_"):
            self.orders[result] = None
        elif is_elementwise(op.name):
            shape = self.program.shapes[result]
            full = [operand for operand in op.operands if operand != CONSTANT
                    and self.program.shapes[operand] == shape]  # fmt: skip
            self.orders[result] = self._order_of_first(full)
        elif first == CONSTANT or first not in self.orders or op.axes:
            if op.name == "transpose" and first != CONSTANT:
                self.orders[result] = self._transposed(op)
        elif op.name == "transpose":
            self.orders[result] = self._transposed(op)
        elif op.name in _KEPT and self._default(first) == self._default(result):
            self.orders[result] = self.orders[first]
        elif op.name in ("squeeze", "expand_dims", "reshape") and self._same_sizes(op):
            order = self.orders[first]
            positions = dict(zip(self._default(first), self._default(result), strict=True))
            self.orders[result] = None if order is None else tuple([positions[n] for n in order])
        elif op.name == "row":
            order = self.orders[first]
            self.orders[result] = order and tuple([axis - 1 for axis in order if axis])
        elif op.name == "stack":
            order = self.orders[first]
            self.orders[result] = order and (0, *[axis + 1 for axis in order])

    def _transposed(self, op: LocalOp) -> Order | None:
        order = self._order(op.operands[0])
        axes = op.equation.params["permutation"]
        return None if order is None else tuple([axes.index(axis) for axis in order])
