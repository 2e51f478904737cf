"""Which collectives of a loop wait for what a run of it computes.

One that sends what the loop is given (the weights of a layer) can start a run earlier, beside the
computing of that. One whose operand follows from a product of its own run, or from what the run
before gave, cannot: activations, and the gradients of weights.
"""

from __future__ import annotations

from collections.abc import Collection

from isoshard.core.runtime.flops import is_product

from .common_expressions import CONSTANT
from .local_program import LocalProgram, LocalScope

WITHIN = ("branch", "manual")
"""Kinds of bodies that are part of the run around them."""


def waiting(
    program: LocalProgram, scope: LocalScope, before: Collection[int] = ()
) -> frozenset[int]:
    """The ids of a loop's collectives that wait, but for those of loops inside it.

    Args:
        program: of one device.
        scope: the body of the loop, or a branch in it.
        before: of a branch, the values outside of it that follow from what the run computes.
    """
    fresh = {inner for inner, outer in scope.outside.items() if outer in before}
    for end, start in scope.carried:
        # What is handed on unchanged and the numbers that count runs are known ahead.
        if CONSTANT not in (end, start) and end != start and program.shapes[start]:
            fresh.add(start)
    found = set[int]()
    for op in scope.ops:
        follows = not fresh.isdisjoint(op.operands)
        if follows and op.axes:
            found.add(id(op))
        for body in op.bodies:
            if body.kind in WITHIN:
                found |= waiting(program, body, fresh)
        if follows or op.bodies or is_product(op.name):
            fresh.update(op.results)
    return frozenset(found)
