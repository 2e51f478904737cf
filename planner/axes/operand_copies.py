"""Copies that XLA's host backend makes of operands before it multiplies them.

Its kernels want what is summed at the end of the left operand, and images with their features last.
Other operands are copied into that order, which is an operation of its own. TPU and GPU read
operands in any order.
"""

from __future__ import annotations

import dataclasses

from .common_expressions import CONSTANT
from .local_program import LocalOp, LocalProgram, LocalScope

REORDER = "reorder"
"""Name of the operation that copies an operand into another order."""


def reorder(program: LocalProgram) -> None:
    """Copy operands and results of products into the order that the host's kernels want.

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
        for place, wanted in enumerate((lhs, rhs)):
            if wanted and operands[place] != CONSTANT:
                operands[place] = _copy(program, ops, op, operands[place])
        made = dataclasses.replace(op, operands=tuple(operands)) if lhs or rhs or out else op
        ops.append(made)
        if out:
            (result,) = op.results
            made.results = (program.copy(result),)
            program.makers[made.results[0]] = made
            ops.append(LocalOp(REORDER, op.equation, made.results, (result,)))
            program.makers[result] = ops[-1]
        elif made is not op:
            for one in op.results:
                program.makers[one] = made
    scope.ops = ops


def _copy(program: LocalProgram, ops: list[LocalOp], op: LocalOp, value: int) -> int:
    new = program.copy(value)
    ops.append(LocalOp(REORDER, op.equation, (value,), (new,)))
    program.makers[new] = ops[-1]
    return new


def _unordered(program: LocalProgram, op: LocalOp) -> tuple[bool, bool, bool]:
    """Whether the left operand, the right one and the result lie in another order."""
    if op.name == "dot_general":
        ((left, _), (batch, _)) = op.equation.params["dimension_numbers"]
        rank = len(program.shapes[op.operands[0]]) if op.operands[0] != CONSTANT else 0
        last = tuple(range(rank - len(left), rank))
        in_order = tuple(sorted(left)) == last and tuple(batch) == tuple(range(len(batch)))
        return not in_order, False, False
    if op.name == "conv_general_dilated":
        numbers = op.equation.params["dimension_numbers"]
        rank = len(numbers.lhs_spec)
        inner = tuple(range(1, rank - 1))
        return (
            numbers.lhs_spec != (0, rank - 1, *inner),
            numbers.rhs_spec != (rank - 1, rank - 2, *range(rank - 2)),
            numbers.out_spec != (0, rank - 1, *inner),
        )
    return False, False, False
