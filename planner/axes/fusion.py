"""Which values get memory: chains of elementwise operations are one kernel.

A value is fused away if whoever reads it can compute it, and it is read in one kernel or cheap to
compute from one value. What only looks at the same bytes differently has its operand's memory. It
is the rule of XLA's fusion without its many cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from isoshard.core.runtime.flops import is_product
from isoshard.core.runtime.jaxprs import is_elementwise

from .combining import combined
from .common_expressions import CONSTANT
from .fused_kernels import MOVES, REDUCTIONS, FusedKernel
from .local_program import LocalOp, LocalProgram, LocalScope
from .operand_copies import REORDER
from .sibling_kernels import siblings_joined
from .target_rules import TargetRules

_SAME_BYTES = frozenset(
    "reshape squeeze expand_dims optimization_barrier name sharding_constraint reshard "
    "stop_gradient device_put copy bitcast_convert_type random_wrap random_unwrap result "
    "layout_constraint".split()
)
_READERS = REDUCTIONS | {"stack", "dynamic_update_slice"}
_PARTS = frozenset(("row", "slice", "dynamic_slice", "gather"))
"""What reads a part of what it is given."""
_EXPENSIVE = frozenset(
    "exp exp2 expm1 log log1p log2 tanh logistic erf erfc erf_inv pow rsqrt sqrt cbrt sin cos tan "
    "atan2 digamma lgamma random_bits threefry2x32 concatenate".split()
)

_AS_MUCH = 1.25
"""So many times its operand's bytes a copy in another order reads to compute it by itself."""


