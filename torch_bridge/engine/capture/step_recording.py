"""Run a step once on a tape of its own, and record what it reads and writes.

A `Recording` can be rolled back: parameters, gradients, optimizer state, step counts and random
state are then as they were.
"""

from __future__ import annotations

import contextlib
import functools
import os
import types
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from isoshard.core.errors import CaptureError
from isoshard.core.runtime.exact_keys import exact
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine.compiling import failed_ops, program
from isoshard.torch_bridge.engine.recording import lazy_tensor, random_state
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.deferred_checks import defer
from isoshard.torch_bridge.engine.recording.memory_log import MemoryLog, visible
from isoshard.torch_bridge.engine.recording.recipes import RECIPES, Recipe
from isoshard.torch_bridge.engine.recording.recorder import recorder, replace
from isoshard.torch_bridge.engine.values.symbolic_numbers import (
    SymbolicMath,
    Table,
    present,
    settled,
)
from isoshard.torch_bridge.engine.values.value import Aval, Storage, Value

from .bindings import Argument, Owner
from .cpu_ops import CpuOps, is_count
from .executed_code import ExecutedCode
from .guard_sources import MISSING, CallResult, Cell, Fields, Names, Source, are_identical
from .guards import Change, Guard
from .object_walk import ObjectWalk
from .side_effects import FloatInputs, Rebinding, SideEffects, TrainingState, groups_of, tensors_of
from .step_gradients import ClearedGradients, has_gradient, raise_in_backward
from .tensor_guards import MetadataLog, TensorGuard, TensorMetadata
from .tracing_flag import compiling
from .wrapper_nodes import tree_flatten

_NO_VALUE = (
    "this tensor was computed in a call of a compiled step that raised, and so has no value. "
    "Return it from the step, and use the result of the call."
)


