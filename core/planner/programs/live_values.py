"""What is alive while a scheduled HLO program runs.

Each array that an instruction makes is a buffer, from there to its last use. Instructions that
pass an array on make none: tuples, bitcasts, the carry of a loop, the second half of an
asynchronous pair. Some write over an operand that dies there: updates of slices, reductions across
devices, and fusions element by element. The program's arguments and results have memory of their
own all the time; everything else is temporary.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence

from isoshard.core.runtime.hlo_collectives import tuple_parts

from .hlo_costs import FREE, RUNS_OTHERS
from .hlo_text import Computation, HloModule, Instruction, arrays_of
from .target_rewrites import joined_reductions


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
_IN_PLACE = frozenset(
    ("dynamic-update-slice", "scatter", "sort", "all-reduce", "all-reduce-start", "while")
)
_ELEMENTWISE = frozenset(
    "abs add and atan2 bitcast bitcast-convert cbrt ceil clamp compare convert cosine divide erf "
    "exponential exponential-minus-one floor is-finite log log-plus-one logistic maximum minimum "
    "multiply negate not or power reduce-precision remainder round-nearest-even rsqrt select sign "
    "sine sqrt subtract tanh xor".split()
)
_MOVES = frozenset(("broadcast", "iota", "reshape", "transpose", "copy"))
_WITHIN = frozenset(("parameter", "constant", "tuple", "partition-id"))
_NAMES_ONLY = frozenset(("tuple", "get-tuple-element", "bitcast"))
_SOURCES = {False: 1, True: 2}
"""From so many arrays of its size, at most, something is made again rather than kept: on GPUs, and
where products make their operands (TPUs). A sum along all layers is not made again at each."""

_SMALL = 8
"""A source that many times smaller than what is made of it may as well be kept."""


def liveness(module: HloModule, *, fused: bool = False, dots: bool = False) -> ProgramLiveness:
    """Follow a scheduled program's memory.

    Args:
        module: whose computations stand in the order in which they run.
        fused: what is made element by element is made again where that saves memory, as TPUs' and
            GPUs' compilers do when they fuse; the text of theirs has that done already.
        dots: with `fused`, products may make their operands so, too, as on TPUs.
    """
    return _Walk(module, fused, dots).found()


class _Walk:
    """The way through a program, with what was found so far."""

    def __init__(self, module: HloModule, fused: bool, dots: bool):
        self.module = module
        self.dots = dots
        self.fused = fused
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
        spans = _Spans(self.module, inside, given, values, self.fused, self.dots)
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
        for one in inside.instructions.values():
            if one.name not in values:
                values[one.name] = self._values(inside, one, values)
        return values

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
        start = _starts(source.shape)[index]
        return whole[start : start + len(one.arrays)]

    def _reused(
        self, one: Instruction, values: Mapping[str, Buffers], spans: _Spans, step: int
    ) -> int:
        """Bytes of operands that die here and whose memory the result takes."""
        if not may_share(self.module, one):
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
    """From when to when each buffer is needed in one run of a computation.

    With `fused`, a buffer that is made element by element from others is stored only where an
    instruction needs it whole, as long as those others are alive: compilers compute it again
    inside the fusions that use it.
    """

    def __init__(
        self,
        module: HloModule,
        inside: Computation,
        given: Sequence[Buffers],
        values: Mapping[str, Buffers],
        fused: bool,
        dots: bool,
    ):
        self.module = module
        self.dots = dots
        self.values = values
        self.steps = list(inside.instructions.values())
        self.uses: dict[int, list[int]] = {}
        for step, one in enumerate(self.steps):
            if one.opcode not in _NAMES_ONLY:
                for buffer in _once(b for name in one.operands for b in values.get(name, ())):
                    self.uses.setdefault(id(buffer), []).append(step)
        self.end = len(self.steps)
        self.returned = {id(buffer) for buffer in values[inside.root.name]}
        self.until: dict[int, int] = {}
        self.origins: dict[int, frozenset[int]] = {}
        self.spans: dict[int, tuple[HloBuffer, int, int]] = {}
        for buffer in _once(b for one in given for b in one):
            self._note(buffer, -1, self._last(buffer, -1))
        joined = joined_reductions(module, inside) if fused else frozenset[str]()
        for step, one in enumerate(self.steps):
            for buffer in _once(values[one.name]):
                if one.name in joined and buffer.maker is one:
                    self._note(buffer, step, step)  # its operand is added to another's
                elif buffer.maker is one and id(buffer) not in self.until:
                    if not (fused and self._made_again(buffer, one, step)):
                        self._note(buffer, step, self._last(buffer, step))
        self.starting: dict[int, list[HloBuffer]] = {}
        self.ending: dict[int, list[HloBuffer]] = {}
        for buffer, start, last in self.spans.values():
            self.starting.setdefault(start, []).append(buffer)
            self.ending.setdefault(last, []).append(buffer)

    def _last(self, buffer: HloBuffer, made: int) -> int:
        if id(buffer) in self.returned or buffer.fixed:
            return self.end
        return max(self.uses.get(id(buffer), [made]))

    def _note(self, buffer: HloBuffer, start: int, end: int) -> None:
        self.spans[id(buffer)] = (buffer, start, end)
        self.until[id(buffer)] = end

    def _made_again(self, buffer: HloBuffer, one: Instruction, step: int) -> bool:
        """Note a buffer that is stored only where it is needed whole; False if it is not such."""
        if id(buffer) in self.returned or buffer.fixed or not is_elementwise(self.module, one):
            return False
        sources = [b for name in one.operands for b in self.values.get(name, ())]
        large = [b for b in sources if b.bytes * _SMALL > buffer.bytes]
        origins = frozenset(o for b in large for o in self.origins.get(id(b), {id(b)}))
        if len(origins) > _SOURCES[self.dots]:
            return False
        self.origins[id(buffer)] = origins
        until = min((self.until.get(id(b), self.end) for b in large), default=self.end)
        uses = self.uses.get(id(buffer), [])
        whole = [at for at in uses if not _reads_elements(self.module, self.steps[at], self.dots)]
        if uses and max(uses) > until and not whole:
            dying = [b for b in large if self.until.get(id(b), self.end) < max(uses)]
            kept = all(id(b) in self.spans for b in dying)
            if kept and sum(b.bytes for b in dying) < buffer.bytes:
                until = max(uses)
                for b in dying:
                    self._note(b, self.spans[id(b)][1], until)
        late = [at for at in uses if at > until]
        if late:
            self._note(buffer, max(step, min([*whole, until + 1])), max(late + whole))
        elif whole:
            self._note(buffer, min(whole), max(whole))
        self.until[id(buffer)] = max(until, self.until.get(id(buffer), 0))
        return True


@functools.lru_cache(maxsize=4096)
def _starts(shape: str) -> tuple[int, ...]:
    """Of each element of a tuple, how many arrays there are before it."""
    counts = [len(arrays_of(part)) for part in tuple_parts(shape)]
    return (0, *itertools.accumulate(counts))


def _made(one: Instruction, fixed: bool = False) -> Buffers:
    return tuple(
        HloBuffer(one, array.bytes if array.space == 0 else 0, array.sizes, array.dtype, fixed)
        for array in one.arrays
    )


def _written(module: HloModule, one: Instruction, operands: Sequence[Buffers]) -> Buffers:
    """New buffers, but for results that are written over an operand."""
    made = list(_made(one))
    for result, operand in _in_place(module, one):
        if operand < len(operands) and len(operands[operand]) == 1 and result < len(made):
            made[result] = operands[operand][0]
    return tuple(made)


def _in_place(module: HloModule, one: Instruction) -> list[tuple[int, int]]:
    """Numbers of results and of the operands that they are written over."""
    pairs = re.search(r"output_to_operand_aliasing=\{(.*?)\}, ", one.attributes + ", ")
    if pairs:
        found = re.finditer(r"\{(\d*)\}: \((\d+),", pairs[1])
        return [(int(pair[1] or 0), int(pair[2])) for pair in found]
    if one.opcode != "fusion" or not one.called:
        return []
    body = module.computations[one.called[0]]
    roots = [body.root]
    if body.root.opcode == "tuple":
        roots = [body.instructions[name] for name in body.root.operands]
    numbers = {parameter.name: at for at, parameter in enumerate(body.parameters)}
    found = []
    for at, root in enumerate(roots):
        while root.opcode == "bitcast":
            root = body.instructions[root.operands[0]]
        if root.opcode in ("dynamic-update-slice", "scatter"):
            source = body.instructions[root.operands[0]]
            while source.opcode == "bitcast":
                source = body.instructions[source.operands[0]]
            if source.name in numbers:
                found.append((at, numbers[source.name]))
    return found


def may_share(module: HloModule, one: Instruction) -> bool:
    """Whether a result may take the memory of an operand of its size."""
    if one.opcode in _ELEMENTWISE or one.opcode in _IN_PLACE:
        return True
    if one.opcode != "fusion" or not one.called or "kind=kInput" in one.attributes:
        return False
    body = module.computations[one.called[0]]
    allowed = _ELEMENTWISE | {"parameter", "constant", "broadcast", "tuple", "iota", "reshape"}
    return all(inner.opcode in allowed for inner in body.instructions.values())


def is_elementwise(module: HloModule, one: Instruction) -> bool:
    """Whether a result is made element by element, or is a copy in another order."""
    if one.opcode in _ELEMENTWISE | _MOVES:
        return True
    if one.opcode != "fusion" or not one.called:
        return False
    body = module.computations[one.called[0]]
    allowed = _ELEMENTWISE | _MOVES | _WITHIN
    return all(inner.opcode in allowed for inner in body.instructions.values())


def _reads_elements(module: HloModule, one: Instruction, dots: bool) -> bool:
    """Whether an operand of an instruction may be made inside of its fusion."""
    if dots and one.opcode in ("dot", "convolution"):
        return True
    if one.opcode in ("reduce", "dynamic-slice", "slice") or is_elementwise(module, one):
        return True
    if one.opcode != "fusion" or not one.called:
        return False
    body = module.computations[one.called[0]]
    allowed = _ELEMENTWISE | _MOVES | _WITHIN | {"reduce", "dynamic-slice", "slice", "pad"}
    return all(inner.opcode in allowed for inner in body.instructions.values())


def _once(buffers: Iterable[HloBuffer]) -> Buffers:
    return tuple({id(buffer): buffer for buffer in buffers}.values())
