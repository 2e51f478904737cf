"""Copies that XLA's host backend makes of operands before it multiplies them.

Its kernels want what is summed at the end of the left operand, and images with their features last.
Other operands are copied into that order, and the copies are alive while the kernel runs. TPU and
GPU read operands in any order.
"""

from __future__ import annotations

from .flat_program import CONSTANT
from .local_program import LocalOp, LocalProgram


def copied(program: LocalProgram, op: LocalOp) -> int:
    """Bytes of the copies that one operation needs.

    Args:
        program: that it is of.
        op: any operation.
    """
    if op.name == "dot_general":
        ((left, _), (batch, _)) = op.equation.params["dimension_numbers"]
        rank = len(program.shapes[op.operands[0]]) if op.operands[0] != CONSTANT else 0
        last = tuple(range(rank - len(left), rank))
        in_order = tuple(sorted(left)) == last and tuple(batch) == tuple(range(len(batch)))
        return 0 if in_order else _bytes(program, op.operands[0])
    if op.name == "conv_general_dilated":
        numbers = op.equation.params["dimension_numbers"]
        rank = len(numbers.lhs_spec)
        inner = tuple(range(1, rank - 1))
        total = 0
        if numbers.lhs_spec != (0, rank - 1, *inner):
            total += _bytes(program, op.operands[0])
        if numbers.rhs_spec != (rank - 1, rank - 2, *range(rank - 2)):
            total += _bytes(program, op.operands[1])
        if numbers.out_spec != (0, rank - 1, *inner):
            total += _bytes(program, op.results[0])
        return total
    return 0


def _bytes(program: LocalProgram, value: int) -> int:
    return 0 if value == CONSTANT else program.bytes[value]