class Fusion:
    """Kernels of a program, and whose memory each value has.

    Args:
        program: of one device.
        rules: of the machine: what products compute themselves, and what is computed again.
    """

    def __init__(self, program: LocalProgram, rules: TargetRules) -> None:
        """Fuse a program."""
        self.program = program
        self.rules = rules
        self.same: dict[int, int] = {}
        """Value -> the one that has its memory."""
        self._sources: dict[int, dict[int, int]] = {}
        """Value without memory -> what it is computed of, with the bytes that are read of each."""
        self._flops: dict[int, float] = {}
        self._copied: set[int] = set()
        self.kernels = self._scope(program.scope, set(program.results))

    def memory(self, value: int) -> int:
        """The value whose memory a value has.

        Args:
            value: a local number.
        """
        while value in self.same:
            value = self.same[value]
        return value

    def _scope(self, scope: LocalScope, kept: set[int]) -> list[FusedKernel]:
        for inner, outer in scope.outside.items():
            if outer != CONSTANT and inner != outer and self.memory(outer) != inner:
                self.same[inner] = outer
        readers = _readers(scope.ops)
        kept = {*kept, *scope.results}
        for op in scope.ops:
            if op.name in _SAME_BYTES and not op.axes:
                for operand, result in zip(op.operands, op.results, strict=False):
                    if operand != CONSTANT and self._equal(operand, result):
                        self.same[result] = operand
                if op.results[0] in self.same and op.results[0] in kept:
                    kept.add(op.operands[0])
        fused = self._fused(scope.ops, readers, kept)
        kernels: list[FusedKernel] = []
        made: dict[int, FusedKernel] = {}
        for op in scope.ops:
            if op.bodies:
                inside = tuple(self._scope(body, set()) for body in op.bodies)
                reads = {*self._reads(op.operands), *self._read_inside(op.bodies)}
                kernels.append(FusedKernel(op, tuple(reads), op.results, 0.0, inside=inside))
                continue
            if all(one in self.same for one in op.results):
                if any(one in self._sources for one in op.operands):
                    for one in op.results:
                        self._sources[one] = self._reads(op.operands)
                continue
            reads = self._reads(op.operands)
            if op.name == REORDER and self.rules.joins_siblings:
                reads = self._sources_of_copy(reads, made)
            flops = op.flops + sum(self._flops.pop(one, 0.0) for one in op.operands)
            if op in fused:
                for one in op.results:
                    self._sources[one] = self._of_part(op, reads)
                self._flops[op.results[0]] = flops
                continue
            writes = () if op.name == "stack" else op.results
            kernels.append(FusedKernel(op, tuple(reads), writes, flops, sum(reads.values())))
            made.update(dict.fromkeys(writes, kernels[-1]))
        if self._copied:
            kernels = self._without_dead(kernels, {self.memory(one) for one in kept})
        if self.rules.joins_siblings:
            kernels = siblings_joined(self.program, kernels)
        return combined(kernels) if self.rules.joins_reductions else kernels

    def _sources_of_copy(
        self, reads: dict[int, int], made: dict[int, FusedKernel]
    ) -> dict[int, int]:
        """What a copy in another order reads: if it is no more, what its operand is made of."""
        bytes_ = self.program.bytes
        operand = next(iter(reads), CONSTANT)
        maker = made.get(operand) if len(reads) == 1 else None
        if maker is None or not is_elementwise(maker.op.name):
            return reads
        if sum([bytes_[one] for one in maker.reads]) > _AS_MUCH * bytes_[operand]:
            return reads
        self._copied.add(operand)
        return {one: bytes_[one] for one in maker.reads}

    def _without_dead(self, kernels: list[FusedKernel], kept: set[int]) -> list[FusedKernel]:
        """Kernels without those of which there are copies only."""
        read = kept.union(*[one.reads for one in kernels])
        gone = {one for one in self._copied if one not in read}
        return [one for one in kernels if not one.writes or not gone.issuperset(one.writes)]

    def _equal(self, operand: int, result: int) -> bool:
        return self.program.bytes[operand] == self.program.bytes[result]

    def _fused(
        self, ops: Sequence[LocalOp], readers: dict[int, list[LocalOp]], kept: set[int]
    ) -> set[LocalOp]:
        """Operations whose results get no memory; readers are decided before what they read."""
        found: set[LocalOp] = set()
        looked: set[LocalOp] = set()  # at by products, which read their operands in memory
        kernels: dict[LocalOp, LocalOp | None] = {}  # of what is fused; None: it is in several
        unread = self.same
        for op in reversed(ops):
            if op.axes or op.bodies or not self._can_be_fused(op):
                continue
            if any(one in kept or one in unread for one in op.results):
                continue
            users = [user for one in op.results for user in self._users(one, readers, kept)]
            if not users or any(
                user is None or user in looked or not _can_read(user, op, self.rules)
                for user in users
            ):
                continue
            within = {kernels.get(user, user) for user in users if user}
            in_one = len(within) == 1 and None not in within
            if len(users) > 1 and not in_one and not self._cheap(op):
                continue
            found.add(op)
            kernels[op] = within.pop() if in_one else None
            if not self.rules.products_fuse and any(is_product(one.name) for one in users if one):
                looked.add(op)
        return found

    def _can_be_fused(self, op: LocalOp) -> bool:
        if op.name == "gather":
            return self.rules.lookups_fuse
        return op.name in MOVES or is_elementwise(op.name)

    def _users(
        self, value: int, readers: dict[int, list[LocalOp]], kept: set[int]
    ) -> Iterable[LocalOp | None]:
        """Who reads a value, also by another look at its bytes; None: it has to be kept."""
        for user in readers.get(value, ()):
            if user.results and all(one in self.same for one in user.results):
                for one in user.results:
                    if one in kept:
                        yield None
                    yield from self._users(one, readers, kept)
            else:
                yield user

    def _cheap(self, op: LocalOp) -> bool:
        bytes_ = self.program.bytes
        read = sum(bytes_[one] for one in op.operands if one != CONSTANT)
        if op.name in _EXPENSIVE and not self.rules.computes_again:
            return False
        return read <= sum(bytes_[one] for one in op.results)

    def _of_part(self, op: LocalOp, reads: dict[int, int]) -> dict[int, int]:
        """What is read through an operation: of what it takes a part of, no more than that part."""
        if op.name not in _PARTS:
            return reads
        part = sum([self.program.bytes[one] for one in op.results])
        return {one: min(size, part) for one, size in reads.items()}

    def _reads(self, operands: Sequence[int]) -> dict[int, int]:
        """Values with memory that operands are, or are computed of, and the bytes read of each."""
        found: dict[int, int] = {}
        for one in operands:
            if one == CONSTANT:
                continue
            sources = self._sources.get(one)
            if sources is None:
                memory = self.memory(one)
                sources = {memory: self.program.bytes[memory]}
            for source, size in sources.items():
                found[source] = max(size, found.get(source, 0))
        return found

    def _read_inside(self, bodies: Sequence[LocalScope]) -> set[int]:
        """What bodies read of outside by other ways than operands: values brought into layouts."""
        found: set[int] = set()
        for body in bodies:
            for outer in body.outside.values():
                if outer != CONSTANT:
                    found.update(self._reads((outer,)))
        return found


def _readers(ops: Sequence[LocalOp]) -> dict[int, list[LocalOp]]:
    found: dict[int, list[LocalOp]] = {}
    for op in ops:
        for one in op.operands:
            if one != CONSTANT:
                users = found.setdefault(one, [])
                if not users or users[-1] is not op:
                    users.append(op)
    return found


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
