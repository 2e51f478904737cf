"""From a recorded step to its replay: bind every input and every result.

Each input of the recorded program is bound to an argument, a gradient, or a storage that outlives
the step; each result is written to such a storage or becomes a new tensor. Anything else raises
`CaptureError`.

With `repeat`, equal layers are compiled as loops (`rolled_step`). State that such a program reads
and replaces in all layers, or only reads, is bound as one `StackedMemory`; every other binding is
kept, with its index in the rolled program.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
from collections.abc import Sequence
from typing import Any, Literal

import jax
import torch

from isoshard.core.errors import CaptureError
from isoshard.core.runtime import metrics
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine.compiling import input_placement, program
from isoshard.torch_bridge.engine.compiling.layout_constraints import same
from isoshard.torch_bridge.engine.compiling.padded_blocks import padded
from isoshard.torch_bridge.engine.compiling.rolled_plan import (
    EqualMemory,
    NotRolled,
    rolled_program,
)
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.memory_log import visible
from isoshard.torch_bridge.engine.recording.recipes import RECIPES, Check
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Storage, Taken, Value

from .bindings import Argument, Bound, Computed, Gradient, HostOperand, New, SharedMemory, View
from .donated_state import StackedMemory
from .replay import Replay
from .side_effects import Rebounds
from .step_gradients import is_dropped
from .step_recording import Recording, makers

Repeat = Literal["auto", "always"] | None


@dataclasses.dataclass(frozen=True)
class RunAs:
    """How a step is run.

    Attributes:
        plan: what was compiled.
        program: the executable.
        sources: for each input, where it is found.
        targets: which result is written to which place.
        made: the tensors made anew.
    """

    plan: program.CompileRequest
    program: program.Program
    sources: list[Any]
    targets: list[tuple[int, Any]]
    made: list[Computed | SharedMemory]


def rolled_step(
    plan: program.CompileRequest,
    arrays: Sequence[jax.Array],
    sources: Sequence[Any],
    targets: Sequence[tuple[int, Any]],
    made: Sequence[Computed | SharedMemory],
    where: str,
    repeat: Repeat,
) -> RunAs | None:
    """Compile a step with its equal layers as loops.

    Args:
        plan: of the step.
        arrays: its inputs.
        sources: for each input, where it is found.
        targets: which result is written to which place.
        made: the tensors made anew.
        where: the step's line, under which the metrics note what became of it.
        repeat: "auto" makes no loops that would copy too much.

    Returns:
        How it is run; None if its layers stay as they are.
    """
    times = collections.Counter([*(n for n, _ in targets), *(mark.number for mark in made)])
    written = {id(place): n for n, place in targets if times[n] == 1}
    touched = {id(place) for _, place in targets}
    donated = set(plan.donated)
    memory = {n: source for n, source in enumerate(sources) if isinstance(source, Storage)}
    replaced = {n: written[id(m)] for n, m in memory.items() if id(m) in written and n in donated}
    read = [n for n, m in memory.items() if id(m) not in touched and n not in donated]
    try:
        found, arrangement = rolled_program(plan, arrays, replaced, read, bounded=repeat == "auto")
    except NotRolled as error:
        metrics.record_repeat(where, f"not rolled: {error}")
        return None
    metrics.record_repeat(where, arrangement.text)
    stacks = {
        one.inputs: StackedMemory([sources[n] for n in one.inputs], one.placed, one.whole)
        for one in arrangement.inputs
        if isinstance(one, EqualMemory)
    }
    numbers = {n: number for number, n in enumerate(arrangement.results) if isinstance(n, int)}
    return RunAs(
        arrangement.plan,
        found,
        [
            stacks[n.inputs] if isinstance(n, EqualMemory) else sources[n]
            for n in arrangement.inputs
        ],
        [
            *[(numbers[n], place) for n, place in targets if n in numbers],
            *[
                (number, stacks[one.inputs])
                for number, one in enumerate(arrangement.results)
                if isinstance(one, EqualMemory)
            ],
        ],
        [dataclasses.replace(mark, number=numbers[mark.number]) for mark in made],
    )


def checked_repeat(repeat: Any) -> Repeat:
    """What `repeat` says.

    Raises:
        ValueError: it is neither None, "auto" nor "always".
    """
    if repeat is None or (isinstance(repeat, str) and repeat in ("auto", "always")):
        return repeat
    raise ValueError(
        f"repeat={repeat!r} is not known; it is None, and layers are compiled as they are, "
        '"auto", and equal ones are compiled once if that makes the program no slower, or '
        '"always": xs.compile(step, repeat="auto")'
    )


class Assembly:
    """A replay in the making.

    Args:
        recording: the step, recorded.
        where: the step's line, for messages.
        repeat: "auto" or "always" to compile equal layers as loops.

    Attributes:
        before: the gradient that each owner had before the step.
        after: the one that each has after it.
        made: the tensors that each run makes anew, with their values; and the number of the memory
            that several of them share, else -1.
        written: memory from before the step that it gives new values.
    """

    def __init__(self, recording: Recording, where: str, repeat: Repeat = None):
        """Find the results that are wanted."""
        self._recording = recording
        self._where = where
        self._repeat: Repeat = repeat
        gradients = [gradient for _, gradient in recording.snapshot.gradients]
        self.before = [None if is_dropped(one) else one for one in gradients]
        self._dropped: list[int] = []
        self.after = self._gradients_to_keep()
        self._leaves = recording.leaves
        self._rebound = recording.rebound
        self.made: list[tuple[lazy_tensor.LazyTensor, Value, int]] = []
        self._numbers: dict[int, int] = {}
        with recording.on_tape():
            self._note_made()
            self.written = self._find_written()

    def _gradients_to_keep(self) -> list[Any]:
        """The gradients that each owner has after the step.

        A step that throws gradients away before it computes them, and updates the parameter, needs
        none of the last call: those stay inside the program.
        """
        kept = []
        for number, tensor in enumerate(self._recording.tensors):
            gradient = tensor.grad
            inside = isinstance(gradient, lazy_tensor.LazyTensor) and not self._recording.is_outer(
                gradient
            )
            if inside and tensor in self._recording.zeroing and self._recording.is_written(tensor):
                gradient = tensor.grad = None
                self._dropped.append(number)
            kept.append(gradient)
        return kept

    def _note_made(self) -> None:
        """Number the tensors that each run makes anew."""
        found: dict[int, lazy_tensor.LazyTensor] = {}
        bound = [tensor for one in self._rebound for tensor in one.now]
        checked = [tensor for tensor, _ in self._recording.host.deferred]
        for leaf in (*self._leaves, *self.after, *bound, *checked):
            if isinstance(leaf, lazy_tensor.LazyTensor) and not self._recording.is_outer(leaf):
                found[id(leaf)] = leaf
        storages = [id(tensor._storage) for tensor in found.values()]
        memories = {storage: number for number, storage in enumerate(dict.fromkeys(storages))}
        for tensor in found.values():
            storage = tensor._storage
            shared = storages.count(id(storage)) > 1
            value = self._own_result(storage.value if shared else lazy_tensor.read(tensor))
            self._numbers[id(tensor)] = len(self.made)
            self.made.append((tensor, value, memories[id(storage)] if shared else -1))

    def _own_result(self, value: Value) -> Value:
        """A constant becomes a result by a copy."""
        return value if self._recording.is_computed(value) else same(self._recording.tape, value)

    def _find_written(self) -> list[Storage]:
        """Storages from before the step that now have a value computed in it."""
        found = []
        for storage, first in self._recording.log.storages.values():
            if visible(storage) is not first:
                # Another tensor's memory may have been copied into it.
                storage.value = self._own_result(storage.value)
                self._recording.log.wrote(storage)
                found.append(storage)
        return found

    def plan(self) -> tuple[program.CompileRequest, set[int]]:
        """The program of the step, and the results in it that nothing accounts for."""
        tape = self._recording.tape
        kept = {storage.value.slot for storage in self.written}
        for tensor, value, _ in self.made:  # a view of a result is returned without the whole
            kept |= {value.slot, tensor._storage.value.slot}
        plan = program.plan_of(tape)
        if not kept.issuperset(plan.live):
            gc.collect()
            plan = program.plan_of(tape)
        return plan, set(plan.live) - kept

    def refuse(self, escaped: set[int]) -> None:
        """Raise for tensors that somebody keeps.

        Raises:
            CaptureError: always.
        """
        made = makers(self._recording.tape)
        names = ", ".join(made[slot] for slot in sorted(escaped)[:5])
        raise CaptureError(
            f"{self._where}: {len(escaped)} tensors computed inside the compiled step outlive it "
            f"without being returned (results of {names}{', ..' if len(escaped) > 5 else ''}); a "
            "replay could not renew them. Return them from the step (a dataclass after "
            "torch.utils._pytree.register_dataclass), or do not store them."
        )

    def settle(self, plan: program.CompileRequest) -> list[Value | Taken]:
        """Say which results a program gives, and which of its inputs they may overwrite.

        Args:
            plan: the program; changed.

        Returns:
            Its inputs.
        """
        recording = self._recording
        wanted = {storage.value.slot: storage.value.layout for storage in self.written}
        wanted |= {value.slot: value.layout for _, value, _ in self.made}
        plan.live, plan.wanted = tuple(wanted), tuple(wanted.values())
        inputs = recording.tape.inputs()
        changed = {id(storage) for storage in self.written}
        firsts = {id(f): s for s, f in recording.log.storages.values() if id(s) in changed}
        plan.donated = tuple(
            position for position, value in enumerate(inputs) if id(value) in firsts
        )
        return inputs

    def replay(self, plan: program.CompileRequest) -> Replay:
        """Compile the program and describe its surroundings."""
        recording, tape = self._recording, self._recording.tape
        inputs = self.settle(plan)
        sources = self._sources(inputs)
        numbers = {slot: number for number, slot in enumerate(plan.live)}
        targets = [(numbers[one.value.slot], self._place(one)) for one in self.written]
        made = [self._made_mark(*one, plan.live) for one in self.made]
        outputs = [self._mark(leaf) for leaf in self._leaves]
        gradients = self._gradient_marks()
        bound = [(one, [self._mark(leaf) for leaf in one.now]) for one in self._rebound]
        also = {*tape.marks, *plan.wanted} - {layout_numbers.UNPLACED}
        arrays = input_placement.place(inputs, also)
        plan.placed = tuple(value.layout for value in inputs)
        constants = {id(upload) for upload in recording.log.uploads}
        constants -= recording.host.operands.keys()
        sources = [
            value.array if id(value) in constants else source
            for value, source in zip(inputs, sources, strict=True)
        ]
        found = None
        if self._repeat is not None:
            found = rolled_step(
                plan, padded(arrays), sources, targets, made, self._where, self._repeat
            )
        if found is None:
            found = RunAs(plan, program.program_of(plan, padded(arrays)), sources, targets, made)
        checks = _checks(tape)
        own = {id(one): one for one in sources if isinstance(one, Storage)}
        own |= {id(one): one for _, one in targets if isinstance(one, Storage)}
        state = None
        if self._rebound:
            state = Rebounds(self._rebound, own.values(), recording.arguments)
        touched = set(recording.log.storages)
        cleared = {
            id(tensor)
            for tensor, after in zip(recording.tensors, self.after, strict=True)
            if after is None or tensor in recording.zeroing
        }
        recording.put_back()
        recording.snapshot.restore_gradients()
        draws = recording.random.draws()
        recording.random.restore()
        tape.forget()
        recording.log.clear()
        return Replay(
            found.plan,
            found.program,
            found.sources,
            found.targets,
            recording.owners,
            gradients,
            self._dropped,
            found.made,
            recording.table,
            list(tape.scalars),
            draws,
            recording.host,
            pytree.tree_unflatten(outputs, recording.structure),
            recording.guard(touched, cleared),
            recording.numbers.written,
            state,
            bound,
            checks,
            [(self._numbers[id(tensor)], check) for tensor, check in recording.host.deferred],
            recording.turned,
        )

    def _sources(self, values: Sequence[Value | Taken]) -> list[Any]:
        """Where a replay finds inputs: at a place, or here, if one is a constant."""
        log, operands = self._recording.log, self._recording.host.operands
        memory: dict[int, Storage] = {}
        for storage, first in log.storages.values():  # a clone may begin with the same value
            memory.setdefault(id(first), storage)
        uploads = set(map(id, log.uploads))
        found: list[Any] = []
        for value in values:
            if id(value) in memory:
                found.append(self._place(memory[id(value)]))
            elif id(value) in operands:
                found.append(HostOperand(operands[id(value)][1]))
            elif id(value) in uploads:
                found.append(value.array)
            else:
                raise CaptureError(
                    f"{self._where}: a compiled step reads a value of shape {value.array.shape} "
                    "that belongs to no tensor alive before the step; make it an argument"
                )
        return found

    def _place(self, storage: Storage) -> Any:
        return self._places.get(id(storage), storage)

    @functools.cached_property
    def _places(self) -> dict[int, Argument | Gradient | Bound]:
        """The memory of arguments, gradients and state from before the step, by id."""
        found: dict[int, Argument | Gradient | Bound] = {}
        for number, tensor in reversed([*enumerate(self._state)]):
            found[id(tensor._storage)] = Bound(number)
        for number, gradient in reversed([*enumerate(self.before)]):
            if isinstance(gradient, lazy_tensor.LazyTensor):
                found[id(gradient._storage)] = Gradient(number)
        for number, tensor in reversed([*enumerate(self._recording.arguments)]):
            found[id(tensor._storage)] = Argument(number)
        return found

    @property
    def _state(self) -> list[lazy_tensor.LazyTensor]:
        """What the names held that the step binds anew."""
        return [tensor for one in self._rebound for tensor in one.before]

    def _made_mark(
        self, tensor: lazy_tensor.LazyTensor, value: Value, memory: int, live: tuple[int, ...]
    ) -> Computed | SharedMemory:
        number = live.index(value.slot)
        differentiable = id(tensor) in self._recording.differentiable
        if memory < 0:
            return Computed(number, tensor._aval, differentiable)
        offset = int(tensor.storage_offset())
        whole = tensor._storage.aval
        return SharedMemory(
            memory, number, whole, tensor._aval, tensor._chain, offset, differentiable
        )

    def _gradient_marks(self) -> list[tuple[int, Any]]:
        """Whose `.grad` is another tensor after the step, and which."""
        return [
            (number, self._mark(after))
            for number, (before, after) in enumerate(zip(self.before, self.after, strict=True))
            if after is not before
        ]

    def _mark(self, leaf: Any) -> Any:
        """What stands for a tensor in a result."""
        if not isinstance(leaf, lazy_tensor.LazyTensor):
            return leaf
        if id(leaf) in self._numbers:
            return New(self._numbers[id(leaf)])
        for number, argument in enumerate(self._recording.arguments):
            if argument is leaf:
                return Argument(number)
        for number, gradient in enumerate(self.before):
            if gradient is leaf:
                return Gradient(number)
        for number, tensor in enumerate(self._state):
            if tensor is leaf:
                return Bound(number)
        place = self._place(leaf._storage)
        if isinstance(place, Argument | Gradient | Bound):
            offset = int(leaf.storage_offset())
            differentiable = id(leaf) in self._recording.differentiable
            return View(place, leaf._aval, leaf._chain, offset, differentiable)
        return leaf  # it views memory that outlives the step, and shows each new value


def _checks(tape: Tape) -> list[tuple[Check, list[Any]]]:
    """What looks at floats that change between replays."""
    found, taken = [], 0
    for entry in tape.program:
        if not isinstance(entry[0], int):
            continue
        recipe = RECIPES[entry[0]]
        floats = tape.scalars[taken : taken + recipe.lifted]
        taken += recipe.lifted
        if recipe.check is not None and any(type(one) is torch.SymFloat for one in floats):
            found.append((recipe.check, floats))
    return found


def line_of(step: Any) -> str:
    """Where a step is defined, for messages that name no line inside it."""
    code = getattr(getattr(step, "__func__", step), "__code__", None)
    if code is None and isinstance(step, torch.nn.Module):
        code = type(step).forward.__code__
    if code is None:
        return getattr(step, "__name__", type(step).__name__)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
