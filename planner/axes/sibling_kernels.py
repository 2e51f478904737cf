"""What XLA's compiler for GPUs makes together: results of one size that read the same array.

Two kernels that make element by element of the same large array, of which neither needs the other,
become one that has both results. It runs when the operands of both are there, so both results exist
at once, beside all operands: in an attention layer's backward pass the probabilities and the
gradient of the scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from .fused_kernels import FusedKernel
from .local_program import LocalProgram

_LARGE = 1 << 20
"""Bytes of an array that is worth reading once only."""

_FAR = 500
"""Kernels so far apart are not looked at: one follows from the other nearly always."""


def siblings_joined(program: LocalProgram, kernels: Sequence[FusedKernel]) -> list[FusedKernel]:
    """Kernels of one scope, with siblings as one.

    Args:
        program: that they are of.
        kernels: in an order in which they can run.

    Returns:
        In an order in which they can run.
    """
    readers: dict[int, list[int]] = {}
    for kernel in kernels:
        if len(kernel.writes) == 1 and kernel.by_element:
            for one in kernel.reads:
                if program.bytes[one] >= _LARGE:
                    readers.setdefault(one, []).append(kernel.writes[0])
    order = _KernelList(program, kernels)
    for source, made in readers.items():
        size = math.prod(program.shapes[source])
        alike = [one for one in made if math.prod(program.shapes[one]) == size]
        for first, second in reversed(list(itertools.pairwise(alike))):
            order.join(first, second)
    return [one for one in order.kernels if one is not None]


class _KernelList:
    """Kernels in their order; one that was joined with a later one leaves an empty place."""

    def __init__(self, program: LocalProgram, kernels: Sequence[FusedKernel]) -> None:
        self.program = program
        self.kernels: list[FusedKernel | None] = list(kernels)
        self.place = {one: at for at, kernel in enumerate(kernels) for one in kernel.writes}

    def join(self, first: int, second: int) -> None:
        """Join the kernels of two values, as soon as the operands of both are there.

        They stay apart if one needs the other.
        """
        start, end = sorted((self.place[first], self.place[second]))
        early, late = self.kernels[start], self.kernels[end]
        if early is late or early is None or late is None or end - start > _FAR:
            return
        between = [one for one in self.kernels[start + 1 : end] if one is not None]
        needed = set(late.reads)
        behind: list[FusedKernel] = []
        made, ready = set(early.writes), 0
        for count, one in enumerate(between, 1):
            if not made.isdisjoint(one.reads):
                behind.append(one)
                made.update(one.writes)
            elif not needed.isdisjoint(one.writes):
                ready = count
        if not made.isdisjoint(needed):
            return
        waiting = {id(one) for one in behind}
        until = between[:ready]
        found: list[FusedKernel | None] = [one for one in until if id(one) not in waiting]
        found.append(_as_one(self.program, early, late))
        found += [one for one in until if id(one) in waiting]
        found += between[ready:]
        found += [None] * (end + 1 - start - len(found))
        self.kernels[start : end + 1] = found
        for at, one in enumerate(found, start):
            if one is not None:
                self.place.update(dict.fromkeys(one.writes, at))


def _as_one(program: LocalProgram, early: FusedKernel, late: FusedKernel) -> FusedKernel:
    several = tuple([each for one in (early, late) for each in one.together or (one,)])
    reads = tuple(dict.fromkeys([one for each in several for one in each.reads]))
    writes = tuple([one for each in several for one in each.writes])
    flops = sum([each.flops for each in several])
    read = min(sum([program.bytes[one] for one in reads]), early.read + late.read)
    return FusedKernel(late.op, reads, writes, flops, read, together=several)
