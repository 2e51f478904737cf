"""How much memory is alive on a device while a step runs, and what.

Inputs and results have memory of their own all along, as XLA gives it; results that are donated an
input have the input's. All else is alive from the kernel that makes it to the last that reads it.
A kernel that is elementwise writes where an operand of the same size ends. A loop needs what its
body needs beside what it carries.

XLA orders kernels so that little is alive: of the program's order and the one that at each step
takes the kernel that frees most, the better counts.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence

from .combining import combined
from .flat_program import CONSTANT
from .fusion import FusedKernel, Fusion
from .local_program import LocalProgram, LocalScope
from .operand_copies import copied


@dataclasses.dataclass
class Liveness:
    """Bytes alive beside inputs and results.

    Attributes:
        order: of the kernels.
        at: bytes alive while each kernel of the order runs, its insides included.
        peak: the most.
        place: of the kernel in the order at which it is so.
        values: local values alive there, outside of loops.
        inside: if the kernel is a loop, what is alive in its body there.
    """

    order: list[FusedKernel]
    at: list[int]
    peak: int
    place: int
    values: tuple[int, ...]
    inside: Liveness | None = None


def liveness(fusion: Fusion, fixed: set[int], *, host: bool) -> Liveness:
    """What is alive while a program runs.

    Args:
        fusion: of the program.
        fixed: values that have memory of their own all along.
        host: as XLA does it for CPU: all-reduces are sent as one where they can be, and operands of
            products are copied into order.
    """
    program = fusion.program
    kernels = combined(fusion.kernels) if host else fusion.kernels
    insides = {id(one): _insides(fusion, one, fixed, host) for one in kernels if one.op.bodies}
    alive = {fusion.memory(one) for one in fixed}
    ends = {fusion.memory(one) for one in program.results if one != CONSTANT}
    first = _simulated(program, kernels, alive, ends, insides, host)
    if len(kernels) < 3:
        return first
    second = _simulated(program, _frees_most(program, kernels, alive), alive, ends, insides, host)
    return min(first, second, key=lambda one: one.peak)


def _insides(fusion: Fusion, kernel: FusedKernel, fixed: set[int], host: bool) -> Liveness | None:
    """The body of a loop or branch that needs most."""
    found = []
    for body, kernels in zip(kernel.op.bodies, kernel.inside, strict=True):
        insides = {id(one): _insides(fusion, one, fixed, host) for one in kernels if one.op.bodies}
        made = {one for inner in kernels for one in inner.writes}
        outer = {one for inner in kernels for one in inner.reads} - made
        ends = {fusion.memory(one) for one in body.results if one != CONSTANT}
        free = _in_carry(fusion, body, kernels)
        if body.kind in ("manual", "branch"):
            free |= ends
        found.append(_simulated(fusion.program, kernels, outer | free, ends, insides, host))
    return max(found, key=lambda one: one.peak, default=None)


def _in_carry(fusion: Fusion, body: LocalScope, kernels: Sequence[FusedKernel]) -> set[int]:
    """Carried results that are written where the carried value was, which nobody reads later."""
    last: dict[int, int] = {}
    made: dict[int, int] = {}
    for place, kernel in enumerate(kernels):
        for one in kernel.reads:
            last[one] = place
        for one in kernel.writes:
            made[one] = place
    free = set()
    for end, start in body.carried:
        if end == CONSTANT or start == CONSTANT:
            continue
        result, carried = fusion.memory(end), fusion.memory(start)
        place = made.get(result)
        if place is None:
            continue
        until = last.get(carried, -1)
        if until < place or (until == place and kernels[place].in_place):
            free.add(result)
    return free


def _simulated(
    program: LocalProgram,
    order: list[FusedKernel],
    fixed: set[int],
    ends: set[int],
    insides: dict[int, Liveness | None],
    host: bool,
) -> Liveness:
    bytes_ = program.bytes
    last: dict[int, int] = {}
    for place, kernel in enumerate(order):
        for one in kernel.reads:
            last[one] = place
    for one in ends:
        last[one] = len(order)
    now, peak, where = 0, -1, 0
    at: list[int] = []
    born: dict[int, int] = {}
    for place, kernel in enumerate(order):
        gone = [one for one in kernel.reads if last[one] == place and one in born]
        new = [one for one in kernel.writes if one not in fixed]
        made = sum([bytes_[one] for one in new])
        shared = 0
        if kernel.in_place and gone:
            sizes = [bytes_[one] for one in gone]
            for one in _renewed(kernel, new):
                if bytes_[one] in sizes:
                    sizes.remove(bytes_[one])
                    shared += bytes_[one]
        inside = insides.get(id(kernel))
        here = now + made - shared + (inside.peak if inside else 0)
        if host:
            here += copied(program, kernel.op)
        at.append(here)
        if here > peak:
            peak, where = here, place
        for one in new:
            born[one] = place
        now += made
        for one in gone:
            now -= bytes_[one]
            del born[one]
        for one in new:
            if one not in last:
                now -= bytes_[one]
                born.pop(one, None)
    values = _alive_at(order, where, last, fixed)
    inside = insides.get(id(order[where])) if order else None
    return Liveness(order, at, max(0, peak), where, values, inside)


def _renewed(kernel: FusedKernel, new: Sequence[int]) -> Sequence[int]:
    """Results that can be where an operand was; of a loop those that it carries."""
    if not kernel.op.bodies:
        return new
    carried = set(kernel.op.results[: len(kernel.op.bodies[-1].carried)])
    return [one for one in new if one in carried]


def _alive_at(
    order: Sequence[FusedKernel], where: int, last: dict[int, int], fixed: set[int]
) -> tuple[int, ...]:
    return tuple(
        one
        for place, kernel in enumerate(order[: where + 1])
        for one in kernel.writes
        if one not in fixed and (last.get(one, -1) >= where or place == where)
    )


def _frees_most(
    program: LocalProgram, kernels: Sequence[FusedKernel], fixed: set[int]
) -> list[FusedKernel]:
    """Kernels in the order that at each step takes the ready one that frees most."""
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
