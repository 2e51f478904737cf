"""Which collectives of a loop wait for what a run of it computes.

One that sends what the loop is given (the weights of a layer) can start a run earlier, beside the
computing of that. One whose operand follows from a product of its own run, or from what the run
before gave, cannot: activations, and the gradients of weights.
"""

from __future__ import annotations

from .flat_program import CONSTANT
from .flops import is_product
from .local_program import LocalScope


def waiting(scope: LocalScope) -> frozenset[int]:
    """The ids of a loop's collectives that wait, but for those of loops inside it.

    Args:
        scope: the body of the loop.
    """
    fresh = {start for _, start in scope.carried} - {CONSTANT}
    found = set[int]()
    for op in scope.ops:
        follows = not fresh.isdisjoint(op.operands)
        if follows or op.bodies or is_product(op.name):
            fresh.update(op.results)
        if follows and op.axes:
            found.add(id(op))
    return frozenset(found)
