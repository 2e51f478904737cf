"""Capture one training step, to replay it without Python model code.

`compile(step)` runs `step` on the tape as usual, but looks at what comes in and what goes out: the
arguments, the storages it read (parameters, buffers, optimizer state), the numbers that will be
different next time (learning rates, step counts), and the storages it wrote. From then on a call
gathers those inputs, runs the one compiled program, and stores its outputs. Model code, autograd
and optimizer do not run again.

The limits are those of any ahead-of-time capture: Python side effects other than tensor writes
happen once. What would be frozen without a word is refused with `CaptureError`: reading a tensor's
value, branching on a changing number, uploading a CPU tensor that is not an argument, random
numbers of the CPU, a scheduler stepping inside, a tensor that outlives the step without being
returned. A refused step leaves parameters and optimizer as they were.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from isoshard.core import metrics

from . import base, program, random
from . import tape as tapes
from .arguments import signature
from .host import HostOps
from .replay import Argument, Computed, Replay, View
from .symbolic import CaptureError, Table, present
from .value import Storage, Value
from .watch import Snapshot, Watched

_ACTIVE: list[HostOps] = []


def refuse_if_capturing(what: str) -> None:
    """Raise where a captured step asks for something that a replay could not give."""
    if _ACTIVE:
        raise CaptureError(
            f"{metrics.user_location()}: a compiled step needs {what} in the middle of the step, "
            "which a replay could not repeat. Return the tensor from the step and read it outside "
            "(for a Python branch, use torch.where)."
        )


def note_upload(tensor: torch.Tensor) -> None:
    """Refuse a CPU tensor that comes from outside a captured step."""
    if _ACTIVE and not _ACTIVE[-1].made_here(tensor):
        raise CaptureError(
            f"{metrics.user_location()}: a compiled step moves a CPU tensor of shape "
            f"{tuple(tensor.shape)} to the jax device that is not one of its arguments; a replay "
            "would use this one for ever. Move it before the step and pass it as an argument."
        )


class CompiledStep:
    """A step function that runs as one XLA program.

    Calls with other shapes, dtypes, layouts or static arguments are captured as further programs;
    so are calls after a module changed between training and evaluation, or an optimizer's
    hyperparameters other than the learning rate changed.

    Args:
        step: a function of tensors on the `jax` device (in any nesting) and of hashable values.
    """

    def __init__(self, step: Callable[..., Any]):
        """See the class."""
        functools.update_wrapper(self, step, updated=())
        self.step = step
        self._replays: dict[Any, Replay] = {}
        self._opened: set[Any] = set()
        self._watched: Watched | None = None
        self._last: Replay | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        arguments = [leaf for leaf in leaves if isinstance(leaf, base.LazyTensor)]
        if self._watched is None:
            self._watched = Watched(self.step, (args, kwargs))
        key = (structure, signature(leaves, arguments), self._watched.guard())
        replay = self._replays.get(key)
        if replay is not None and replay.identity == self._watched.identity():
            self._last = replay
            return replay(arguments)
        if replay is not None:
            del self._replays[key], replay  # it works on memory that was replaced
            self._last = None
        self._watched = Watched(self.step, (args, kwargs))
        key = (structure, key[1], self._watched.guard())
        return self._capture(key, args, kwargs, arguments)

    @property
    def replays(self) -> list[Replay]:
        """The captured programs, oldest first."""
        return list(self._replays.values())

    @property
    def last(self) -> Replay | None:
        """The program that ran last; None before the first capture."""
        return self._last

    def _capture(self, key: Any, args: Any, kwargs: Any, arguments: list[base.LazyTensor]) -> Any:
        if tapes.is_tracing() or _ACTIVE:
            where = "inside another compiled step" if _ACTIVE else "while JAX traces"
            raise CaptureError(
                f"a compiled step was called {where}; call the step function itself there"
            )
        program.sync()
        assert self._watched is not None
        capture = _Capture(self._watched, arguments)
        result = capture.record(self.step, args, kwargs)
        may_open = key[:2] not in self._opened
        if may_open and capture.restart_with_state():
            self._watched = Watched(self.step, (args, kwargs))
            key = (*key[:2], self._watched.guard())
            capture = _Capture(self._watched, arguments)
            result = capture.record(self.step, args, kwargs)
        replay = capture.finish(result, may_open=may_open)
        if replay is None:  # state was created: capture the next call
            self._opened.add(key[:2])
            self._watched = None
            return result
        replay.identity = self._watched.identity()
        self._replays[key] = self._last = replay
        del result, capture
        return replay.run(arguments)


class _Capture:
    """Everything noted while a step runs on the tape."""

    def __init__(self, watched: Watched, arguments: list[base.LazyTensor]):
        self.watched = watched
        self.arguments = arguments
        self.table = Table()
        self.host = HostOps(self.table)
        self.tape = tapes.Tape()
        self.log = base.Log(self.tape)
        self.state = random.State(random.STATE.seed, random.STATE.counter)

    def record(self, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the step on a tape of its own; if it fails, put everything back."""
        self.snapshot = snapshot = Snapshot(self.watched)
        before = tapes.replace(self.tape)
        log = base.use_log(self.log)
        rates = self._symbolic_rates()
        _ACTIVE.append(self.host)
        try:
            with self.host:
                result = step(*args, **kwargs)
            if any(group["lr"] is not symbol for group, _, symbol in rates):
                raise CaptureError(
                    "a learning rate was changed inside the compiled step (by a scheduler?), which "
                    "a replay would not repeat; call scheduler.step() after the compiled step"
                )
        except BaseException:
            self._put_back()
            snapshot.restore()
            random.STATE.restore(self.state)
            raise
        finally:
            _ACTIVE.pop()
            base.use_log(log)
            tapes.replace(before)
            for group, rate, _ in rates:
                group["lr"] = rate
        return result

    def _symbolic_rates(self) -> list[tuple[dict[str, Any], Any, Any]]:
        rates = []
        for group in self.watched.groups():
            rate = group.get("lr")
            if isinstance(rate, float | int):
                symbol = self.table.symbol(functools.partial(_rate, group), float(rate))
                rates.append((group, rate, symbol))
                group["lr"] = symbol
        return rates

    def _put_back(self) -> None:
        """Give every storage the value it had before the step."""
        for storage, first in self.log.storages.values():
            storage.value = first

    def restart_with_state(self) -> bool:
        """If an optimizer made its state in this step, as zeros: undo the step, keep the state.

        The step is then captured as every later step will run, and its one program serves from the
        first call on.
        """
        created: list[Storage] = []
        made = _makers(self.tape)
        for optimizer in self.watched.optimizers:
            for state in optimizer.state.values():
                for tensor in state.values():
                    if isinstance(tensor, base.LazyTensor) and not self._is_outer(tensor):
                        slot = self.log.created.get(id(tensor._storage), -1)
                        if slot < 0 or made[slot] != "aten::zeros_like" or tensor._chain.ops:
                            return False
                        created.append(tensor._storage)
        if not created:
            return False
        self._put_back()
        self.snapshot.restore_gradients()
        self.snapshot.restore_counters()
        self.host.restart()
        random.STATE.restore(self.state)
        for storage in created:
            shape, dtype = storage.aval.token
            storage.value = Value(np.zeros(shape, dtype), storage.value.layout)
        self.log.storages.clear()
        program.forget(self.tape)
        return True

    def finish(self, result: Any, *, may_open: bool) -> Replay | None:
        """Make the replay; None if the step created state that outlives it, and was executed."""
        self._drop_gradients()
        leaves, structure = pytree.tree_flatten(result)
        values = {
            number: base.read(leaf)
            for number, leaf in enumerate(leaves)
            if isinstance(leaf, base.LazyTensor) and not self._is_outer(leaf)
        }
        written = self._written()
        plan = program.plan_of(self.tape)
        kept = {storage.value.slot for storage in written}
        kept |= {value.slot for value in values.values()}
        if not kept.issuperset(plan.live):
            gc.collect()
            plan = program.plan_of(self.tape)
        escaped = set(plan.live) - kept
        if escaped and may_open:
            self._run_once()
            return None
        if escaped:
            message = self._escape_message(escaped)
            self._put_back()
            raise CaptureError(message)
        return self._replay(plan, written, leaves, structure, values)

    def _written(self) -> list[Storage]:
        """Storages from before the step that now have a value computed in it."""
        leaves = set(self.tape.leaves)
        found = []
        for storage, first in self.log.storages.values():
            value = storage.value
            if value.tape is self.tape and value.slot not in leaves:
                found.append(storage)
            elif value is not first:  # another tensor's memory, or a constant, was copied into it
                found.append(self._made_own(storage))
        return found

    def _made_own(self, storage: Storage) -> Storage:
        """Record a copy, so that a storage that took over a value gets a result of its own."""
        from .constrain import same

        storage.value = same(self.tape, storage.value)
        return storage

    def _is_outer(self, tensor: base.LazyTensor) -> bool:
        return id(tensor._storage) in self.log.storages or any(
            tensor._storage is argument._storage for argument in self.arguments
        )

    def _is_written(self, parameter: torch.Tensor) -> bool:
        storage = getattr(parameter, "_storage", None)
        first = self.log.storages.get(id(storage), (storage, None))[1]
        return first is not None and storage is not None and storage.value is not first

    def _drop_gradients(self) -> None:
        """Gradients made inside the step stay inside the program."""
        parameters = self.watched.parameters
        dropped = 0
        for parameter in parameters:
            gradient = parameter.grad
            if isinstance(gradient, base.LazyTensor):
                inside = id(gradient._storage) not in self.log.storages
                if inside and gradient._storage.value.tape is self.tape:
                    parameter.grad = None
                    dropped += 1
        if dropped and not any(self._is_written(parameter) for parameter in parameters):
            self._put_back()
            raise CaptureError(
                f"a compiled step computes {dropped} gradients and updates no parameter; gradients "
                "live inside the program, so an optimizer outside would not see them. Call "
                "optimizer.step() in the compiled step, or return torch.autograd.grad(..)."
            )

    def _run_once(self) -> None:
        self.tape.scalars = [present(scalar) for scalar in self.tape.scalars]
        self.log.storages.clear()
        self.log.uploads.clear()
        program.execute(self.tape)

    def _replay(
        self,
        plan: program.Plan,
        written: list[Storage],
        leaves: list[Any],
        structure: Any,
        values: dict[int, Value],
    ) -> Replay:
        tape = self.tape
        wanted = {storage.value.slot: storage.value.layout for storage in written}
        wanted |= {value.slot: value.layout for value in values.values()}
        plan.live, plan.wanted = tuple(wanted), tuple(wanted.values())
        inputs = [tape.values[slot] for slot in plan.leaves]
        sources = [self._source(value) for value in inputs]
        targets = [(plan.live.index(s.value.slot), self._place(s)) for s in written]
        outputs = [
            self._output(leaf, values.get(number), plan.live) for number, leaf in enumerate(leaves)
        ]
        changed = {id(storage) for storage in written}
        firsts = {id(f): s for s, f in self.log.storages.values() if id(s) in changed}
        plan.donated = tuple(
            position for position, value in enumerate(inputs) if id(value) in firsts
        )
        arrays = program.place(inputs)
        plan.placed = tuple(value.layout for value in inputs)
        constants = {id(upload) for upload in self.log.uploads}
        sources = [
            value.array if id(value) in constants else source
            for value, source in zip(inputs, sources, strict=True)
        ]
        found = program.program_of(plan, arrays, tape.scalars)
        self._put_back()
        scalars = list(tape.scalars)
        draws = random.Draws.relative(tape.words, self.state)
        random.STATE.restore(self.state)
        program.forget(tape)
        self.log.storages.clear()
        return Replay(
            plan,
            found,
            sources,
            targets,
            self.table,
            scalars,
            draws,
            self.host,
            pytree.tree_unflatten(outputs, structure),
        )

    def _source(self, value: Value) -> Any:
        """Where a replay finds an input: an argument, a storage, or here, if it is a constant."""
        for storage, first in self.log.storages.values():
            if first is value:
                return self._place(storage)
        if any(value is upload for upload in self.log.uploads):
            return value.array
        raise CaptureError(
            f"a compiled step reads a value of shape {value.array.shape} that belongs to no tensor "
            "alive before the step; make it an argument"
        )

    def _place(self, storage: Storage) -> Any:
        for number, tensor in enumerate(self.arguments):
            if tensor._storage is storage:
                return Argument(number)
        return storage

    def _output(self, leaf: Any, value: Value | None, live: tuple[int, ...]) -> Any:
        if not isinstance(leaf, base.LazyTensor):
            return leaf
        if value is not None:
            if value.slot not in live:
                raise CaptureError(
                    f"a compiled step returns a tensor of shape {tuple(leaf.shape)} that it did "
                    "not compute; use the tensor it was made from"
                )
            return Computed(live.index(value.slot), leaf._aval)
        for number, argument in enumerate(self.arguments):
            if argument is leaf:
                return Argument(number)
        place = self._place(leaf._storage)
        if isinstance(place, Argument):
            return View(place, leaf._aval, leaf._chain, int(leaf.storage_offset()))
        return leaf  # it views memory that outlives the step, and shows each new value

    def _escape_message(self, escaped: set[int]) -> str:
        shown = sorted(escaped)[:5]
        made = _makers(self.tape)
        names = ", ".join(made[slot] for slot in shown)
        return (
            f"{len(escaped)} tensors computed inside the compiled step outlive it without being "
            f"returned (results of {names}{', ..' if len(escaped) > 5 else ''}); a replay could "
            "not renew them. Return them from the step, or do not store them."
        )


def _makers(tape: tapes.Tape) -> list[str]:
    """The operation that made each slot."""
    names: list[str] = []
    for entry in tape.program:
        if isinstance(entry[0], int):
            recipe = tapes.RECIPES[entry[0]]
            names += [recipe.name] * recipe.count
        else:
            names.append("an input")
    return names


def _rate(group: dict[str, Any]) -> float:
    return float(group["lr"])
