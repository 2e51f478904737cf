"""From a recorded step to its replay: bind every input and every result.

Each input of the recorded program is bound to an argument, a gradient, or a storage that outlives
the step; each result is written to such a storage or becomes a new tensor. Anything else raises
`CaptureError`.

With `repeat`, equal layers are compiled as loops (`rolled_step`). State that such a program reads
and replaces in all layers, or only reads, is bound as one `StackedState`; every other binding is
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
from isoshard.torch_bridge.engine.compiling.equal_floats import EqualFloats
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
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Storage, Taken, Value

from .bindings import (
    Argument,
    Computed,
    CpuOperand,
    Gradient,
    NewTensor,
    SharedStorage,
    StateTensor,
    View,
)
from .donated_state import StackedState
from .replay import Replay
from .side_effects import Rebindings
from .step_gradients import is_dropped
from .step_recording import Recording, op_names

Repeat = Literal["auto", "always"] | None


@dataclasses.dataclass(frozen=True)
class CompiledForm:
    """A compiled step, rolled or not.

    Attributes:
        plan: what was compiled.
        program: the executable.
        inputs: as of `Replay`.
        targets: as of `Replay`.
        created: the tensors that each run creates.
    """

    plan: program.CompileRequest
    program: program.Program
    inputs: list[Any]
    targets: list[tuple[int, Any]]
    created: list[Computed | SharedStorage]


def rolled_step(
    plan: program.CompileRequest,
    arrays: Sequence[jax.Array],
    inputs: Sequence[Any],
    targets: Sequence[tuple[int, Any]],
    new_tensors: Sequence[Computed | SharedStorage],
    line: str,
    repeat: Repeat,
) -> CompiledForm | None:
    """Compile a step with its equal layers as loops.

    Args:
        plan: of the step.
        arrays: its inputs.
        inputs: as of `Replay`.
        targets: as of `Replay`.
        new_tensors: the tensors that each run creates.
        line: the step's line, by which metrics record the outcome.
        repeat: "auto" makes no loops that would copy too much.

    Returns:
        The compiled step; None if its layers are not rolled.
    """
    uses = collections.Counter([*(n for n, _ in targets), *(ref.index for ref in new_tensors)])
    written = {id(binding): n for n, binding in targets if uses[n] == 1}
    targeted = {id(binding) for _, binding in targets}
    donated = set(plan.donated)
    memory = {n: binding for n, binding in enumerate(inputs) if isinstance(binding, Storage)}
    replaced = {n: written[id(m)] for n, m in memory.items() if id(m) in written and n in donated}
    read_only = [n for n, m in memory.items() if id(m) not in targeted and n not in donated]
    try:
        compiled, arrangement = rolled_program(
            plan, arrays, replaced, read_only, bounded=repeat == "auto"
        )
    except NotRolled as error:
        metrics.record_repeat(line, f"not rolled: {error}")
        return None
    metrics.record_repeat(line, arrangement.text)
    stacks = {
        group.inputs: StackedState(
            [inputs[n] for n in group.inputs], group.placed, group.stack_layout
        )
        for group in arrangement.inputs
        if isinstance(group, EqualMemory)
    }
    indices = {n: index for index, n in enumerate(arrangement.results) if isinstance(n, int)}
    return CompiledForm(
        arrangement.plan,
        compiled,
        [stacks[n.inputs] if isinstance(n, EqualMemory) else inputs[n] for n in arrangement.inputs],
        [
            *[(indices[n], binding) for n, binding in targets if n in indices],
            *[
                (index, stacks[group.inputs])
                for index, group in enumerate(arrangement.results)
                if isinstance(group, EqualMemory)
            ],
        ],
        [dataclasses.replace(ref, index=indices[ref.index]) for ref in new_tensors],
    )


def checked_repeat(repeat: Any) -> Repeat:
    """The argument `repeat`.

    Raises:
        ValueError: it is neither None, "auto" nor "always".
    """
    if repeat is None or (isinstance(repeat, str) and repeat in ("auto", "always")):
        return repeat
    raise ValueError(
        f'repeat must be None (layers are compiled one by one), "auto" (equal ones are compiled '
        'once, if the program is no slower) or "always", and got '
        f'{repeat!r}: xs.compile(step, repeat="auto")'
    )


class Assembly:
    """Builds the replay of a recorded step.

    Args:
        recording: the recorded step.
        line: the step's line, for messages.
        repeat: "auto" or "always" to compile equal layers as loops.

    Attributes:
        before: the gradient of each owner before the step.
        after: the gradient of each owner after the step.
        created: the tensors that each run creates, their values, and the index of the storage that
            several of them share, else -1.
        written: storages from before the step that it writes.
    """

    def __init__(self, recording: Recording, line: str, repeat: Repeat = None):
        """Find the results of the step."""
        self._recording = recording
        self._line = line
        self._repeat: Repeat = repeat
        gradients = [gradient for _, gradient in recording.training_state.gradients]
        self.before = [None if is_dropped(gradient) else gradient for gradient in gradients]
        self._dropped: list[int] = []
        self.after = self._returned_gradients()
        self._leaves = recording.leaves
        self._rebindings = recording.rebindings
        self.created: list[tuple[lazy_tensor.LazyTensor, Value, int]] = []
        self._indices: dict[int, int] = {}
        with recording.on_tape():
            self._add_created()
            self.written = self._find_written()

    def _returned_gradients(self) -> list[Any]:
        """The gradient of each owner after the step.

        The program does not return gradients of a step that clears them before it computes them and
        updates the parameter.
        """
        returned = []
        for index, tensor in enumerate(self._recording.tensors):
            gradient = tensor.grad
            is_new = isinstance(
                gradient, lazy_tensor.LazyTensor
            ) and not self._recording.existed_before(gradient)
            if (
                is_new
                and tensor in self._recording.cleared_gradients
                and self._recording.is_written(tensor)
            ):
                gradient = tensor.grad = None
                self._dropped.append(index)
            returned.append(gradient)
        return returned

    def _add_created(self) -> None:
        """List the tensors that each run creates."""
        created: dict[int, lazy_tensor.LazyTensor] = {}
        rebound = [tensor for rebinding in self._rebindings for tensor in rebinding.now]
        checked = [tensor for tensor, _ in self._recording.cpu_ops.deferred]
        printed = [tensor for line in self._recording.tape.printed for tensor in line.tensors]
        for leaf in (*self._leaves, *self.after, *rebound, *checked, *printed):
            if isinstance(leaf, lazy_tensor.LazyTensor) and not self._recording.existed_before(
                leaf
            ):
                created[id(leaf)] = leaf
        storages = [id(tensor._storage) for tensor in created.values()]
        memories = {storage: index for index, storage in enumerate(dict.fromkeys(storages))}
        for tensor in created.values():
            storage = tensor._storage
            shared = storages.count(id(storage)) > 1
            value = self._as_result(storage.value if shared else lazy_tensor.read(tensor))
            self._indices[id(tensor)] = len(self.created)
            self.created.append((tensor, value, memories[id(storage)] if shared else -1))

    def _as_result(self, value: Value) -> Value:
        """A value that the program can return: of a constant a copy."""
        return value if self._recording.is_computed(value) else same(self._recording.tape, value)

    def _find_written(self) -> list[Storage]:
        """Storages from before the step with values from the step."""
        written = []
        for storage, initial in self._recording.log.storages.values():
            if visible(storage) is not initial:
                # It may have the value of another tensor.
                storage.value = self._as_result(storage.value)
                self._recording.log.wrote(storage)
                written.append(storage)
        return written

    def plan(self) -> tuple[program.CompileRequest, set[int]]:
        """The program of the step, and its results that escape: no output refers to them."""
        tape = self._recording.tape
        accounted = {storage.value.slot for storage in self.written}
        for tensor, value, _ in self.created:  # a view is returned without its base
            accounted |= {value.slot, tensor._storage.value.slot}
        plan = program.request_of(tape)
        if not accounted.issuperset(plan.live):
            gc.collect()
            plan = program.request_of(tape)
        return plan, set(plan.live) - accounted

    def raise_escaped(self, escaped: set[int]) -> None:
        """Raise for tensors that outlive the step without being returned.

        Raises:
            CaptureError: always.
        """
        names_by_slot = op_names(self._recording.tape)
        names = ", ".join(names_by_slot[slot] for slot in sorted(escaped)[:5])
        raise CaptureError(
            f"{self._line}: {len(escaped)} tensors computed inside the compiled step outlive it "
            f"without being returned (results of {names}{', ..' if len(escaped) > 5 else ''}); a "
            "replay could not renew them. Return them from the step (a dataclass after "
            "torch.utils._pytree.register_dataclass), or do not store them."
        )

    def choose_results(self, plan: program.CompileRequest) -> list[Value | Taken]:
        """Set the results of a program and the inputs that are donated to it; return its inputs."""
        recording = self._recording
        results = {storage.value.slot: storage.value.layout for storage in self.written}
        results |= {value.slot: value.layout for _, value, _ in self.created}
        plan.live, plan.result_layouts = tuple(results), tuple(results.values())
        inputs = recording.tape.inputs()
        changed = {id(storage) for storage in self.written}
        initial = {id(f): s for s, f in recording.log.storages.values() if id(s) in changed}
        plan.donated = tuple(
            position for position, value in enumerate(inputs) if id(value) in initial
        )
        return inputs

    def replay(self, plan: program.CompileRequest) -> Replay:
        """Compile the program and bind its inputs and results."""
        recording, tape = self._recording, self._recording.tape
        inputs = self.choose_results(plan)
        bindings = self._inputs(inputs)
        indices = {slot: index for index, slot in enumerate(plan.live)}
        targets = [(indices[entry.value.slot], self._binding(entry)) for entry in self.written]
        new_tensors = [self._new_tensor(*entry, plan.live) for entry in self.created]
        outputs = [self._ref(leaf) for leaf in self._leaves]
        gradients = self._gradient_refs()
        rebound = [(entry, [self._ref(leaf) for leaf in entry.now]) for entry in self._rebindings]
        layouts = {*tape.marks, *plan.result_layouts} - {sharding_ids.UNPLACED}
        arrays = input_placement.place(inputs, layouts)
        plan.placed = tuple(value.layout for value in inputs)
        constants = {id(upload) for upload in recording.log.uploads}
        constants -= recording.cpu_ops.operands.keys()
        bindings = [
            value.array if id(value) in constants else binding
            for value, binding in zip(inputs, bindings, strict=True)
        ]
        compiled = None
        if self._repeat is not None:
            compiled = rolled_step(
                plan, padded(arrays), bindings, targets, new_tensors, self._line, self._repeat
            )
        if compiled is None:
            equal = EqualFloats.of(recording.table.equal_rows(tape.scalars))
            compiled = CompiledForm(
                plan,
                program.program_of(plan, padded(arrays), equal=equal),
                bindings,
                targets,
                new_tensors,
            )
        checks = _checks(tape)
        storages = {id(entry): entry for entry in bindings if isinstance(entry, Storage)}
        storages |= {id(entry): entry for _, entry in targets if isinstance(entry, Storage)}
        rebindings = None
        if self._rebindings:
            rebindings = Rebindings(self._rebindings, storages.values(), recording.arguments)
        touched = set(recording.log.storages)
        cleared = {
            id(tensor)
            for tensor, after in zip(recording.tensors, self.after, strict=True)
            if after is None or tensor in recording.cleared_gradients
        }
        recording.restore()
        recording.training_state.restore_gradients()
        draws = recording.random.draws()
        recording.random.restore()
        tape.forget()
        recording.log.clear()
        return Replay(
            compiled.plan,
            compiled.program,
            compiled.inputs,
            compiled.targets,
            recording.owners,
            gradients,
            self._dropped,
            compiled.created,
            recording.table,
            list(tape.scalars),
            draws,
            recording.cpu_ops,
            pytree.tree_unflatten(outputs, recording.structure),
            recording.guard(touched, cleared),
            recording.floats.written,
            rebindings,
            rebound,
            checks,
            [(self._indices[id(tensor)], check) for tensor, check in recording.cpu_ops.deferred],
            recording.changed_arguments,
            [
                (line, [self._indices[id(tensor)] for tensor in line.tensors])
                for line in tape.printed
            ],
        )

    def _inputs(self, values: Sequence[Value | Taken]) -> list[Any]:
        """The binding of each input, or its array if it is a constant."""
        log, operands = self._recording.log, self._recording.cpu_ops.operands
        memory: dict[int, Storage] = {}
        for storage, initial in log.storages.values():  # a clone may have the same initial value
            memory.setdefault(id(initial), storage)
        uploads = set(map(id, log.uploads))
        inputs: list[Any] = []
        for value in values:
            if id(value) in memory:
                inputs.append(self._binding(memory[id(value)]))
            elif id(value) in operands:
                inputs.append(CpuOperand(operands[id(value)][1]))
            elif id(value) in uploads:
                inputs.append(value.array)
            else:
                raise CaptureError(
                    f"{self._line}: a compiled step reads a value of shape {value.array.shape} "
                    "that belongs to no tensor alive before the step; make it an argument"
                )
        return inputs

    def _binding(self, storage: Storage) -> Any:
        return self._bindings.get(id(storage), storage)

    @functools.cached_property
    def _bindings(self) -> dict[int, Argument | Gradient | StateTensor]:
        """The bindings of storages of arguments, gradients and rebound names, by id."""
        bindings: dict[int, Argument | Gradient | StateTensor] = {}
        for index, tensor in reversed([*enumerate(self._rebound)]):
            bindings[id(tensor._storage)] = StateTensor(index)
        for index, gradient in reversed([*enumerate(self.before)]):
            if isinstance(gradient, lazy_tensor.LazyTensor):
                bindings[id(gradient._storage)] = Gradient(index)
        for index, tensor in reversed([*enumerate(self._recording.arguments)]):
            bindings[id(tensor._storage)] = Argument(index)
        return bindings

    @property
    def _rebound(self) -> list[lazy_tensor.LazyTensor]:
        """The earlier tensors of the names that the step rebinds."""
        return [tensor for rebinding in self._rebindings for tensor in rebinding.before]

    def _new_tensor(
        self, tensor: lazy_tensor.LazyTensor, value: Value, memory: int, live: tuple[int, ...]
    ) -> Computed | SharedStorage:
        index = live.index(value.slot)
        differentiable = id(tensor) in self._recording.differentiable
        if memory < 0:
            return Computed(index, tensor._aval, differentiable)
        offset = int(tensor.storage_offset())
        storage_aval = tensor._storage.aval
        return SharedStorage(
            memory, index, storage_aval, tensor._aval, tensor._chain, offset, differentiable
        )

    def _gradient_refs(self) -> list[tuple[int, Any]]:
        """The owners whose `.grad` is another tensor after the step, and a reference to it."""
        return [
            (index, self._ref(after))
            for index, (before, after) in enumerate(zip(self.before, self.after, strict=True))
            if after is not before
        ]

    def _ref(self, leaf: Any) -> Any:
        """A reference to an output tensor; the tensor itself if it is the same in each run."""
        if not isinstance(leaf, lazy_tensor.LazyTensor):
            return leaf
        if id(leaf) in self._indices:
            return NewTensor(self._indices[id(leaf)])
        for index, argument in enumerate(self._recording.arguments):
            if argument is leaf:
                return Argument(index)
        for index, gradient in enumerate(self.before):
            if gradient is leaf:
                return Gradient(index)
        for index, tensor in enumerate(self._rebound):
            if tensor is leaf:
                return StateTensor(index)
        binding = self._binding(leaf._storage)
        if isinstance(binding, Argument | Gradient | StateTensor):
            offset = int(leaf.storage_offset())
            differentiable = id(leaf) in self._recording.differentiable
            return View(binding, leaf._aval, leaf._chain, offset, differentiable)
        return leaf  # it views a storage that outlives the step


def _checks(tape: Tape) -> list[tuple[Check, list[Any]]]:
    """The checks of floats that change between replays."""
    checks, position = [], 0
    for entry in tape.program:
        if not isinstance(entry[0], int):
            continue
        recipe = RECIPES[entry[0]]
        floats = tape.scalars[position : position + recipe.lifted]
        position += recipe.lifted
        if recipe.check is not None and any(type(scalar) is torch.SymFloat for scalar in floats):
            checks.append((recipe.check, floats))
    return checks


def line_of(step: Any) -> str:
    """The line where a step is defined, for messages."""
    code = getattr(getattr(step, "__func__", step), "__code__", None)
    if code is None and isinstance(step, torch.nn.Module):
        code = type(step).forward.__code__
    if code is None:
        return getattr(step, "__name__", type(step).__name__)
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
