"""Orders in which kernels may run."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence

from .kernels import Kernel, readers_of


def breadth_first(kernels: Sequence[Kernel], inputs: Sequence[int]) -> list[Kernel]:
    """The order in which kernels become ready, first in, first out.

    Source: `BFScheduler` of XLA's hlo_memory_scheduler.cc, the host compiler's default.
    """
    writer = {value: index for index, kernel in enumerate(kernels) for value in kernel.writes}
    ids = {value: -1 - n for n, value in enumerate(inputs)}
    readers: dict[int, list[int]] = {}
    pending = []
    for index, kernel in enumerate(kernels):
        needs = {writer.get(value, ids.get(value)) for value in kernel.reads} - {None, index}
        pending.append(len(needs))
        for need in needs:
            if need is not None:
                readers.setdefault(need, []).append(index)
    order: list[Kernel] = []
    queue = deque([-1 - n for n in range(len(inputs))])
    queue.extend([index for index, count in enumerate(pending) if not count])
    while queue:
        index = queue.popleft()
        if index >= 0:
            order.append(kernels[index])
        for reader in readers.get(index, ()):
            pending[reader] -= 1
            if not pending[reader]:
                queue.append(reader)
    return order


def behind_loops(kernels: Sequence[Kernel], results: Collection[int] = ()) -> list[Kernel]:
    """Products and collectives, and what depends on them, after the loops that do not read them.

    Compilers of TPUs and GPUs schedule from the end of a program to its start, to hide
    communication behind computing: a kernel without waiting readers runs late. So the gradient of
    a model's head, which only its optimizer reads, is computed after the loop of the layers'
    backward pass, and its operands are alive until then.

    Source: `LatencyHidingScheduler` of XLA's latency_hiding_scheduler.cc.
    """
    section: list[int] = []
    loops = 0
    for kernel in kernels:
        section.append(loops)
        loops += kernel.is_loop
    first: dict[int, int] = {}
    latest = list(section)
    for index in range(len(kernels) - 1, -1, -1):
        kernel = kernels[index]
        if not kernel.is_loop:
            ends = [
                first.get(value, loops if value in results else section[index])
                for value in kernel.writes
            ]
            latest[index] = min(ends, default=section[index])
        for value in kernel.reads:
            first[value] = min(first.get(value, latest[index]), latest[index])
    moved: set[int] = set()
    keys: list[tuple[int, bool, int]] = []
    for index, kernel in enumerate(kernels):
        late = latest[index] > section[index] and (
            kernel.kind in ("product", "collective") or not moved.isdisjoint(kernel.reads)
        )
        if late:
            moved.update(kernel.writes)
        keys.append((latest[index] if late else section[index], kernel.is_loop, index))
    return [kernels[index] for *_, index in sorted(keys)]


def started_early(
    kernels: Sequence[Kernel],
    inputs: Collection[int],
    seconds: Callable[[Kernel], float],
    is_view: Callable[[Kernel], bool],
) -> list[Kernel]:
    """Collectives of inputs, started as long before their readers as they take.

    The compiler for GPUs schedules from the end of a program to its start, with one collective at a
    time: it starts where enough is computed meanwhile, or else at the start of the program.

    Source: `LatencyHidingScheduler`; `xla_gpu_experimental_parallel_collective_overlap_limit` is 1.

    Args:
        kernels: in an order in which they can run.
        inputs: values that are present from the start.
        seconds: how long a kernel runs.
        is_view: whether a kernel only reshapes a collective's result.
    """
    begins = [
        0.0,
        *itertools.accumulate(0.0 if k.kind == "collective" else seconds(k) for k in kernels),
    ]
    ready: dict[int, set[int]] = {value: set() for value in inputs}
    early: dict[int, set[int]] = {}
    sender: dict[int, int] = {}
    first: dict[int, int] = {}
    for index, kernel in enumerate(kernels):
        senders = {sender[value] for value in kernel.reads if value in sender}
        if is_view(kernel) and len(kernel.reads) == 1 and senders:
            sender.update(dict.fromkeys(kernel.writes, *senders))
            for other in senders & early.keys():
                early[other].add(index)
            continue
        for other in senders:
            first.setdefault(other, index)
        from_inputs = bool(kernel.reads) and all(value in ready for value in kernel.reads)
        needs = {index}.union(*(ready.get(value, ()) for value in kernel.reads))
        if kernel.kind == "collective":
            sender.update(dict.fromkeys(kernel.writes, index))
            if from_inputs:
                early[index] = needs
        elif from_inputs and kernel.by_element:
            ready.update(dict.fromkeys(kernel.writes, needs))
    start: dict[int, int] = {}
    free = begins[-1]
    for index in sorted(first, key=lambda n: (-first[n], n in early)):
        least = 0.0 if index in early else begins[index]
        free = max(min(free, begins[first[index]]) - seconds(kernels[index]), least)
        position = bisect.bisect_right(begins, free) - 1
        for other in early.get(index, ()):
            start[other] = min(start.get(other, other), position)
    order = sorted(range(len(kernels)), key=lambda n: (start.get(n, n), n not in start, n))
    return [kernels[index] for index in order]


def frees_most(
    kernels: Sequence[Kernel], bytes_: Sequence[int], fixed: Collection[int]
) -> list[Kernel]:
    """The order that runs the ready kernel that frees most at each step.

    Source: `ListScheduler` of XLA's hlo_memory_scheduler.cc.
    """
    writer = {value: index for index, kernel in enumerate(kernels) for value in kernel.writes}
    unread: dict[int, int] = {}
    followers: dict[int, list[int]] = {}
    pending = []
    for index, kernel in enumerate(kernels):
        needs = {writer[value] for value in kernel.reads if writer.get(value, index) != index}
        pending.append(len(needs))
        for need in needs:
            followers.setdefault(need, []).append(index)
        for value in kernel.reads:
            unread[value] = unread.get(value, 0) + 1
    readers = readers_of(kernels)

    def gain(index: int) -> int:
        kernel = kernels[index]
        freed = sum([bytes_[value] for value in kernel.reads if value in writer
                     and unread[value] == 1 and value not in fixed])  # fmt: skip
        return freed - sum([bytes_[value] for value in kernel.writes if value not in fixed])

    ready = [(-gain(index), index) for index, count in enumerate(pending) if count == 0]
    heapq.heapify(ready)
    done = bytearray(len(kernels))
    order = []
    while ready:
        cost, index = heapq.heappop(ready)
        if done[index]:
            continue
        current = -gain(index)
        if current != cost:  # it was pushed before other kernels ran
            heapq.heappush(ready, (current, index))
            continue
        done[index] = 1
        order.append(kernels[index])
        for value in kernels[index].reads:
            unread[value] -= 1
            if unread[value] == 1 and value in writer:
                for reader in readers[value]:
                    if not done[reader] and pending[reader] == 0:
                        heapq.heappush(ready, (-gain(reader), reader))
        for follower in followers.get(index, ()):
            pending[follower] -= 1
            if pending[follower] == 0:
                heapq.heappush(ready, (-gain(follower), follower))
    return order
