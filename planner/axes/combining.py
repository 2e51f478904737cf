"""All-reduces sent as one.

XLA joins all-reduces along the same axes of which none waits for another: the gradients of all
parameters become one collective, which needs them all at once, and gives them all at once. On the
host there is no limit to it. That changes what is alive, and not what is sent.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from .factor_layouts import Split
from .fused_kernels import FusedKernel


def combined(kernels: Sequence[FusedKernel]) -> list[FusedKernel]:
    """Kernels of one scope, with the all-reduces that can be sent as one as one kernel.

    Args:
        kernels: in an order in which they can run.

    Returns:
        In an order in which they can run.
    """
    found = list(kernels)
    keys = dict.fromkeys(one.op.axes for one in found if one.op.name == "all-reduce")
    for axes in keys:
        groups = _independent(found, axes)
        if any(len(group) > 1 for group in groups):
            found = _joined(found, groups)
    return found


def _independent(kernels: Sequence[FusedKernel], axes: Split) -> list[list[int]]:
    """All-reduces along axes by how many of them lie before each."""
    level_of: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for place, kernel in enumerate(kernels):
        level = max([level_of.get(one, 0) for one in kernel.reads], default=0)
        if kernel.op.name == "all-reduce" and kernel.op.axes == axes:
            groups.setdefault(level, []).append(place)
            level += 1
        if level:
            for one in kernel.writes:
                level_of[one] = level
    return list(groups.values())


def _joined(kernels: Sequence[FusedKernel], groups: Sequence[Sequence[int]]) -> list[FusedKernel]:
    node = list(range(len(kernels)))
    joined: dict[int, FusedKernel] = {}
    for group in groups:
        if len(group) < 2:
            continue
        several = tuple(kernels[place] for place in group)
        for place in group:
            node[place] = group[-1]
        reads = tuple(dict.fromkeys(one for kernel in several for one in kernel.reads))
        writes = tuple(one for kernel in several for one in kernel.writes)
        flops = sum(kernel.flops for kernel in several)
        read = sum(kernel.read for kernel in several)
        joined[group[-1]] = FusedKernel(
            several[-1].op, reads, writes, flops, read, together=several
        )
    maker = {one: node[place] for place, kernel in enumerate(kernels) for one in kernel.writes}
    waits = [0] * len(kernels)
    then: dict[int, list[int]] = {}
    here = [place for place in range(len(kernels)) if node[place] == place]
    for place in here:
        kernel = joined.get(place, kernels[place])
        before = {maker[one] for one in kernel.reads if one in maker} - {place}
        waits[place] = len(before)
        for one in before:
            then.setdefault(one, []).append(place)
    ready = [place for place in here if not waits[place]]
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(joined.get(place, kernels[place]))
        for one in then.get(place, ()):
            waits[one] -= 1
            if not waits[one]:
                heapq.heappush(ready, one)
    return order
