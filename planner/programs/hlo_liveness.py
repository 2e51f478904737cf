"""Liveness of a scheduled HLO program: the bytes alive at each instruction.

Each array that an instruction computes is a buffer, alive from there to its last use. Instructions
that pass an array on have no buffer of their own: tuples, bitcasts, the carry of a loop, the second
half of an asynchronous pair. Some overwrite an operand whose last use they are: updates of slices,
reductions across devices, and elementwise fusions. The program's arguments and results have memory
of their own all the time; everything else is temporary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from isoshard.core.kit import Computation, HloModule, Instruction, arrays_of, tuple_elements
from isoshard.planner.scheduling.kernels import Kernel
from isoshard.planner.scheduling.liveness import Liveness, live_bytes

from .hlo_costs import FREE, RUNS_OTHERS
from .hlo_kernels import may_share, written_over
from .hlo_layouts import read_in_any_order


@dataclasses.dataclass(eq=False)
class HloBuffer:
    """Memory of one array.

    Attributes:
        maker: the instruction that defines it; of an argument its parameter.
        bytes: how many; 0 in a memory that is not the device's main one.
        shape: sizes of its axes.
        dtype: as HLO names it.
        fixed: whether it is an argument or a result, which has its memory all the time.
    """

    maker: Instruction
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    fixed: bool = False


@dataclasses.dataclass(frozen=True)
class ProgramLiveness:
    """The liveness of a program.

    Attributes:
        arguments: bytes of all arguments.
        results: bytes of results that do not take an argument's memory.
        temporary: peak bytes of temporaries.
        at: bytes alive, with arguments and results, while an instruction runs, by its name.
        peak: the instruction at the peak.
        alive: the buffers alive there.
    """

    arguments: int
    results: int
    temporary: int
    at: Mapping[str, int]
    peak: Instruction | None
    alive: tuple[HloBuffer, ...]

    @property
    def total(self) -> int:
        """Bytes at the peak."""
        return self.arguments + self.results + self.temporary


Buffers = tuple[HloBuffer, ...]
_PASSES_ON = frozenset(
    ("bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "copy-done", "tuple")
)
_NAMES_ONLY = frozenset(("tuple", "get-tuple-element", "bitcast"))


def liveness(
    module: HloModule, *, targets: bool = False, unshared: frozenset[str] = frozenset()
) -> ProgramLiveness:
    """Compute the liveness of a scheduled program.

    Args:
        module: with computations in the order in which they run.
        targets: the program is the host's and read as TPUs' and GPUs' compilers would rewrite it:
            products read operands in any order (`hlo_layouts`), and an argument is not copied
            before it is overwritten.
        unshared: names of results that take no operand's memory.
    """
    return _LivenessWalk(module, targets, unshared).result()


@dataclasses.dataclass
class _Activation:
    """One run of a computation.

    Attributes:
        live: bytes of it.
        buffers: by id.
        inside: by the position of an instruction the runs of the computations that it calls, and
            the bytes and ids of its operands that these count as well.
    """

    live: Liveness
    buffers: Mapping[int, HloBuffer]
    inside: dict[int, list[tuple[_Activation, int, frozenset[int]]]]

    def alive(self, index: int) -> Buffers:
        """The buffers that are alive at an instruction."""
        return tuple(self.buffers[value] for value in self.live.alive(index))


class _LivenessWalk:
    """Translates the computations of a program to kernels, from the innermost out."""

    def __init__(self, module: HloModule, targets: bool, unshared: frozenset[str]):
        self.module = module
        self.targets = targets
        self.unshared = unshared
        self.at: dict[str, int] = {}
        self.most = -1
        self.peak: Instruction | None = None
        self.alive: Callable[[], Buffers] = tuple

    def result(self) -> ProgramLiveness:
        entry = self.module.entry
        arguments = [_new_buffers(row, fixed=True) for row in entry.parameters]
        run = self._run(entry, arguments)
        self._visit(run, 0, ())
        aliased = self.module.aliased
        argument_bytes = sum(buffer.bytes for buffers in arguments for buffer in buffers)
        result_bytes = sum(
            array.bytes for n, array in enumerate(entry.root.arrays) if n not in aliased
        )
        at = {name: live + argument_bytes + result_bytes for name, live in self.at.items()}
        return ProgramLiveness(
            argument_bytes, result_bytes, run.live.peak, at, self.peak, self.alive()
        )

    def _run(self, inside: Computation, arguments: Sequence[Buffers]) -> _Activation:
        """The memory of a computation for its arguments."""
        values = self._flow(inside, arguments)
        returned = values[inside.root.name]
        if inside is self.module.entry:
            for buffer in returned:
                buffer.fixed = True
        buffers: dict[int, HloBuffer] = {}
        ids: dict[int, int] = {}

        def ids_of(several: Iterable[HloBuffer]) -> tuple[int, ...]:
            result: dict[int, None] = {}
            for buffer in several:
                value = ids.setdefault(id(buffer), len(ids))
                buffers.setdefault(value, buffer)
                result[value] = None
            return tuple(result)

        kernels: list[Kernel] = []
        within: dict[int, list[tuple[_Activation, int, frozenset[int]]]] = {}
        inner: dict[int, int] = {}
        passed_in = set(ids_of(buffer for argument in arguments for buffer in argument))
        for index, row in enumerate(inside.instructions.values()):
            operands = [buffer for name in row.operands for buffer in values.get(name, ())]
            reads = () if row.opcode in _NAMES_ONLY else ids_of(operands)
            writes = ids_of(buffer for buffer in values[row.name] if buffer.maker is row)
            shares = row.name not in self.unshared and may_share(self.module, row)
            new = tuple(value for value in writes if value not in passed_in)
            kernels.append(Kernel(row, reads, new, in_place=shares))
            if row.opcode in RUNS_OTHERS:
                within[index] = list(self._bodies(row, values))
                needs = [
                    max(0, run.live.peak - carry_bytes) for run, carry_bytes, _ in within[index]
                ]
                inner[id(kernels[-1])] = max(needs, default=0)
        ends = ids_of(returned)
        read = {value for kernel in kernels for value in kernel.reads}.union(ends)
        fixed = {value for value, buffer in buffers.items() if buffer.fixed}
        live = live_bytes(
            kernels,
            [buffer.bytes for buffer in buffers.values()],
            fixed=fixed,
            ends=ends,
            ahead=[value for value in passed_in if value not in fixed and value in read],
            inner=inner,
        )
        return _Activation(live, buffers, within)

    def _visit(self, run: _Activation, below: int, outside: Buffers) -> None:
        """Record what is alive at each instruction, with the bytes `below` of its callers."""
        for index, kernel in enumerate(run.live.order):
            row, live = kernel.op, below + run.live.at[index]
            bodies = run.inside.get(index, ())
            needs = [max(0, body.live.peak - carry_bytes) for body, carry_bytes, _ in bodies]
            for body, carry_bytes, carry_ids in bodies:
                alive = (*outside, *run.alive(index))
                rest = tuple(buffer for buffer in alive if id(buffer) not in carry_ids)
                self._visit(body, live - max(needs) - carry_bytes, rest)
            self.at[row.name] = max(self.at.get(row.name, 0), live)
            if live > self.most and row.opcode not in FREE and not any(needs):
                self.most, self.peak = live, row
                self.alive = functools.partial(lambda n: (*outside, *run.alive(n)), index)

    def _flow(self, inside: Computation, arguments: Sequence[Buffers]) -> dict[str, Buffers]:
        """The buffers of each instruction's result."""
        values = {row.name: arguments[n] for n, row in enumerate(inside.parameters)}
        moves = read_in_any_order(self.module, inside) if self.targets else frozenset[str]()
        for row in inside.instructions.values():
            if row.name in moves or (self.targets and self._is_host_copy(inside, row)):
                values[row.name] = values[row.operands[0]]
            elif row.name not in values:
                values[row.name] = self._values(inside, row, values)
        return values

    def _is_host_copy(self, inside: Computation, row: Instruction) -> bool:
        """Whether it is the host's copy of an argument that is overwritten before its last use."""
        entry = inside is self.module.entry and row.opcode == "copy"
        return entry and row.operands[0] in {parameter.name for parameter in inside.parameters}

    def _bodies(
        self, row: Instruction, values: Mapping[str, Buffers]
    ) -> Iterator[tuple[_Activation, int, frozenset[int]]]:
        """Runs of the computations that an instruction calls, with bytes and ids of their carry."""
        bodies = [self.module.computations[name] for name in row.called]
        operands = [values[name] for name in row.operands if name in values]
        if row.opcode == "while":
            carry_bytes = sum(buffer.bytes for buffer in _distinct(operands[0]) if not buffer.fixed)
            yield self._run(bodies[0], operands[:1]), carry_bytes, frozenset(map(id, operands[0]))
        elif row.opcode == "conditional":
            for body, argument in zip(bodies, operands[1:], strict=False):
                yield self._run(body, [_frozen(argument)]), 0, frozenset()
        elif row.opcode == "call":
            yield self._run(bodies[0], list(map(_frozen, operands))), 0, frozenset()

    def _values(
        self, inside: Computation, row: Instruction, values: Mapping[str, Buffers]
    ) -> Buffers:
        """The buffers of an instruction's result."""
        operands = [values.get(name, ()) for name in row.operands]
        if row.opcode == "tuple":
            return tuple(buffer for operand in operands for buffer in operand)
        if row.opcode == "get-tuple-element":
            return self._element(inside, row, operands[0])
        if row.opcode in _PASSES_ON and operands:
            count = len(row.arrays)
            passed = operands[0]
            return passed[:count] if row.opcode != "copy-done" else passed[:1]
        if row.opcode == "while" and len(operands[0]) == len(row.arrays):
            return operands[0]
        if row.opcode in ("dynamic-update-slice", "scatter") and operands[0]:
            return operands[0][: len(row.arrays)]
        if row.opcode.endswith("-done") and operands:
            return operands[0][-len(row.arrays) :]
        return _written(self.module, row, operands)

    def _element(self, inside: Computation, row: Instruction, full: Buffers) -> Buffers:
        index = int(row.attributes.partition("index=")[2].partition(",")[0])
        source = inside.instructions[row.operands[0]]
        start = tuple_offsets(source.shape)[index]
        return full[start : start + len(row.arrays)]


@functools.lru_cache(maxsize=4096)
def tuple_offsets(shape: str) -> tuple[int, ...]:
    """The index of the first array of each element of a tuple."""
    counts = [len(arrays_of(chunk)) for chunk in tuple_elements(shape)]
    return (0, *itertools.accumulate(counts))


def _new_buffers(row: Instruction, fixed: bool = False) -> Buffers:
    return tuple(
        HloBuffer(row, array.bytes if array.space == 0 else 0, array.sizes, array.dtype, fixed)
        for array in row.arrays
    )


def _written(module: HloModule, row: Instruction, operands: Sequence[Buffers]) -> Buffers:
    """New buffers, except for results that overwrite an operand."""
    written = list(_new_buffers(row))
    for result, operand in written_over(module, row):
        if operand < len(operands) and len(operands[operand]) == 1 and result < len(written):
            written[result] = operands[operand][0]
    return tuple(written)


def _distinct(buffers: Iterable[HloBuffer]) -> Buffers:
    return tuple({id(buffer): buffer for buffer in buffers}.values())


def _frozen(buffers: Buffers) -> Buffers:
    """The buffers as fixed ones, which a called computation does not count."""
    return tuple(dataclasses.replace(buffer, fixed=True) for buffer in buffers)
