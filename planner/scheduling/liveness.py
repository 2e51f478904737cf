"""Liveness: the bytes alive while kernels run in an order.

A value is alive from the kernel that writes it to the last that reads it. An elementwise kernel
overwrites an operand of the same size whose last reader it is. A loop needs the bytes of its body
in addition to its carry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from .kernels import Inner, Kernel

_NONE: Inner = MappingProxyType({})


@dataclasses.dataclass
class Liveness:
    """Bytes alive in addition to values that have memory of their own.

    Attributes:
        order: of the kernels.
        at: bytes alive while each of them runs, with those of its bodies.
        peak: the most of them.
        index: of the kernel at the peak.
        inside: of that kernel, if it has bodies: the body that needs most.
        spans: the positions of the first and the last use of each value.
    """

    order: list[Kernel]
    at: list[int]
    peak: int
    index: int
    spans: Mapping[int, tuple[int, int]]
    inside: Liveness | None = None

    def alive(self, index: int | None = None) -> tuple[int, ...]:
        """The values alive while a kernel runs.

        Args:
            index: of the kernel; None: the one at the peak.
        """
        at = self.index if index is None else index
        return tuple([value for value, (start, end) in self.spans.items() if start <= at <= end])


def live_bytes(
    order: Sequence[Kernel],
    bytes_: Sequence[int],
    *,
    fixed: Collection[int] = (),
    ends: Collection[int] = (),
    ahead: Collection[int] = (),
    inner: Inner = _NONE,
    extra: Inner = _NONE,
) -> Liveness:
    """Compute the liveness of kernels that run one after the other.

    Args:
        order: of the kernels.
        bytes_: of each value.
        fixed: values that have memory of their own all the time; they are not counted.
        ends: values that are alive at the end.
        ahead: values that are alive from the start.
        inner: bytes that the bodies of kernels need.
        extra: by the position of a kernel, additional bytes that are alive there.
    """
    last = {value: index for index, kernel in enumerate(order) for value in kernel.reads}
    last.update(dict.fromkeys(ends, len(order)))
    spans = {value: (-1, last.get(value, len(order))) for value in ahead}
    current, peak, where = sum([bytes_[value] for value in ahead]), -1, 0
    at: list[int] = []
    alive = set(ahead)
    for index, kernel in enumerate(order):
        ending = [value for value in kernel.reads if last[value] == index and value in alive]
        new = [value for value in kernel.writes if value not in fixed and value not in alive]
        reused = 0
        if kernel.in_place and ending:
            sizes = [bytes_[value] for value in ending]
            for value in new:
                if bytes_[value] in sizes and _is_renewed(kernel, value):
                    sizes.remove(bytes_[value])
                    reused += bytes_[value]
        current += sum([bytes_[value] for value in new])
        live = current - reused + inner.get(id(kernel), 0) + extra.get(index, 0)
        at.append(live)
        if live > peak:
            peak, where = live, index
        alive.update(new)
        for value in new:
            spans[value] = index, max(index, last.get(value, index))
            if value not in last:
                ending.append(value)
        for value in ending:
            current -= bytes_[value]
            alive.discard(value)
    return Liveness(list(order), at, max(0, peak), where, spans)


def _is_renewed(kernel: Kernel, value: int) -> bool:
    return kernel.renewed is None or value in kernel.renewed
