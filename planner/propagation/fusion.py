"""Fusion model: which intermediates are materialized, and which all-reduces are combined.

A value is fused if its readers can compute it, and it is read by one kernel or cheap to compute
from one value. A view of the same bytes has its operand's memory. This is the main rule of XLA's
`InstructionFusion` without its many cases.

`AllReduceCombiner` combines all-reduces along the same axes of which none waits for another: the
gradients of all parameters become one collective, which reads them all at once, and writes them all
at once. On the host it has no limit. That changes what is alive, and not what is sent.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

from isoshard.core.kit import is_elementwise, is_product
from isoshard.planner.scheduling.kernels import Kernel, Kind, together
from isoshard.planner.scheduling.sibling_fusion import siblings_fused

from .factors import Split
from .flat_program import CONSTANT
from .layout_copies import REORDER
from .local_program import LocalOp, LocalProgram, LocalScope
from .target_rules import TargetRules

MOVES = frozenset(
    "broadcast_in_dim iota slice pad rev transpose row dynamic_slice concatenate random_bits "
    "split reorder".split()
)
"""Operations that are fused into their readers, besides elementwise ones."""
REDUCTIONS = frozenset(
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce argmax argmin "
    "reduce_window reduce_window_sum reduce_window_max".split()
)
_SAME_BYTES = frozenset(
    "reshape squeeze expand_dims optimization_barrier name sharding_constraint reshard "
    "stop_gradient device_put copy bitcast_convert_type random_wrap random_unwrap result "
    "layout_constraint".split()
)
_READERS = REDUCTIONS | {"stack", "dynamic_update_slice"}
_SLICES = frozenset(("row", "slice", "dynamic_slice", "gather"))
"""Operations that read a slice of their operand."""
_EXPENSIVE = frozenset(
    "exp exp2 expm1 log log1p log2 tanh logistic erf erfc erf_inv pow rsqrt sqrt cbrt sin cos tan "
    "atan2 digamma lgamma random_bits threefry2x32 concatenate".split()
)

_AS_MUCH = 1.25
"""A copy in another order computes its operand itself if that reads at most so many times the
operand's bytes."""


