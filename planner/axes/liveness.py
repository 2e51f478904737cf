"""How much memory is alive on a device while a step runs, and what.

Inputs and results have memory of their own all along, as XLA gives it; results that are donated an
input have the input's. All else is alive from the kernel that makes it to the last that reads it.
A kernel that is elementwise writes where an operand of the same size ends. A loop needs what its
body needs beside what it carries.

Compilers of TPUs and GPUs run products and collectives that loops do not need behind these. There,
and without loops, they order kernels so that little is alive: of the program's order and the one
that at each step takes the kernel that frees most, the better counts. The host's takes kernels
breadth first. Over a limit what can be is computed again (`rematerializing`), in either order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from .common_expressions import CONSTANT
from .fused_kernels import FusedKernel
from .fusion import Fusion
from .kernel_orders import behind_loops, breadth_first, frees_most, is_loop, started_early
from .local_program import LocalScope
from .rematerializing import computed_again


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


def liveness(
    fusion: Fusion,
    replaced: Mapping[int, int] | None = None,
    seconds: Callable[[FusedKernel], float] | None = None,
    limit: int | None = None,
) -> Liveness:
    """What is alive while a program runs.

    Args:
        fusion: of the program.
        replaced: results that are donated an input: its number.
        seconds: how long a kernel runs; not asked of a machine that starts no collectives early.
        limit: bytes over which what can be is computed again; None if nothing is.
    """
    return _AliveKernels(fusion, replaced or {}, seconds).step(limit)


class _AliveKernels:
    def __init__(
        self,
        fusion: Fusion,
        replaced: Mapping[int, int],
        seconds: Callable[[FusedKernel], float] | None,
    ) -> None:
        self.fusion = fusion
        self.program = fusion.program
        self.rules = fusion.rules
        memory = fusion.memory
        results = [memory(one) for one in self.program.results if one != CONSTANT]
        self.fixed = {*(memory(one) for one in self.program.inputs), *results}
        self.ends = set(results)
        self.replaced = {memory(new): memory(old) for new, old in replaced.items()}
        self.seconds = seconds

    def step(self, limit: int | None) -> Liveness:
        """Of the whole step."""
        kernels = self.fusion.kernels
        inside = {id(one): self._inside(one) for one in kernels if one.op.bodies}
        orders = [kernels]
        if self.rules.breadth_first:
            orders = [breadth_first(kernels, self.program.inputs)]
        elif any(map(is_loop, kernels)):
            order = behind_loops(kernels, self.ends)
            end = 1 + max(place for place, one in enumerate(order) if is_loop(one))
            rest = frees_most(self.program, order[end:], self.fixed)
            orders = [order, [*order[:end], *rest]]
        elif len(kernels) > 2:
            orders.append(frees_most(self.program, kernels, self.fixed))
            if self.rules.hides_collectives and self.seconds is not None:
                inputs = self.program.inputs
                orders = [started_early(one, inputs, self.seconds) for one in orders]
        if limit is not None:
            within = {key: one.peak for key, one in inside.items() if one is not None}
            orders += [
                computed_again(self.program, one, self.fixed, limit, within) for one in orders
            ]
        found = [self._simulated(one, self.fixed, self.ends, inside) for one in orders]
        return min(found, key=lambda one: one.peak)

    def _inside(self, kernel: FusedKernel) -> Liveness | None:
        """The body of a loop or branch that needs most."""
        fusion = self.fusion
        found: list[Liveness] = []
        for body, kernels in zip(kernel.op.bodies, kernel.inside, strict=True):
            inside = {id(one): self._inside(one) for one in kernels if one.op.bodies}
            made = {one for inner in kernels for one in inner.writes}
            outer = {one for inner in kernels for one in inner.reads} - made
            ends = {fusion.memory(one) for one in body.results if one != CONSTANT}
            order: Sequence[FusedKernel] = kernels
            if self.rules.breadth_first:
                order = breadth_first(kernels, ())
            free = _in_carry(fusion, body, order)
            if body.kind in ("manual", "branch"):
                free |= ends
            found.append(self._simulated(order, outer | free, ends, inside))
        return max(found, key=lambda one: one.peak, default=None)

    def _simulated(
        self,
        order: Sequence[FusedKernel],
        fixed: set[int],
        ends: set[int],
        inside_of: Mapping[int, Liveness | None],
    ) -> Liveness:
        bytes_ = self.program.bytes
        last = {one: place for place, kernel in enumerate(order) for one in kernel.reads}
        last.update(dict.fromkeys(ends, len(order)))
        ahead = self._ahead(order, fixed)
        beside = self._beside(order, last) if fixed is self.fixed else {}
        now, peak, where = sum([bytes_[one] for one in ahead]), -1, 0
        at: list[int] = []
        born: set[int] = set(ahead)
        for place, kernel in enumerate(order):
            gone = [one for one in kernel.reads if last[one] == place and one in born]
            new = [one for one in kernel.writes if one not in fixed and one not in ahead]
            made = sum([bytes_[one] for one in new])
            shared = 0
            if kernel.in_place and gone and (self.rules.reduces_in_place or not kernel.op.axes):
                sizes = [bytes_[one] for one in gone]
                for one in _renewed(kernel, new):
                    if bytes_[one] in sizes:
                        sizes.remove(bytes_[one])
                        shared += bytes_[one]
            inside = inside_of.get(id(kernel))
            here = now + made - shared + (inside.peak if inside else 0) + beside.get(place, 0)
            at.append(here)
            if here > peak:
                peak, where = here, place
            born.update(new)
            now += made
            for one in gone:
                now -= bytes_[one]
                born.discard(one)
            for one in new:
                if one not in last:
                    now -= bytes_[one]
                    born.discard(one)
        values = _alive_at(order, where, last, fixed, ahead)
        inside = inside_of.get(id(order[where])) if order else None
        return Liveness(list(order), at, max(0, peak), where, values, inside)

    def _ahead(self, order: Sequence[FusedKernel], fixed: set[int]) -> set[int]:
        """What is alive from the start: breadth first, the zeros that loops write stacks over."""
        if not self.rules.breadth_first:
            return set()
        return {
            one
            for kernel in order
            if kernel.op.bodies
            for one in {*kernel.writes} - {*_renewed(kernel, kernel.writes)}
            if one not in fixed
        }

    def _beside(self, order: Sequence[FusedKernel], last: Mapping[int, int]) -> dict[int, int]:
        """Bytes by place of donated inputs that are read where their result is there already.

        A kernel that does not work element by element cannot write over what it reads: its result
        is made beside the input, and copied. Who reads the input later reads a copy.
        """
        found: dict[int, int] = {}
        for place, kernel in enumerate(order):
            for one in kernel.writes:
                old = self.replaced.get(one)
                if old is None:
                    continue
                size = self.program.bytes[one]
                if old in kernel.reads and not kernel.in_place:
                    found[place] = found.get(place, 0) + size
                for later in range(place + 1, last.get(old, -1) + 1):
                    found[later] = found.get(later, 0) + size
        return found


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


def _renewed(kernel: FusedKernel, new: Sequence[int]) -> Sequence[int]:
    """Results that can be where an operand was; of a loop those that it carries."""
    if not kernel.op.bodies:
        return new
    carried = set(kernel.op.results[: len(kernel.op.bodies[-1].carried)])
    return [one for one in new if one in carried]


def _alive_at(
    order: Sequence[FusedKernel],
    where: int,
    last: Mapping[int, int],
    fixed: set[int],
    ahead: set[int],
) -> tuple[int, ...]:
    return tuple(
        one
        for place, kernel in enumerate(order)
        for one in kernel.writes
        if one not in fixed
        and (place <= where or one in ahead)
        and (last.get(one, -1) >= where or place == where)
    )
