"""How much memory is alive on a device while a step runs, and which collectives of loops wait.

Inputs and results have memory of their own all the time, as XLA allocates it; results that are
donated an input have the input's. Everything else is `scheduling.liveness`, of the order in which
the target's compiler runs the kernels (`TargetRules`): of several orders that it may choose, the
one in which least is alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from isoshard.core.kit import is_product
from isoshard.planner.scheduling.kernel_orders import (
    behind_loops,
    breadth_first,
    frees_most,
    started_early,
)
from isoshard.planner.scheduling.kernels import Kernel, awaited
from isoshard.planner.scheduling.liveness import Liveness, live_bytes
from isoshard.planner.scheduling.rematerialization import rematerialized

from .flat_program import CONSTANT
from .fusion import Fusion
from .local_program import LocalProgram, LocalScope

WITHIN = ("branch", "manual")
"""Kinds of bodies that run once with the operations around them."""


def liveness(
    fusion: Fusion,
    replaced: Mapping[int, int] | None = None,
    seconds: Callable[[Kernel], float] | None = None,
    limit: int | None = None,
) -> Liveness:
    """What is alive while a program runs.

    Args:
        fusion: of the program.
        replaced: results that are donated an input -> the input.
        seconds: how long a kernel runs; unused where collectives are not started early.
        limit: bytes over which kernels are computed again; None if none are.
    """
    return _StepMemory(fusion, replaced or {}, seconds).step(limit)


class _StepMemory:
    def __init__(
        self,
        fusion: Fusion,
        replaced: Mapping[int, int],
        seconds: Callable[[Kernel], float] | None,
    ) -> None:
        self.fusion = fusion
        self.program = fusion.program
        self.rules = fusion.rules
        memory = fusion.memory
        results = [memory(value) for value in self.program.results if value != CONSTANT]
        self.fixed = {*(memory(value) for value in self.program.inputs), *results}
        self.ends = set(results)
        self.replaced = {memory(new): memory(old) for new, old in replaced.items()}
        self.seconds = seconds

    def step(self, limit: int | None) -> Liveness:
        """Of the step, in the best of the orders that the compiler may choose."""
        kernels = self.fusion.kernels
        bodies = self._bodies(kernels)
        inner = {key: live.peak for key, live in bodies.items()}
        orders = self._orders(kernels)
        if limit is not None:
            orders += [
                rematerialized(self.program, order, self.fixed, limit, inner) for order in orders
            ]
        step = [
            live_bytes(
                order,
                self.program.bytes,
                fixed=self.fixed,
                ends=self.ends,
                ahead=self._ahead(order, self.fixed),
                inner=inner,
                extra=self._extra_bytes(order),
            )
            for order in orders
        ]
        return _with_inside(min(step, key=lambda live: live.peak), bodies)

    def _orders(self, kernels: list[Kernel]) -> list[list[Kernel]]:
        inputs, bytes_ = self.program.inputs, self.program.bytes
        if self.rules.breadth_first:
            return [breadth_first(kernels, inputs)]
        if any(kernel.is_loop for kernel in kernels):
            order = behind_loops(kernels, self.ends)
            end = 1 + max(index for index, kernel in enumerate(order) if kernel.is_loop)
            return [order, [*order[:end], *frees_most(order[end:], bytes_, self.fixed)]]
        if len(kernels) <= 2:
            return [kernels]
        orders = [kernels, frees_most(kernels, bytes_, self.fixed)]
        if self.rules.hides_collectives and self.seconds is not None:
            seconds = self.seconds
            orders = [started_early(order, inputs, seconds, _is_slice) for order in orders]
        return orders

    def _bodies(self, kernels: Sequence[Kernel]) -> dict[int, Liveness]:
        """By the `id` of each kernel with bodies the liveness of the body that needs most."""
        bodies = {}
        for kernel in kernels:
            pairs = zip(kernel.op.bodies, kernel.inside, strict=True)
            each = [self._body(body, inside) for body, inside in pairs]
            if each:
                bodies[id(kernel)] = max(each, key=lambda live: live.peak)
        return bodies

    def _body(self, body: LocalScope, kernels: list[Kernel]) -> Liveness:
        memory = self.fusion.memory
        bodies = self._bodies(kernels)
        written = {value for kernel in kernels for value in kernel.writes}
        outer = {value for kernel in kernels for value in kernel.reads} - written
        ends = {memory(value) for value in body.results if value != CONSTANT}
        order = breadth_first(kernels, ()) if self.rules.breadth_first else kernels
        free = _in_carry(self.fusion, body, order)
        if body.kind in WITHIN:
            free |= ends
        fixed = outer | free
        live = live_bytes(
            order,
            self.program.bytes,
            fixed=fixed,
            ends=ends,
            ahead=self._ahead(order, fixed),
            inner={key: body.peak for key, body in bodies.items()},
        )
        return _with_inside(live, bodies)

    def _ahead(self, order: Sequence[Kernel], fixed: Collection[int]) -> set[int]:
        """Values alive from the start: breadth first, the zeros that loops write stacks over."""
        if not self.rules.breadth_first:
            return set()
        return {
            value
            for kernel in order
            if kernel.inside
            for value in {*kernel.writes} - (kernel.renewed or set())
            if value not in fixed
        }

    def _extra_bytes(self, order: Sequence[Kernel]) -> dict[int, int]:
        """Bytes by position of donated inputs that are read where their result exists already.

        A kernel that does not work element by element cannot write over what it reads: its result
        has memory of its own, and is copied. Later readers of the input read a copy.
        """
        last = {value: index for index, kernel in enumerate(order) for value in kernel.reads}
        last.update(dict.fromkeys(self.ends, len(order)))
        extra: dict[int, int] = {}
        for index, kernel in enumerate(order):
            for value in kernel.writes:
                old = self.replaced.get(value)
                if old is None:
                    continue
                size = self.program.bytes[value]
                if old in kernel.reads and not kernel.in_place:
                    extra[index] = extra.get(index, 0) + size
                for later in range(index + 1, last.get(old, -1) + 1):
                    extra[later] = extra.get(later, 0) + size
        return extra


def _with_inside(live: Liveness, bodies: Mapping[int, Liveness]) -> Liveness:
    live.inside = bodies.get(id(live.order[live.index])) if live.order else None
    return live


def _is_slice(kernel: Kernel) -> bool:
    return kernel.op.name == "slice"


def _in_carry(fusion: Fusion, body: LocalScope, kernels: Sequence[Kernel]) -> set[int]:
    """Carried results that are written where the carried value was, which is not read later."""
    last = {value: index for index, kernel in enumerate(kernels) for value in kernel.reads}
    writer = {value: index for index, kernel in enumerate(kernels) for value in kernel.writes}
    free = set()
    for end, start in body.carried:
        if end == CONSTANT or start == CONSTANT:
            continue
        result, carried = fusion.memory(end), fusion.memory(start)
        index = writer.get(result)
        if index is None:
            continue
        until = last.get(carried, -1)
        if until < index or (until == index and kernels[index].in_place):
            free.add(result)
    return free


def waiting(
    program: LocalProgram, scope: LocalScope, before: Collection[int] = ()
) -> frozenset[int]:
    """The ids of a loop's collectives that wait for its own run, without those of inner loops."""
    fresh = {inner for inner, outer in scope.outside.items() if outer in before}
    for end, start in scope.carried:
        # Carries that do not change, and scalars that count runs, do not depend on the run before.
        if CONSTANT not in (end, start) and end != start and program.shapes[start]:
            fresh.add(start)
    rows = [(op.operands, op.results, bool(op.bodies) or is_product(op.name)) for op in scope.ops]
    depends, fresh = awaited(rows, fresh)
    ids = {id(op) for op, late in zip(scope.ops, depends, strict=True) if late and op.axes}
    for op in scope.ops:
        for body in op.bodies:
            if body.kind in WITHIN:
                ids |= waiting(program, body, fresh)
    return frozenset(ids)