class Recording:
    """A step that ran on a tape.

    Args:
        step: the step.
        objects: its arguments that are no tensors.
        arguments: its tensor arguments.
        floats: sources of floats that changed between calls, and become inputs of the program.

    Attributes:
        walk: the objects that the step can reach.
        side_effects: their values before the step.
        executed: the code that ran.
        reached: the objects that this code could read.
        change: a side effect that a replay cannot repeat, or None.
        rebindings: the names that the step rebinds.
        metadata: the metadata of tensors before the step.
        changed_arguments: the arguments whose metadata it changes, and the new metadata.
        arguments: its tensor arguments.
        owners: what may have gradients: parameters, and arguments that require one.
        tensors: the owners as tensors.
        table: the expressions of symbolic floats.
        cpu_ops: CPU operations of the step.
        tape: its operations.
        log: the storages it touched.
        random: the random states before the step, and the keys it takes.
        cleared_gradients: the gradients that it cleared.
        leaves: its result, flattened.
        structure: the pytree structure of the result.
        differentiable: ids of the leaves that had an autograd graph.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        objects: Sequence[Any],
        arguments: list[lazy_tensor.LazyTensor],
        floats: Sequence[Source] = (),
    ):
        """See the class."""
        self._step, self._objects = step, objects
        self.walk = walk = self._walk_arguments(ObjectWalk(runs=True))
        walk.enter_step(step)
        self.side_effects = SideEffects(walk)
        self.executed = ExecutedCode(self._enter_code)
        self.reached = walk
        self.change: Change | None = None
        self.rebindings: list[Rebinding] = []
        self.arguments = arguments
        self._seen: set[int] = set()
        self._leaves = list(walk.leaves(self._seen))
        argument_indices = [
            index
            for index, argument in enumerate(arguments)
            if has_gradient(argument) and id(argument) not in self._seen
        ]
        self._seen |= {id(arguments[index]) for index in argument_indices}
        self.owners: list[Owner] = [*self._leaves, *(Argument(index) for index in argument_indices)]
        self.tensors = [*self._leaves, *(arguments[index] for index in argument_indices)]
        self._learning_rates: list[tuple[dict[str, Any], Any, Any]] = []
        self.table = Table()
        self.floats = FloatInputs(self.table, floats)
        self.cpu_ops = CpuOps(self.table, walk.tensors)
        self.tape = tapes.Tape()
        self.tape.opened = True
        self.log = self.tape.log = MemoryLog(self.tape)
        self.random = random_state.DrawnKeys()
        self.training_state = TrainingState(walk, self.tensors)
        self.metadata = MetadataLog()
        self.metadata.include([*arguments, *(tensor for tensor, _ in walk.tensors.values())])
        self.changed_arguments: list[tuple[int, TensorMetadata]] = []
        self.cleared_gradients = ClearedGradients(
            [*walk.modules, *walk.optimizers], self.is_written
        )
        self.leaves: list[Any] = []
        self.structure: Any = None
        self.differentiable: frozenset[int] = frozenset()

    def _walk_arguments(self, walk: ObjectWalk) -> ObjectWalk:
        """Walk from the step and its arguments."""
        walk.walk(self._step, getattr(self._step, "__name__", type(self._step).__name__))
        for obj in self._objects:
            walk.walk(obj, f"an argument of type {type(obj).__name__}")
        return walk

    def run(self, args: Any, kwargs: Any) -> None:
        """Run the step on the tape, and store its result without autograd graph."""
        self._make_symbolic(self.walk.optimizers)
        self.tape.capture = self.cpu_ops
        try:
            with self.on_tape(), self.random, self.cleared_gradients, compiling(), self.cpu_ops:
                with self.floats, SymbolicMath(), self.executed:
                    result = self._step(*args, **kwargs)
                self._store_result(result)
            self.cpu_ops.detach()
            if self.cpu_ops.error is not None:  # raised and caught: `logging` does so
                raise self.cpu_ops.error
            self._raise_disturbed()
            if any(group["lr"] is not symbol for group, _, symbol in self._learning_rates):
                raise CaptureError(
                    "a learning rate was changed inside the compiled step (by a scheduler?), which "
                    "a replay would not repeat; call scheduler.step() after the compiled step"
                )
        finally:
            self.tape.capture = None
            for group, rate, _ in self._learning_rates:
                group["lr"] = rate
            self._learning_rates.clear()
            self.floats.settle(self.walk.sources)
        if not self.executed.is_partial:  # code of dynamo has lost the names
            self.reached = self._walk_arguments(ObjectWalk(self.executed))
            self.reached.walk_globals(self.executed.codes)
            self.floats.settle(self.reached.sources)
        get = os.environ.get
        self.reached.sources += self.executed.sources
        self.reached.sources += [
            CallResult(functools.partial(get, name), f"os.environ[{name!r}]")
            for name in sorted(self.executed.environment)
        ]

    def _enter_code(self, frame: types.FrameType) -> None:
        """Walk from a code object before its first run."""
        walk = self.walk
        counts = len(walk.modules), len(walk.optimizers), len(walk.scalers)
        tensors = len(walk.tensors)
        walk.enter_code(frame.f_code, frame.f_globals)
        self.side_effects.include_new()
        modules, optimizers = walk.modules[counts[0] :], walk.optimizers[counts[1] :]
        scalers = walk.scalers[counts[2] :]
        if modules or optimizers or scalers or len(walk.tensors) > tensors:
            with self.cpu_ops.paused():
                self.metadata.include(tensor for tensor, _ in list(walk.tensors.values())[tensors:])
                leaves = list(walk.leaves(self._seen))
                self._leaves += leaves
                self.owners += leaves
                self.tensors += leaves
                self.training_state.include(leaves, optimizers, scalers)
                self.cleared_gradients.include([*modules, *optimizers])
            self._make_symbolic(optimizers)

    def reason(self) -> str | None:
        """Why a replay is not equivalent to the step, or None."""
        self.change = None
        reasons = [*self.executed.reasons, *self.cpu_ops.reasons, *self.reached.unguardable]
        if reasons:
            return reasons[0]
        if self.cpu_ops.keeps(self.reached.tensors.keys() - self._optimizer_state()):
            return "it creates a CPU tensor that outlives it"
        written = self.floats.outputs()
        self.changed_arguments, unrepeatable = self.metadata.changes(self.arguments)
        if unrepeatable is not None:
            return unrepeatable
        change, self.rebindings = self.side_effects.classify(
            self.executed, self.existed_before, written
        )
        if change is None:
            return self._ambiguous_rebinding()
        self.change = change
        return f"it changes {change.text.replace(' was ', ', which was ')}"

    def _ambiguous_rebinding(self) -> str | None:
        """Why a replay cannot know which name the step read, or None.

        A name that is rebound may have a tensor that another name has as well.
        """
        rebound_keys = {rebinding.key for rebinding in self.rebindings}
        storages = {
            id(t._storage): rebinding for rebinding in self.rebindings for t in rebinding.before
        }
        if not storages:
            return None
        for source in self.reached.sources:
            for index, value in enumerate(source.read()):
                for tensor in tensors_of(value):
                    rebinding = storages.get(id(tensor._storage))
                    if rebinding is not None and source.key(index) not in rebound_keys:
                        return (
                            f"it rebinds {rebinding.name}, and {source.name(index)} is the same "
                            "tensor"
                        )
        return None

    def _optimizer_state(self) -> set[int]:
        """Ids of the state of optimizers for each parameter."""
        states = (state for optimizer in self.walk.optimizers for state in optimizer.state.values())
        return {id(tensor) for values in states for tensor in values.values()}

    def initializes(self) -> bool:
        """Whether the only side effect is a name that the step sets if it is missing or None."""
        change = self.change if self.reason() is not None else None
        if change is None or not isinstance(change.source, Names | Fields | Cell):
            return False
        if next(tensors_of(change.now), None) is not None:
            return False  # not an element of a list or dictionary, which other code may change
        return change.before is None or change.before is MISSING

    def computed(self) -> tuple[Any, ...]:
        """The computation of the step: operations, constants, random keys and inputs."""
        tape = self.tape
        scalars = [exact(present(scalar)) for scalar in tape.scalars]
        return (list(tape.program), scalars, len(tape.words), tape.inputs())

    def computes(self, computed: tuple[Any, ...]) -> bool:
        """Whether the computation equals that of an earlier run."""
        *own, inputs = self.computed()
        *other, other_inputs = computed
        return own == other and are_identical(inputs, other_inputs)

    def guard(self, touched: Container[int], cleared: Container[int]) -> tuple[Guard, TensorGuard]:
        """The guards of a replay.

        Args:
            touched: ids of the storages that the step touched.
            cleared: see `TensorGuard`.
        """
        groups = groups_of(self.walk.optimizers)
        inputs = {(id(group), "lr") for group in groups if _is_rate(group)} | self.floats.inputs()
        inputs |= {rebinding.key for rebinding in self.rebindings}

        def skip(source: Source, index: int) -> bool:
            return source.key(index) in inputs

        tensors_by_id = {key: tensor for key, (tensor, _) in self.reached.tensors.items()}
        state = self._optimizer_state()
        owners = [
            tensor
            for tensor in self._leaves
            if id(tensor) in tensors_by_id or id(getattr(tensor, "_storage", None)) in touched
        ]
        listed = {*state, *map(id, owners)}
        lazy = {
            key
            for key, tensor in tensors_by_id.items()
            if isinstance(tensor, lazy_tensor.LazyTensor)
        }
        owners += [
            tensors_by_id[key]
            for key in tensors_by_id
            if key in lazy - listed and tensors_by_id[key].is_leaf
        ]
        excluded = {key for key in state & tensors_by_id.keys() if is_count(tensors_by_id[key])}
        excluded |= {id(tensor) for rebinding in self.rebindings for tensor in rebinding.before}
        excluded |= {
            id(tensor)
            for rebinding in self.rebindings
            for tensor in rebinding.now
            if isinstance(tensor, lazy_tensor.LazyTensor) and not self.existed_before(tensor)
        }
        tensors = [tensor for key, tensor in tensors_by_id.items() if key not in excluded]
        owners = [owner for owner in owners if id(owner) not in excluded]
        return Guard(self.reached.sources, skip), TensorGuard(tensors, owners, cleared)

    def _store_result(self, result: Any) -> None:
        leaves, self.structure = tree_flatten(result)
        detached: dict[int, torch.Tensor] = {}
        for leaf in leaves:
            if isinstance(leaf, lazy_tensor.LazyTensor) and leaf.grad_fn is not None:
                if self._is_created(leaf):
                    detached.setdefault(id(leaf), leaf.detach())
        self.leaves = [detached.get(id(leaf), leaf) for leaf in leaves]
        self.differentiable = frozenset(map(id, detached.values()))

    @contextlib.contextmanager
    def on_tape(self) -> Iterator[None]:
        """Context in which operations are recorded on the step's tape."""
        outer = recorder()
        self.tape.regions, self.tape.source = outer.regions, outer.source
        replace(self.tape)
        try:
            yield
        finally:
            replace(outer)

    def _raise_disturbed(self) -> None:
        """Raise if another thread wrote to a storage of the step; what it wrote remains."""
        disturbed = self.log.disturbed()
        if disturbed:
            metas = [storage.aval.meta for storage in disturbed]
            names = ", ".join(f"{tuple(meta.size)} {meta.dtype}" for meta in metas[:5])
            raise CaptureError(
                f"another thread wrote to memory that a compiled step uses while the step was "
                f"being captured ({names}{', ..' if len(metas) > 5 else ''}), and its values stay. "
                "Let it wait until the first call of the step has returned, and call that again."
            )

    def _make_symbolic(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace learning rates by symbols while the step runs."""
        for group in groups_of(optimizers):
            if _is_rate(group):
                rate = group["lr"]
                symbol: Any = self.table.symbol(functools.partial(_rate, group), float(rate))
                if group.get("fused"):  # fused operators take a tensor
                    symbol = self._as_tensor(symbol)
                self._learning_rates.append((group, rate, symbol))
                group["lr"] = symbol

    def _as_tensor(self, symbol: Any) -> lazy_tensor.LazyTensor:
        value = self.tape.record(_RATE, (), (symbol,))[0]
        tensor = lazy_tensor.fresh(Aval.contiguous((), torch.float32), value)
        self.log.created[id(tensor._storage)] = value.slot
        return tensor

    def rollback(self) -> None:
        """Undo the step."""
        self.restore()
        self.training_state.restore()
        self.random.restore()
        failed_ops.abandon(self.tape, CaptureError(_NO_VALUE))
        self.tape.forget()
        self.log.clear()

    def restore(self) -> None:
        """Restore the metadata of tensors and the values of storages."""
        self.metadata.restore()
        self.log.put_back()

    def restart_with_state(self) -> bool:
        """If an optimizer initialized its state with zeros: undo the step, but not that.

        The step is then recorded as every later step will run, and one program serves from the
        first call on.
        """
        if self.reason() is not None and not self.initializes():
            return False
        created: list[Storage] = []
        names_by_slot = op_names(self.tape)
        for optimizer in self.walk.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, lazy_tensor.LazyTensor) and not self.existed_before(
                        tensor
                    ):
                        slot = self.log.created.get(id(tensor._storage), -1)
                        if (
                            slot < 0
                            or names_by_slot[slot] not in ("aten::zeros_like", "aten::new_zeros")
                            or tensor._chain.ops
                        ):
                            return False
                        created.append(tensor._storage)
        if not created:
            return False
        self.restore()
        self.side_effects.restore()
        self.training_state.restore_gradients()
        self.training_state.restore_scalers()
        self.training_state.restore_counters()
        self.cpu_ops.reset()
        self.random.restore()
        for storage in created:
            shape, dtype = storage.aval.token
            storage.value = Value(np.zeros(shape, dtype), storage.value.layout)
        self.log.clear()
        self.tape.forget()
        return True

    def is_optimizer_state(self, slots: set[int]) -> bool:
        """Whether these results are state that optimizers initialized."""
        state = {
            tensor._storage.value.slot
            for optimizer in self.walk.optimizers
            for values in optimizer.state.values()
            for tensor in values.values()
            if isinstance(tensor, lazy_tensor.LazyTensor)
            and self.is_computed(tensor._storage.value)
        }
        return slots <= state

    def execute(self) -> Any:
        """Execute the recorded step once; returns its result."""
        self.tape.scalars = [present(scalar) for scalar in self.tape.scalars]
        self.log.clear()
        self.log.uploads.clear()
        self.tape.log = None
        program.execute(self.tape)
        for tensor, error_of in self.cpu_ops.deferred:
            defer(tensor, error_of)
        leaves = [
            raise_in_backward(leaf) if id(leaf) in self.differentiable else present(leaf)
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.structure)

    def existed_before(self, tensor: lazy_tensor.LazyTensor) -> bool:
        """Whether a tensor's storage existed before the step."""
        storage = tensor._storage
        return id(storage) in self.log.storages or id(storage) not in self.log.created

    def _is_created(self, tensor: lazy_tensor.LazyTensor) -> bool:
        """Whether the step created a tensor, which may be a view of an argument."""
        argument_storages = [argument._storage for argument in self.arguments]
        return not self.existed_before(tensor) or (
            any(tensor._storage is storage for storage in argument_storages)
            and not any(tensor is argument for argument in self.arguments)
        )

    def is_written(self, tensor: Any) -> bool:
        """Whether the step wrote to a storage that existed before."""
        storage = getattr(tensor, "_storage", None)
        entry = self.log.storages.get(id(storage))
        return entry is not None and visible(entry[0]) is not entry[1]

    def is_computed(self, value: Value) -> bool:
        """Whether a value is a result of an operation of the step."""
        return value.tape is self.tape


def op_names(tape: tapes.Tape) -> list[str]:
    """The operation that computes each slot of a tape."""
    names: list[str] = []
    for entry in tape.program:
        if isinstance(entry[0], int):
            recipe = RECIPES[entry[0]]
            names += [recipe.name] * recipe.count
        else:
            names.append("an input")
    return names


_RATE = Recipe("rate", lambda _inputs, scalars, _key: [scalars[0].astype("float32")], 1, lifted=1)


def _is_rate(group: dict[str, Any]) -> bool:
    """Whether a parameter group has a learning rate that is an input of a captured program."""
    return type(group.get("lr")) in (float, int)


def _rate(group: dict[str, Any]) -> float:
    return float(settled(group["lr"]))
