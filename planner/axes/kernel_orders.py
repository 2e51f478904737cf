"""Orders in which kernels may run."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence

from isoshard.core.runtime.flops import is_product

from .fused_kernels import FusedKernel
from .local_program import LocalProgram


def breadth_first(kernels: Sequence[FusedKernel], inputs: Sequence[int]) -> list[FusedKernel]:
    """The order in which kernels become ready, first in, first out, as XLA's `BFScheduler`.

    Args:
        kernels: in an order in which they can run.
        inputs: what is there from the start, in its order.
    """
    maker = {one: place for place, kernel in enumerate(kernels) for one in kernel.writes}
    first = {one: -1 - n for n, one in enumerate(inputs)}
    readers: dict[int, list[int]] = {}
    waits = []
    for place, kernel in enumerate(kernels):
        needs = {maker.get(one, first.get(one)) for one in kernel.reads} - {None, place}
        waits.append(len(needs))
        for need in needs:
            if need is not None:
                readers.setdefault(need, []).append(place)
    order: list[FusedKernel] = []
    queue = deque([-1 - n for n in range(len(inputs))])
    queue.extend([place for place, count in enumerate(waits) if not count])
    while queue:
        place = queue.popleft()
        if place >= 0:
            order.append(kernels[place])
        for user in readers.get(place, ()):
            waits[user] -= 1
            if not waits[user]:
                queue.append(user)
    return order


def behind_loops(kernels: Sequence[FusedKernel], results: Collection[int]) -> list[FusedKernel]:
    """Products and collectives, and what follows, behind the loops that do not need them.

    Compilers of TPUs and GPUs schedule from the end of a program to its start, to hide
    communication behind computing: what nobody waits for comes late.

    Args:
        kernels: in an order in which they can run.
        results: values that are alive at the end.
    """
    part: list[int] = []
    number = 0
    for kernel in kernels:
        part.append(number)
        number += is_loop(kernel)
    first: dict[int, int] = {}
    allowed = list(part)
    for place in range(len(kernels) - 1, -1, -1):
        kernel = kernels[place]
        if not is_loop(kernel):
            ends = [
                first.get(one, number if one in results else part[place]) for one in kernel.writes
            ]
            allowed[place] = min(ends, default=part[place])
        for one in kernel.reads:
            first[one] = min(first.get(one, allowed[place]), allowed[place])
    moved: set[int] = set()
    keys: list[tuple[int, bool, int]] = []
    for place, kernel in enumerate(kernels):
        late = allowed[place] > part[place] and (
            bool(kernel.op.axes) or is_product(kernel.op.name) or not moved.isdisjoint(kernel.reads)
        )
        if late:
            moved.update(kernel.writes)
        keys.append((allowed[place] if late else part[place], is_loop(kernel), place))
    return [kernels[place] for *_, place in sorted(keys)]


def is_loop(kernel: FusedKernel) -> bool:
    """Whether a kernel runs a program several times.

    Args:
        kernel: any.
    """
    return any(body.kind in ("scan", "while") for body in kernel.op.bodies)


def started_early(
    kernels: Sequence[FusedKernel],
    inputs: Collection[int],
    seconds: Callable[[FusedKernel], float],
) -> list[FusedKernel]:
    """Collectives of what is there from the start, as much before their readers as they take.

    The compiler for GPUs schedules from the end of a program to its start, with one collective at a
    time: it begins where enough is computed beside it, if nowhere, at the start.

    Args:
        kernels: in an order in which they can run.
        inputs: what is there from the start.
        seconds: how long a kernel runs.
    """
    begins = [0.0, *itertools.accumulate(0.0 if one.op.axes else seconds(one) for one in kernels)]
    made: dict[int, set[int]] = {one: set() for one in inputs}
    early: dict[int, set[int]] = {}
    sender: dict[int, int] = {}
    first: dict[int, int] = {}
    for place, kernel in enumerate(kernels):
        several = {sender[one] for one in kernel.reads if one in sender}
        if kernel.op.name == "slice" and len(kernel.reads) == 1 and several:
            # What a collective gave, as an array of the shape that is wanted.
            sender.update(dict.fromkeys(kernel.writes, *several))
            for one in several & early.keys():
                early[one].add(place)
            continue
        for one in several:
            first.setdefault(one, place)
        known = bool(kernel.reads) and all(one in made for one in kernel.reads)
        needs = {place}.union(*(made.get(one, ()) for one in kernel.reads))
        if kernel.op.axes:
            sender.update(dict.fromkeys(kernel.writes, place))
            if known:
                early[place] = needs
        elif known and kernel.by_element:
            made.update(dict.fromkeys(kernel.writes, needs))
    at: dict[int, int] = {}
    free = begins[-1]
    for place in sorted(first, key=lambda one: (-first[one], one in early)):
        least = 0.0 if place in early else begins[place]
        free = max(min(free, begins[first[place]]) - seconds(kernels[place]), least)
        start = bisect.bisect_right(begins, free) - 1
        for one in early.get(place, ()):
            at[one] = min(at.get(one, one), start)
    moved = sorted(range(len(kernels)), key=lambda one: (at.get(one, one), one not in at, one))
    return [kernels[place] for place in moved]


def frees_most(
    program: LocalProgram, kernels: Sequence[FusedKernel], fixed: set[int]
) -> list[FusedKernel]:
    """The order that at each step takes the ready kernel that frees most.

    Args:
        program: that they are of.
        kernels: in an order in which they can run.
        fixed: values that have memory of their own all along.
    """
    bytes_ = program.bytes
    maker = {one: place for place, kernel in enumerate(kernels) for one in kernel.writes}
    left: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    waits = []
    for place, kernel in enumerate(kernels):
        needs = {maker[one] for one in kernel.reads if maker.get(one, place) != place}
        waits.append(len(needs))
        for need in needs:
            readers.setdefault(need, []).append(place)
        for one in kernel.reads:
            left[one] = left.get(one, 0) + 1
    readers_of: dict[int, list[int]] = {}
    for place, kernel in enumerate(kernels):
        for one in kernel.reads:
            if one in maker:
                readers_of.setdefault(one, []).append(place)

    def gain(place: int) -> int:
        kernel = kernels[place]
        freed = sum([bytes_[one] for one in kernel.reads if one in maker and left[one] == 1
                     and one not in fixed])  # fmt: skip
        return freed - sum([bytes_[one] for one in kernel.writes if one not in fixed])

    ready = [(-gain(place), place) for place, count in enumerate(waits) if count == 0]
    heapq.heapify(ready)
    done = bytearray(len(kernels))
    order = []
    while ready:
        cost, place = heapq.heappop(ready)
        if done[place]:
            continue
        now = -gain(place)
        if now != cost:
            heapq.heappush(ready, (now, place))
            continue
        done[place] = 1
        order.append(kernels[place])
        for one in kernels[place].reads:
            left[one] -= 1
            if left[one] == 1:
                for user in readers_of.get(one, ()):
                    if not done[user] and waits[user] == 0:
                        heapq.heappush(ready, (-gain(user), user))
        for user in readers.get(place, ()):
            waits[user] -= 1
            if waits[user] == 0:
                heapq.heappush(ready, (-gain(user), user))
    return order