class Fusion:
    """Kernels of a program, and the values that share memory.

    Args:
        program: of one device.
        rules: of the machine: what products compute themselves, and what is computed again.
    """

    def __init__(self, program: LocalProgram, rules: TargetRules) -> None:
        """Fuse a program."""
        self.program = program
        self.rules = rules
        self.aliases: dict[int, int] = {}
        """Value -> the value whose memory it shares."""
        self._sources: dict[int, dict[int, int]] = {}
        """Value without memory -> the values it is computed from, with the bytes read of each."""
        self._flops: dict[int, float] = {}
        self._copied: set[int] = set()
        self.kernels = self._scope(program.scope, set(program.results))

    def memory(self, value: int) -> int:
        """The value whose memory a value shares; often itself."""
        while value in self.aliases:
            value = self.aliases[value]
        return value

    def _scope(self, scope: LocalScope, saved: set[int]) -> list[Kernel]:
        for inner, outer in scope.outside.items():
            if outer != CONSTANT and inner != outer and self.memory(outer) != inner:
                self.aliases[inner] = outer
        readers = _readers(scope.ops)
        saved = {*saved, *scope.results}
        for op in scope.ops:
            if op.name in _SAME_BYTES and not op.axes:
                for operand, result in zip(op.operands, op.results, strict=False):
                    if operand != CONSTANT and self._equal(operand, result):
                        self.aliases[result] = operand
                if op.results[0] in self.aliases and op.results[0] in saved:
                    saved.add(op.operands[0])
        fused = self._fused(scope.ops, readers, saved)
        kernels: list[Kernel] = []
        new: dict[int, Kernel] = {}
        for op in scope.ops:
            if op.bodies:
                inside = tuple(self._scope(body, set()) for body in op.bodies)
                reads = {*self._reads(op.operands), *self._read_inside(op.bodies)}
                kernels.append(self._kernel(op, reads, op.results, inside=inside))
                continue
            if all(result in self.aliases for result in op.results):
                if any(operand in self._sources for operand in op.operands):
                    for view in op.results:
                        self._sources[view] = self._reads(op.operands)
                continue
            reads = self._reads(op.operands)
            if op.name == REORDER and self.rules.joins_siblings:
                reads = self._sources_of_copy(reads, new)
            flops = op.flops + sum(self._flops.pop(operand, 0.0) for operand in op.operands)
            if op in fused:
                for result in op.results:
                    self._sources[result] = self._reads_of_slice(op, reads)
                self._flops[op.results[0]] = flops
                continue
            writes = () if op.name == "stack" else op.results
            kernels.append(self._kernel(op, reads, writes, flops, sum(reads.values())))
            new.update(dict.fromkeys(writes, kernels[-1]))
        if self._copied:
            kernels = self._without_dead(kernels, {self.memory(value) for value in saved})
        if self.rules.joins_siblings:
            sizes = [math.prod(shape) for shape in self.program.shapes]
            kernels = siblings_fused(kernels, self.program.bytes, sizes)
        return combined(kernels) if self.rules.joins_reductions else kernels

    def _kernel(
        self,
        op: LocalOp,
        reads: Iterable[int],
        writes: tuple[int, ...],
        flops: float = 0.0,
        read: int = 0,
        inside: tuple[list[Kernel], ...] = (),
    ) -> Kernel:
        """The kernel of one operation with all that is fused into it."""
        name = op.name
        by_element = is_elementwise(name)
        generated = by_element or name in MOVES or name in REDUCTIONS or name == "gather"
        in_place = by_element or bool(op.bodies) or name in ("dynamic_update_slice", "slice")
        in_place |= name == "all-reduce" and self.rules.reduces_in_place
        carried = frozenset(op.results[: len(op.bodies[-1].carried)]) if op.bodies else None
        return Kernel(
            op,
            tuple(reads),
            writes,
            _kind(op),
            by_element or name == REORDER,
            in_place,
            carried,
            generated and not op.axes and not op.bodies,
            flops,
            read,
            inside,
        )

    def _sources_of_copy(self, reads: dict[int, int], new: dict[int, Kernel]) -> dict[int, int]:
        """The reads of a copy in another order: the sources of its operand, if they are no more."""
        bytes_ = self.program.bytes
        operand = next(iter(reads), CONSTANT)
        maker = new.get(operand) if len(reads) == 1 else None
        if maker is None or not is_elementwise(maker.op.name):
            return reads
        if sum([bytes_[source] for source in maker.reads]) > _AS_MUCH * bytes_[operand]:
            return reads
        self._copied.add(operand)
        return {source: bytes_[source] for source in maker.reads}

    def _without_dead(self, kernels: list[Kernel], saved: set[int]) -> list[Kernel]:
        """Kernels without those whose results are only read as copies."""
        read = saved.union(*[kernel.reads for kernel in kernels])
        dead = {value for value in self._copied if value not in read}
        return [
            kernel for kernel in kernels if not kernel.writes or not dead.issuperset(kernel.writes)
        ]

    def _equal(self, operand: int, result: int) -> bool:
        return self.program.bytes[operand] == self.program.bytes[result]

    def _fused(
        self, ops: Sequence[LocalOp], readers: dict[int, list[LocalOp]], saved: set[int]
    ) -> set[LocalOp]:
        """Operations whose results get no memory; readers are decided before what they read."""
        fused: set[LocalOp] = set()
        read_by_products: set[LocalOp] = set()  # products read their operands from memory
        kernels: dict[LocalOp, LocalOp | None] = {}  # of what is fused; None: fused into several
        unread = self.aliases
        for op in reversed(ops):
            if op.axes or op.bodies or not self._can_be_fused(op):
                continue
            if any(result in saved or result in unread for result in op.results):
                continue
            users = [user for result in op.results for user in self._users(result, readers, saved)]
            if not users or any(
                user is None or user in read_by_products or not _can_read(user, op, self.rules)
                for user in users
            ):
                continue
            within = {kernels.get(user, user) for user in users if user}
            in_same_kernel = len(within) == 1 and None not in within
            if len(users) > 1 and not in_same_kernel and not self._cheap(op):
                continue
            fused.add(op)
            kernels[op] = within.pop() if in_same_kernel else None
            if not self.rules.products_fuse and any(
                is_product(user.name) for user in users if user
            ):
                read_by_products.add(op)
        return fused

    def _can_be_fused(self, op: LocalOp) -> bool:
        if op.name == "gather":
            return self.rules.lookups_fuse
        return op.name in MOVES or is_elementwise(op.name)

    def _users(
        self, value: int, readers: dict[int, list[LocalOp]], saved: set[int]
    ) -> Iterable[LocalOp | None]:
        """The readers of a value and of its views; None: it has to be kept."""
        for user in readers.get(value, ()):
            if user.results and all(result in self.aliases for result in user.results):
                for view in user.results:
                    if view in saved:
                        yield None
                    yield from self._users(view, readers, saved)
            else:
                yield user

    def _cheap(self, op: LocalOp) -> bool:
        bytes_ = self.program.bytes
        read = sum(bytes_[operand] for operand in op.operands if operand != CONSTANT)
        if op.name in _EXPENSIVE and not self.rules.computes_again:
            return False
        return read <= sum(bytes_[result] for result in op.results)

    def _reads_of_slice(self, op: LocalOp, reads: dict[int, int]) -> dict[int, int]:
        """Bytes read through an operation: of the operand of a slice, no more than the slice."""
        if op.name not in _SLICES:
            return reads
        sliced = sum([self.program.bytes[result] for result in op.results])
        return {source: min(size, sliced) for source, size in reads.items()}

    def _reads(self, operands: Sequence[int]) -> dict[int, int]:
        """Values with memory that operands are computed from, and the bytes read of each."""
        reads: dict[int, int] = {}
        for operand in operands:
            if operand == CONSTANT:
                continue
            sources = self._sources.get(operand)
            if sources is None:
                memory = self.memory(operand)
                sources = {memory: self.program.bytes[memory]}
            for source, size in sources.items():
                reads[source] = max(size, reads.get(source, 0))
        return reads

    def _read_inside(self, bodies: Sequence[LocalScope]) -> set[int]:
        """Values from outside that bodies read other than as operands: resharded ones."""
        inside: set[int] = set()
        for body in bodies:
            for outer in body.outside.values():
                if outer != CONSTANT:
                    inside.update(self._reads((outer,)))
        return inside


