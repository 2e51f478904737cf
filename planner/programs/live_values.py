"""What is alive while a scheduled HLO program runs.

Each array that an instruction makes is a buffer, from there to its last use. Instructions that
pass an array on make none: tuples, bitcasts, the carry of a loop, the second half of an
asynchronous pair. Some write over an operand that dies there: updates of slices, reductions across
devices, and fusions element by element. The program's arguments and results have memory of their
own all the time; everything else is temporary.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from isoshard.core.runtime.caches import cached
from isoshard.core.runtime.hlo_text import (
    Computation,
    HloModule,
    Instruction,
    arrays_of,
    tuple_elements,
)

from .buffer_sharing import may_share, written_over
from .hlo_costs import FREE, RUNS_OTHERS
from .layout_moves import read_in_any_order


@dataclasses.dataclass(eq=False)
class HloBuffer:
    """Memory of one array.

    Attributes:
        maker: the instruction that makes it; of an argument its parameter.
        bytes: how many; 0 in a memory that is not the device's main one.
        shape: sizes of its axes.
        dtype: as HLO names it.
        fixed: it is an argument or a result, which has its memory all the time.
    """

    maker: Instruction
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    fixed: bool = False


@dataclasses.dataclass(frozen=True)
class ProgramLiveness:
    """What is alive when.

    Attributes:
        arguments: bytes of all arguments.
        results: bytes of results that do not lie in an argument's memory.
        temporary: the most that is alive beside those.
        at: bytes alive, with arguments and results, while an instruction runs, by its name.
        peak: the instruction at which most is alive.
        alive: what is alive there.
    """

    arguments: int
    results: int
    temporary: int
    at: Mapping[str, int]
    peak: Instruction | None
    alive: tuple[HloBuffer, ...]

    @property
    def total(self) -> int:
        """All that is needed at the peak."""
        return self.arguments + self.results + self.temporary


Buffers = tuple[HloBuffer, ...]
_PASSES_ON = frozenset(
    ("bitcast", "opt-barrier", "optimization-barrier", "add-dependency", "copy-done", "tuple")
)
_NAMES_ONLY = frozenset(("tuple", "get-tuple-element", "bitcast"))


def liveness(
    module: HloModule, *, targets: bool = False, apart: frozenset[str] = frozenset()
) -> ProgramLiveness:
    """Follow a scheduled program's memory.

    Args:
        module: whose computations stand in the order in which they run.
        targets: the program is the host's and read as TPUs' and GPUs' compilers would have it:
            products read operands in any order (`layout_moves`), and an argument is not copied
            before it is written over.
        apart: names of results that take no operand's memory.
    """
    return _Walk(module, targets, apart).found()


class _Walk:
    """The way through a program, with what was found so far."""

    def __init__(self, module: HloModule, targets: bool, apart: frozenset[str]):
        self.module = module
        self.targets = targets
        self.apart = apart
        self.at: dict[str, int] = {}
        self.most = -1
        self.peak: Instruction | None = None
        self.alive: Buffers = ()

    def found(self) -> ProgramLiveness:
        entry = self.module.entry
        arguments = [_made(one, fixed=True) for one in entry.parameters]
        temporary = self._run(entry, arguments, 0, ())
        taken = self.module.aliased
        given = sum(buffer.bytes for one in arguments for buffer in one)
        own = sum(array.bytes for at, array in enumerate(entry.root.arrays) if at not in taken)
        at = {name: live + given + own for name, live in self.at.items()}
        return ProgramLiveness(given, own, temporary, at, self.peak, self.alive)

    def _run(self, inside: Computation, given: Sequence[Buffers], below: int, held: Buffers) -> int:
        """Run a computation: the most that is alive in it, beside the bytes `below`."""
        values = self._flow(inside, given)
        if inside is self.module.entry:
            for buffer in values[inside.root.name]:
                buffer.fixed = True
        spans = _Spans(inside, given, values)
        alive: dict[int, HloBuffer] = {}
        total, most = 0, 0
        for step, one in enumerate(inside.instructions.values()):
            for at in (-1, 0) if step == 0 else (step,):
                for buffer in spans.starting.get(at, ()):
                    if not buffer.fixed and spans.until[id(buffer)] >= 0:
                        alive[id(buffer)] = buffer
                        total += buffer.bytes
            now = total - self._reused(one, values, spans, step)
            inner = 0
            if one.opcode in RUNS_OTHERS:
                inner = self._inner(one, values, below + now, (*held, *alive.values()))
            live = below + now + inner
            self.at[one.name] = max(self.at.get(one.name, 0), live)
            if live > self.most and one.opcode not in FREE and not inner:
                self.most, self.peak = live, one
                self.alive = (*held, *alive.values())
            most = max(most, now + inner)
            for buffer in spans.ending.get(step, ()):
                if alive.pop(id(buffer), None) is not None:
                    total -= buffer.bytes
        return most

    def _flow(self, inside: Computation, given: Sequence[Buffers]) -> dict[str, Buffers]:
        """The buffers of each instruction's result."""
        values = {one.name: given[at] for at, one in enumerate(inside.parameters)}
        moves = read_in_any_order(self.module, inside) if self.targets else frozenset[str]()
        for one in inside.instructions.values():
            if one.name in moves or (self.targets and self._is_kept(inside, one)):
                values[one.name] = values[one.operands[0]]
            elif one.name not in values:
                values[one.name] = self._values(inside, one, values)
        return values

    def _is_kept(self, inside: Computation, one: Instruction) -> bool:
        """Whether it is the host's copy of an argument that is written over before a last use."""
        entry = inside is self.module.entry and one.opcode == "copy"
        return entry and one.operands[0] in {given.name for given in inside.parameters}

    def _inner(
        self, one: Instruction, values: Mapping[str, Buffers], below: int, held: Buffers
    ) -> int:
        """The most that the computations of an instruction need beside what is alive."""
        bodies = [self.module.computations[name] for name in one.called]
        operands = [values[name] for name in one.operands if name in values]
        if one.opcode == "while":
            carried = operands[0]
            mine = sum(buffer.bytes for buffer in _once(carried) if not buffer.fixed)
            known = set(map(id, carried))
            outside = tuple(buffer for buffer in held if id(buffer) not in known)
            return max(0, self._run(bodies[0], [carried], below - mine, outside) - mine)
        if one.opcode == "conditional":
            pairs = zip(bodies, operands[1:], strict=False)
            return max((self._extra(body, [made], below, held) for body, made in pairs), default=0)
        if one.opcode == "call":
            return self._extra(bodies[0], operands, below, held)
        return 0

    def _extra(self, body: Computation, given: Sequence[Buffers], below: int, held: Buffers) -> int:
        frozen = [tuple(dataclasses.replace(b, fixed=True) for b in one) for one in given]
        return self._run(body, frozen, below, held)

    def _values(
        self, inside: Computation, one: Instruction, values: Mapping[str, Buffers]
    ) -> Buffers:
        """The buffers of an instruction's result."""
        operands = [values.get(name, ()) for name in one.operands]
        if one.opcode == "tuple":
            return tuple(buffer for operand in operands for buffer in operand)
        if one.opcode == "get-tuple-element":
            return self._element(inside, one, operands[0])
        if one.opcode in _PASSES_ON and operands:
            count = len(one.arrays)
            passed = operands[0]
            return passed[:count] if one.opcode != "copy-done" else passed[:1]
        if one.opcode == "while" and len(operands[0]) == len(one.arrays):
            return operands[0]
        if one.opcode in ("dynamic-update-slice", "scatter") and operands[0]:
            return operands[0][: len(one.arrays)]
        if one.opcode.endswith("-done") and operands:
            return operands[0][-len(one.arrays) :]
        return _written(self.module, one, operands)

    def _element(self, inside: Computation, one: Instruction, whole: Buffers) -> Buffers:
        index = int(one.attributes.partition("index=")[2].partition(",")[0])
        source = inside.instructions[one.operands[0]]
        start = places_in(source.shape)[index]
        return whole[start : start + len(one.arrays)]

    def _reused(
        self, one: Instruction, values: Mapping[str, Buffers], spans: _Spans, step: int
    ) -> int:
        """Bytes of operands that die here and whose memory the result takes."""
        if one.name in self.apart or not may_share(self.module, one):
            return 0
        taken = {id(buffer) for name in one.operands for buffer in values.get(name, ())}
        dying = [b for b in spans.ending.get(step, ()) if id(b) in taken and not b.fixed]
        total = 0
        for made in spans.starting.get(step, ()):
            match = next((buffer for buffer in dying if buffer.bytes == made.bytes), None)
            if match is not None and not made.fixed and made.maker is one:
                dying.remove(match)
                total += made.bytes
        return total


