"""Sibling multi-output fusion of XLA's compiler for GPUs.

Two elementwise kernels of the same large array, of which neither depends on the other, are fused
into one with both results. It runs when the operands of both are ready, so both results are alive
at once, in addition to all operands: in an attention layer's backward pass the probabilities and
the gradient of the scores.

Source: `MultiOutputFusion` of XLA's backends/gpu/transforms/multi_output_fusion.cc.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .kernels import Kernel, together

_LARGE = 1 << 20
"""Bytes of an array whose second read is worth saving."""

_FAR = 500
"""Kernels further apart are not compared: nearly always one depends on the other."""


def siblings_fused(
    kernels: Sequence[Kernel], bytes_: Sequence[int], sizes: Sequence[int]
) -> list[Kernel]:
    """Kernels of one scope, with siblings fused, in an order in which they can run."""
    readers: dict[int, list[int]] = {}
    for kernel in kernels:
        if len(kernel.writes) == 1 and kernel.by_element:
            for value in kernel.reads:
                if bytes_[value] >= _LARGE:
                    readers.setdefault(value, []).append(kernel.writes[0])
    slots = _Slots(kernels, bytes_)
    for source, results in readers.items():
        same_size = [value for value in results if sizes[value] == sizes[source]]
        for first, second in reversed(list(itertools.pairwise(same_size))):
            slots.fuse(first, second)
    return [kernel for kernel in slots.kernels if kernel is not None]


class _Slots:
    """Kernels in their order; a kernel that was fused with a later one leaves an empty slot."""

    def __init__(self, kernels: Sequence[Kernel], bytes_: Sequence[int]) -> None:
        self.bytes = bytes_
        self.kernels: list[Kernel | None] = list(kernels)
        self.index = {value: n for n, kernel in enumerate(kernels) for value in kernel.writes}

    def fuse(self, first: int, second: int) -> None:
        """Fuse the kernels of two values, unless one depends on the other."""
        start, end = sorted((self.index[first], self.index[second]))
        early, late = self.kernels[start], self.kernels[end]
        if early is late or early is None or late is None or end - start > _FAR:
            return
        between = [kernel for kernel in self.kernels[start + 1 : end] if kernel is not None]
        needed = set(late.reads)
        followers: list[Kernel] = []
        written, ready = set(early.writes), 0
        for count, kernel in enumerate(between, 1):
            if not written.isdisjoint(kernel.reads):
                followers.append(kernel)
                written.update(kernel.writes)
            elif not needed.isdisjoint(kernel.writes):
                ready = count
        if not written.isdisjoint(needed):
            return
        waiting = set(map(id, followers))
        before = between[:ready]
        slots: list[Kernel | None] = [kernel for kernel in before if id(kernel) not in waiting]
        slots.append(self._fused(early, late))
        slots += [kernel for kernel in before if id(kernel) in waiting]
        slots += between[ready:]
        slots += [None] * (end + 1 - start - len(slots))
        self.kernels[start : end + 1] = slots
        for index, kernel in enumerate(slots, start):
            if kernel is not None:
                self.index.update(dict.fromkeys(kernel.writes, index))

    def _fused(self, early: Kernel, late: Kernel) -> Kernel:
        reads = {*early.reads, *late.reads}
        read = min(sum([self.bytes[value] for value in reads]), early.read + late.read)
        return together((early, late), read)
