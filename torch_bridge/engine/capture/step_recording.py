"""Run a step once on a tape of its own, and note what it touches.

A `Recording` can be undone: parameters, gradients, optimizer state, step counters and random
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
from isoshard.torch_bridge.engine.values.symbolic_numbers import Table, present, settled
from isoshard.torch_bridge.engine.values.value import Aval, Storage, Value

from .bindings import Argument, Owner
from .effects import Effects
from .executed import Executed
from .guards import Change, Guard
from .holders import MISSING, Asked, Cell, Fields, Holder, Names, are_the_same
from .host_counters import HostOps
from .no_backward import sealed
from .numbers import Numbers
from .reachable import Reachable
from .rebound import Rebound, tensors_of
from .snapshot import Snapshot, groups_of
from .step_arguments import has_gradient
from .step_counts import is_count
from .tensor_descriptions import Description, Descriptions
from .tensor_guard import TensorGuard
from .tracing_flag import compiling
from .zeroing import Zeroing

_NO_VALUE = (
    "this tensor was made in a call of a compiled step that was refused, or raised, and so has no "
    "value. Return it from the step, and use what the call returns."
)


class Recording:
    """A step that ran on a tape.

    Args:
        step: the step.
        objects: its arguments that are no tensors.
        arguments: its tensor arguments.
        places: where Python keeps numbers that changed from call to call: inputs of the program.

    Attributes:
        found: the objects behind the step.
        effects: what they held.
        executed: the code that ran.
        reached: the objects that this code could reach.
        changed: what it changed in them, if a replay would not.
        rebound: names that hold other tensors after the step, which a replay binds anew.
        described: what tensors were like before the step.
        turned: the arguments that it gives another shape in place, and what they become.
        arguments: its tensor arguments.
        owners: who may have gradients: parameters, and arguments that require one.
        tensors: those as tensors.
        table: expressions of the numbers that change.
        host: CPU operations of the step.
        tape: its operations.
        log: the memory it touched.
        random: the random states it found, and the keys it takes.
        zeroing: the gradients that it set to None.
        leaves: its result, flattened.
        structure: how the result was nested.
        differentiable: ids of the leaves that had an autograd graph.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        objects: Sequence[Any],
        arguments: list[lazy_tensor.LazyTensor],
        places: Sequence[Holder] = (),
    ):
        """Prepare to record."""
        self._step, self._objects = step, objects
        self.found = found = self._search(Reachable(runs=True))
        found.begin_with(step)
        self.effects = Effects(found)
        self.executed = Executed(self._begin)
        self.reached = found
        self.changed: Change | None = None
        self.rebound: list[Rebound] = []
        self.arguments = arguments
        self._known: set[int] = set()
        self._leaves = list(found.leaves(self._known))
        mine = [
            number
            for number, argument in enumerate(arguments)
            if has_gradient(argument) and id(argument) not in self._known
        ]
        self._known |= {id(arguments[number]) for number in mine}
        self.owners: list[Owner] = [*self._leaves, *(Argument(number) for number in mine)]
        self.tensors = [*self._leaves, *(arguments[number] for number in mine)]
        self._rates: list[tuple[dict[str, Any], Any, Any]] = []
        self.table = Table()
        self.numbers = Numbers(self.table, places)
        self.host = HostOps(self.table, found.tensors)
        self.tape = tapes.Tape()
        self.tape.opened = True
        self.log = self.tape.log = MemoryLog(self.tape)
        self.random = random_state.DrawnKeys()
        self.snapshot = Snapshot(found, self.tensors)
        self.described = Descriptions()
        self.described.include([*arguments, *(one for one, _ in found.tensors.values())])
        self.turned: list[tuple[int, Description]] = []
        self.zeroing = Zeroing(found, self.is_written)
        self.leaves: list[Any] = []
        self.structure: Any = None
        self.differentiable: frozenset[int] = frozenset()

    def _search(self, reachable: Reachable) -> Reachable:
        """Everything behind the step and its arguments."""
        reachable.follow(self._step, getattr(self._step, "__name__", type(self._step).__name__))
        for one in self._objects:
            reachable.follow(one, f"an argument of type {type(one).__name__}")
        return reachable

    def run(self, args: Any, kwargs: Any) -> None:
        """Run the step on the tape, and keep its result without the autograd graph behind it."""
        self._make_symbolic(self.found.optimizers)
        self.tape.capture = self.host
        try:
            with self.on_tape(), self.random, self.zeroing, compiling(), self.host:
                with self.numbers, self.executed:
                    result = self._step(*args, **kwargs)
                self._keep(result)
            self.host.end()
            if self.host.refused is not None:  # and caught: `logging` goes on after an error
                raise self.host.refused
            self._refuse_disturbed()
            if any(group["lr"] is not symbol for group, _, symbol in self._rates):
                raise CaptureError(
                    "a learning rate was changed inside the compiled step (by a scheduler?), which "
                    "a replay would not repeat; call scheduler.step() after the compiled step"
                )
        finally:
            self.tape.capture = None
            for group, rate, _ in self._rates:
                group["lr"] = rate
            self._rates.clear()
            self.numbers.settle(self.found.holders)
        if not self.executed.is_partial:  # what dynamo has made of code does not tell its names
            self.reached = self._search(Reachable(self.executed))
            self.reached.follow_code(self.executed.codes)
            self.numbers.settle(self.reached.holders)
        get = os.environ.get
        self.reached.holders += self.executed.asked
        self.reached.holders += [
            Asked(functools.partial(get, name), f"os.environ[{name!r}]")
            for name in sorted(self.executed.variables)
        ]

    def _begin(self, frame: types.FrameType) -> None:
        """Note what some code can reach, before it runs for the first time."""
        found = self.found
        known = len(found.modules), len(found.optimizers), len(found.scalers)
        tensors = len(found.tensors)
        found.begin(frame.f_code, frame.f_globals)
        self.effects.include_new()
        modules, optimizers = found.modules[known[0] :], found.optimizers[known[1] :]
        scalers = found.scalers[known[2] :]
        if modules or optimizers or scalers or len(found.tensors) > tensors:
            with self.host.aside():
                self.described.include(one for one, _ in list(found.tensors.values())[tensors:])
                leaves = list(found.leaves(self._known))
                self._leaves += leaves
                self.owners += leaves
                self.tensors += leaves
                self.snapshot.include(leaves, optimizers, scalers)
                self.zeroing.include([*modules, *optimizers])
            self._make_symbolic(optimizers)

    def reason(self) -> str | None:
        """Why a replay would not do what the step did, or None."""
        self.changed = None
        reasons = [*self.executed.reasons, *self.host.reasons, *self.reached.unwatched]
        if reasons:
            return reasons[0]
        if self.host.kept(self.reached.tensors.keys() - self._optimizer_state()):
            return "it makes a tensor on the CPU that it keeps"
        written = self.numbers.outputs()
        self.turned, turned = self.described.changes(self.arguments)
        if turned is not None:
            return turned
        change, self.rebound = self.effects.counting(self.executed, self.is_outer, written)
        if change is None:
            return self._shared()
        self.changed = change
        return f"it changes {change.text.replace(' was ', ', which was ')}"

    def _shared(self) -> str | None:
        """Why a replay could not tell which name the step read; None if it can.

        A name that is bound anew holds a tensor that another name holds as well.
        """
        mine = {one.address for one in self.rebound}
        storages = {id(t._storage): one for one in self.rebound for t in one.before}
        if not storages:
            return None
        for holder in self.reached.holders:
            for number, value in enumerate(holder.read()):
                for tensor in tensors_of(value):
                    one = storages.get(id(tensor._storage))
                    if one is not None and holder.address(number) not in mine:
                        return (
                            f"it binds {one.name} anew, and {holder.name(number)} holds the same "
                            "tensor"
                        )
        return None

    def _optimizer_state(self) -> set[int]:
        """Ids of what optimizers keep of each parameter."""
        kept = (one for optimizer in self.found.optimizers for one in optimizer.state.values())
        return {id(tensor) for values in kept for tensor in values.values()}

    def initializes(self) -> bool:
        """Whether all that keeps a replay from doing what the step did is a name set at first."""
        change = self.changed if self.reason() is not None else None
        if change is None or not isinstance(change.holder, Names | Fields | Cell):
            return False
        if next(tensors_of(change.now), None) is not None:
            return False  # what a list or a dictionary holds, others may change as well
        return change.before is None or change.before is MISSING

    def computed(self) -> tuple[Any, ...]:
        """What the step computes from what: operations, constants, random keys and inputs."""
        tape = self.tape
        scalars = [exact(present(scalar)) for scalar in tape.scalars]
        return (list(tape.program), scalars, len(tape.words), tape.inputs())

    def computes(self, computed: tuple[Any, ...]) -> bool:
        """Whether the step computes what an earlier run of it computed."""
        *mine, inputs = self.computed()
        *theirs, others = computed
        return mine == theirs and are_the_same(inputs, others)

    def guard(self, touched: Container[int], cleared: Container[int]) -> tuple[Guard, TensorGuard]:
        """What must be as it is for a replay to do what the step would do.

        Args:
            touched: ids of the memory that the step used.
            cleared: see `TensorGuard`.
        """
        groups = groups_of(self.found.optimizers)
        inputs = {(id(group), "lr") for group in groups if _is_rate(group)} | self.numbers.inputs()
        inputs |= {one.address for one in self.rebound}

        def skip(holder: Holder, number: int) -> bool:
            return holder.address(number) in inputs

        reached = {key: tensor for key, (tensor, _) in self.reached.tensors.items()}
        state = self._optimizer_state()
        owners = [
            tensor
            for tensor in self._leaves
            if id(tensor) in reached or id(getattr(tensor, "_storage", None)) in touched
        ]
        known = {*state, *map(id, owners)}
        own = {key for key, tensor in reached.items() if isinstance(tensor, lazy_tensor.LazyTensor)}
        owners += [reached[key] for key in reached if key in own - known and reached[key].is_leaf]
        left_out = {key for key in state & reached.keys() if is_count(reached[key])}
        left_out |= {id(tensor) for one in self.rebound for tensor in one.before}
        left_out |= {
            id(tensor)
            for one in self.rebound
            for tensor in one.now
            if isinstance(tensor, lazy_tensor.LazyTensor) and not self.is_outer(tensor)
        }
        tensors = [tensor for key, tensor in reached.items() if key not in left_out]
        owners = [owner for owner in owners if id(owner) not in left_out]
        return Guard(self.reached.holders, skip), TensorGuard(tensors, owners, cleared)

    def _keep(self, result: Any) -> None:
        leaves, self.structure = pytree.tree_flatten(result)
        cut: dict[int, torch.Tensor] = {}
        for leaf in leaves:
            if isinstance(leaf, lazy_tensor.LazyTensor) and leaf.grad_fn is not None:
                if self._is_made_here(leaf):
                    cut.setdefault(id(leaf), leaf.detach())
        self.leaves = [cut.get(id(leaf), leaf) for leaf in leaves]
        self.differentiable = frozenset(map(id, cut.values()))

    @contextlib.contextmanager
    def on_tape(self) -> Iterator[None]:
        """Let operations go to the step's tape, and note the memory they touch."""
        around = recorder()
        self.tape.regions, self.tape.source = around.regions, around.source
        replace(self.tape)
        try:
            yield
        finally:
            replace(around)

    def _refuse_disturbed(self) -> None:
        """Raise if another thread wrote to memory that the step works on.

        Raises:
            CaptureError: one has; what it wrote stays.
        """
        disturbed = self.log.disturbed()
        if disturbed:
            metas = [storage.aval.meta for storage in disturbed]
            named = ", ".join(f"{tuple(meta.size)} {meta.dtype}" for meta in metas[:5])
            raise CaptureError(
                f"another thread wrote to memory that a compiled step uses while the step was "
                f"being captured ({named}{', ..' if len(metas) > 5 else ''}), and its values stay. "
                "Let it wait until the first call of the step has returned, and call that again."
            )

    def _make_symbolic(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace learning rates by symbols while the step runs."""
        for group in groups_of(optimizers):
            if _is_rate(group):
                rate = group["lr"]
                symbol: Any = self.table.symbol(functools.partial(_rate, group), float(rate))
                if group.get("fused"):  # those operators take no symbol, but a tensor
                    symbol = self._as_tensor(symbol)
                self._rates.append((group, rate, symbol))
                group["lr"] = symbol

    def _as_tensor(self, symbol: Any) -> lazy_tensor.LazyTensor:
        value = self.tape.record(_RATE, (), (symbol,))[0]
        tensor = lazy_tensor.fresh(Aval.contiguous((), torch.float32), value)
        self.log.created[id(tensor._storage)] = value.slot
        return tensor

    def take_back(self) -> None:
        """Undo the step."""
        self.put_back()
        self.snapshot.restore()
        self.random.restore()
        failed_ops.abandon(self.tape, CaptureError(_NO_VALUE))
        self.tape.forget()
        self.log.clear()

    def put_back(self) -> None:
        """Give every storage that the step wrote the value it had before."""
        self.described.put_back()
        self.log.put_back()

    def restart_with_state(self) -> bool:
        """If an optimizer made its state in this step, as zeros: undo the step, keep the state.

        The step is then recorded as every later step will run, and its one program serves from the
        first call on.
        """
        if self.reason() is not None and not self.initializes():
            return False
        created: list[Storage] = []
        made = makers(self.tape)
        for optimizer in self.found.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, lazy_tensor.LazyTensor) and not self.is_outer(tensor):
                        slot = self.log.created.get(id(tensor._storage), -1)
                        if slot < 0 or made[slot] != "aten::zeros_like" or tensor._chain.ops:
                            return False
                        created.append(tensor._storage)
        if not created:
            return False
        self.put_back()
        self.effects.put_back()
        self.snapshot.restore_gradients()
        self.snapshot.restore_scalers()
        self.snapshot.restore_counters()
        self.host.restart()
        self.random.restore()
        for storage in created:
            shape, dtype = storage.aval.token
            storage.value = Value(np.zeros(shape, dtype), storage.value.layout)
        self.log.clear()
        self.tape.forget()
        return True

    def makes_state(self, slots: set[int]) -> bool:
        """Whether these results are state that optimizers made for parameters."""
        state = {
            tensor._storage.value.slot
            for optimizer in self.found.optimizers
            for values in optimizer.state.values()
            for tensor in values.values()
            if isinstance(tensor, lazy_tensor.LazyTensor)
            and self.is_computed(tensor._storage.value)
        }
        return slots <= state

    def execute(self) -> Any:
        """Execute the step as it was recorded, without making a replay; gives its result."""
        self.tape.scalars = [present(scalar) for scalar in self.tape.scalars]
        self.log.clear()
        self.log.uploads.clear()
        self.tape.log = None
        program.execute(self.tape)
        for number, fault in self.host.deferred:
            defer(number, fault)
        leaves = [
            sealed(leaf) if id(leaf) in self.differentiable else present(leaf)
            for leaf in self.leaves
        ]
        return pytree.tree_unflatten(leaves, self.structure)

    def is_outer(self, tensor: lazy_tensor.LazyTensor) -> bool:
        """Whether a tensor's memory was there before the step."""
        storage = tensor._storage
        return id(storage) in self.log.storages or id(storage) not in self.log.created

    def _is_made_here(self, tensor: lazy_tensor.LazyTensor) -> bool:
        """Whether a tensor is a result of the step, or a view that it made of an argument."""
        mine = [argument._storage for argument in self.arguments]
        return not self.is_outer(tensor) or (
            any(tensor._storage is storage for storage in mine)
            and not any(tensor is argument for argument in self.arguments)
        )

    def is_written(self, tensor: Any) -> bool:
        """Whether the step wrote to memory that was there before."""
        storage = getattr(tensor, "_storage", None)
        noted = self.log.storages.get(id(storage))
        return noted is not None and visible(noted[0]) is not noted[1]

    def is_computed(self, value: Value) -> bool:
        """Whether a value is a result of an operation of the step."""
        return value.tape is self.tape


def makers(tape: tapes.Tape) -> list[str]:
    """The operation that made each slot of a tape."""
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