def _kind(op: LocalOp) -> Kind:
    if op.bodies:
        loop = any(body.kind in ("scan", "while") for body in op.bodies)
        return "loop" if loop else "branches"
    if op.axes:
        return "collective"
    return "product" if is_product(op.name) else "other"


def _readers(ops: Sequence[LocalOp]) -> dict[int, list[LocalOp]]:
    readers: dict[int, list[LocalOp]] = {}
    for op in ops:
        for operand in op.operands:
            if operand != CONSTANT:
                users = readers.setdefault(operand, [])
                if not users or users[-1] is not op:
                    users.append(op)
    return readers


def _can_read(user: LocalOp, op: LocalOp, rules: TargetRules) -> bool:
    """Whether an operation can compute what it reads by itself."""
    if user.axes or user.bodies or op.name == REORDER:
        return False
    if is_product(user.name):
        return op.name == "transpose" or rules.products_fuse
    if user.name in _READERS or is_elementwise(user.name):
        return True
    if user.name in MOVES:
        # A broadcast would compute it again for each copy.
        return user.name != "broadcast_in_dim" or op.name not in _EXPENSIVE
    return False


def combined(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Kernels of one scope, with the all-reduces that can be sent as one as one kernel."""
    joined = list(kernels)
    keys = dict.fromkeys(kernel.op.axes for kernel in joined if kernel.op.name == "all-reduce")
    for axes in keys:
        groups = _independent(joined, axes)
        if any(len(group) > 1 for group in groups):
            joined = _joined(joined, groups)
    return joined


def _independent(kernels: Sequence[Kernel], axes: Split) -> list[list[int]]:
    """All-reduces along axes, grouped by how many of them each depends on."""
    level_of: dict[int, int] = {}
    groups: dict[int, list[int]] = {}
    for index, kernel in enumerate(kernels):
        level = max([level_of.get(value, 0) for value in kernel.reads], default=0)
        if kernel.op.name == "all-reduce" and kernel.op.axes == axes:
            groups.setdefault(level, []).append(index)
            level += 1
        if level:
            for value in kernel.writes:
                level_of[value] = level
    return list(groups.values())


def _joined(kernels: Sequence[Kernel], groups: Sequence[Sequence[int]]) -> list[Kernel]:
    node = list(range(len(kernels)))
    joined: dict[int, Kernel] = {}
    for group in groups:
        if len(group) < 2:
            continue
        for index in group:
            node[index] = group[-1]
        joined[group[-1]] = together([kernels[index] for index in group])
    maker = {value: node[index] for index, kernel in enumerate(kernels) for value in kernel.writes}
    waits = [0] * len(kernels)
    waiting: dict[int, list[int]] = {}
    roots = [index for index in range(len(kernels)) if node[index] == index]
    for index in roots:
        kernel = joined.get(index, kernels[index])
        before = {maker[value] for value in kernel.reads if value in maker} - {index}
        waits[index] = len(before)
        for other in before:
            waiting.setdefault(other, []).append(index)
    ready = [index for index in roots if not waits[index]]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(joined.get(index, kernels[index]))
        for other in waiting.get(index, ()):
            waits[other] -= 1
            if not waits[other]:
                heapq.heappush(ready, other)
    return order
