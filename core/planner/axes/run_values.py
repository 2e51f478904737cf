"""Which values of a loop's body follow from what its run computes.

A collective of what a loop is given (weights) can start a run earlier; one of what the run itself
computes, or the run before it (activations), waits for that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from .common_expressions import CONSTANT
from .fused_kernels import FusedKernel
from .fusion import Fusion
from .local_program import LocalScope


def computed_in_run(
    fusion: Fusion,
    body: LocalScope,
    kernels: Iterable[FusedKernel],
    before: Collection[int] = (),
) -> set[int]:
    """Values with memory that follow from flops of one run of a loop, or from what it carries.

    Args:
        fusion: of the program.
        body: of the loop, or of a branch inside of one.
        kernels: of the body, in an order in which they can run.
        before: of a branch, the values outside of it that are so.
    """
    found = set(before)
    shapes = fusion.program.shapes
    for end, start in body.carried:
        # Numbers that count runs are known ahead.
        if CONSTANT not in (end, start) and shapes[start]:
            carried = fusion.memory(start)
            if fusion.memory(end) != carried:
                found.add(carried)
    for kernel in kernels:
        if kernel.flops or kernel.inside or not found.isdisjoint(kernel.reads):
            found.update(kernel.writes)
    return found