class _Spans:
    """From when to when each buffer is needed in one run of a computation."""

    def __init__(
        self, inside: Computation, given: Sequence[Buffers], values: Mapping[str, Buffers]
    ):
        steps = list(inside.instructions.values())
        self.uses: dict[int, list[int]] = {}
        for step, one in enumerate(steps):
            if one.opcode not in _NAMES_ONLY:
                for buffer in _once(b for name in one.operands for b in values.get(name, ())):
                    self.uses.setdefault(id(buffer), []).append(step)
        self.end = len(steps)
        self.returned = {id(buffer) for buffer in values[inside.root.name]}
        self.until: dict[int, int] = {}
        self.starting: dict[int, list[HloBuffer]] = {}
        self.ending: dict[int, list[HloBuffer]] = {}
        for buffer in _once(b for one in given for b in one):
            self._note(buffer, -1)
        for step, one in enumerate(steps):
            for buffer in _once(values[one.name]):
                if buffer.maker is one and id(buffer) not in self.until:
                    self._note(buffer, step)

    def _last(self, buffer: HloBuffer, made: int) -> int:
        if id(buffer) in self.returned or buffer.fixed:
            return self.end
        return max(self.uses.get(id(buffer), [made]))

    def _note(self, buffer: HloBuffer, start: int) -> None:
        last = self._last(buffer, start)
        self.until[id(buffer)] = last
        self.starting.setdefault(start, []).append(buffer)
        self.ending.setdefault(last, []).append(buffer)


@cached(4096)
def places_in(shape: str) -> tuple[int, ...]:
    """Of each element of a tuple, how many arrays there are before it.

    Args:
        shape: text of the tuple's.
    """
    counts = [len(arrays_of(part)) for part in tuple_elements(shape)]
    return (0, *itertools.accumulate(counts))


def _made(one: Instruction, fixed: bool = False) -> Buffers:
    return tuple(
        HloBuffer(one, array.bytes if array.space == 0 else 0, array.sizes, array.dtype, fixed)
        for array in one.arrays
    )


def _written(module: HloModule, one: Instruction, operands: Sequence[Buffers]) -> Buffers:
    """New buffers, but for results that are written over an operand."""
    made = list(_made(one))
    for result, operand in written_over(module, one):
        if operand < len(operands) and len(operands[operand]) == 1 and result < len(made):
            made[result] = operands[operand][0]
    return tuple(made)


def _once(buffers: Iterable[HloBuffer]) -> Buffers:
    return tuple({id(buffer): buffer for buffer in buffers}.values())
