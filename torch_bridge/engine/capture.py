"""Capture one training step and replay it without Python model code.

`compile(step)` runs `step` on the tape as usual, but looks at what comes in and what goes out: the
arguments, the storages it read (parameters, buffers, optimizer state), the numbers that will be
different next time (learning rates, step counts), and the storages it wrote. From then on a call
gathers those inputs, runs the one compiled program, and stores its outputs. Model code, autograd and
optimizer do not run again.

The limits are those of any ahead-of-time capture: Python side effects other than tensor writes
happen once. What would be frozen without a word is refused with `CaptureError`: reading a tensor's
value, branching on a changing number, uploading a CPU tensor that is not an argument, a scheduler
stepping inside, a tensor that outlives the step without being returned.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _pytree as pytree

from isoshard.core import metrics
from isoshard.torch_bridge.engine import base, layouts, program, random
from isoshard.torch_bridge.engine import tape as tapes
from isoshard.torch_bridge.engine.host import HostOps
from isoshard.torch_bridge.engine.symbolic import CaptureError, Table
from isoshard.torch_bridge.engine.value import Storage, Value
from isoshard.torch_bridge.engine.watch import Watched

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


@dataclasses.dataclass
class Replay:
    """A captured step.

    Attributes:
        plan: what was compiled.
        program: the executable.
        sources: for each leaf, the storage it is read from, the number of the argument that brings
            it, or a constant array.
        targets: for each result, the storage (or number of the argument) that it is written to;
            results beyond these are returned.
        table: expressions of the changing numbers.
        scalars: the lifted floats: constants and expressions.
        host: CPU operations to repeat (step counters).
        outputs: the step's result with each tensor replaced by `Output`.
    """

    plan: program.Plan
    program: program.Program
    sources: list[Any]
    targets: list[Any]
    table: Table
    scalars: list[Any]
    host: HostOps
    outputs: Any

    def __call__(self, arguments: list[base.LazyTensor]) -> Any:
        """Run the step on the present values."""
        self.host.repeat()
        scalars = self.table.evaluate(self.scalars)
        arrays = [
            self._array(position, source, arguments) for position, source in enumerate(self.sources)
        ]
        words = random.STATE.take(self.plan.draws)
        results = program.run(self.program, self.plan, arrays, scalars, words)
        del arrays
        values = []
        for array, number in zip(results, self.program.layouts, strict=True):
            value = Value(array, number)
            values.append(value)
        for target, value in zip(self.targets, values, strict=False):
            storage = arguments[target]._storage if isinstance(target, int) else target
            storage.write(value)
        return _fill(self.outputs, values, arguments)

    def _array(self, position: int, source: Any, arguments: list[base.LazyTensor]) -> jax.Array:
        if isinstance(source, jax.Array):
            return source
        value = (arguments[source]._storage if isinstance(source, int) else source).value
        if value.array is None:
            tapes.materialize([value])
        wanted = self.plan.placed[position]
        if value.layout != wanted or not isinstance(value.array, jax.Array):
            value.layout = wanted if wanted != layouts.UNPLACED else value.layout
            program.place([value])
        array = value.array
        if position in self.plan.donated and (value.shared or sys.getrefcount(array) > 3):
            metrics.count("copies")
            metrics.count("copied_bytes", array.nbytes)
            return jnp.copy(array)
        return array


@dataclasses.dataclass(frozen=True)
class Output:
    """A tensor in a step's result: the number of the program's result, or of the argument."""

    result: int | None
    argument: int | None
    aval: Any


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
        self._replays: dict[Any, Replay | None] = {}
        self._watched: Watched | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        arguments = [leaf for leaf in leaves if isinstance(leaf, base.LazyTensor)]
        if self._watched is None:
            self._watched = Watched(self.step, (args, kwargs))
        key = (structure, _signature(leaves), self._watched.guard())
        replay = self._replays.get(key)
        if replay is not None:
            return replay(arguments)
        return self._capture(key, args, kwargs, arguments)

    @property
    def replays(self) -> list[Replay]:
        """The captured programs, oldest first."""
        return [replay for replay in self._replays.values() if replay is not None]

    def _capture(self, key: Any, args: Any, kwargs: Any, arguments: list[base.LazyTensor]) -> Any:
        if tapes.is_tracing():
            raise CaptureError(
                "a compiled step cannot be called while JAX traces; call the step function itself"
            )
        program.sync()
        for tensor in arguments:
            base.read(tensor)
        first = key not in self._replays
        capture = _Capture(self._watched, arguments)
        with capture:
            result = self.step(*args, **kwargs)
        replay, values = capture.finish(result, first=first)
        self._replays[key] = replay
        if replay is not None:
            return _fill(replay.outputs, values, arguments)
        self._watched = None  # state was created: look again before the next capture
        self._replays = {k: v for k, v in self._replays.items() if v is not None}
        self._replays[(key[0], key[1], Watched(self.step, (args, kwargs)).guard())] = None
        return result


class _Capture:
    """Everything noted while a step runs on the tape."""

    def __init__(self, watched: Watched, arguments: list[base.LazyTensor]):
        self.watched = watched
        self.arguments = arguments
        self.table = Table()
        self.host = HostOps(self.table)
        self.tape = tapes.Tape()
        self.log = base.Log(self.tape)
        self.rates: list[tuple[dict[str, Any], Any, Any]] = []

    def __enter__(self) -> None:
        self.before = tapes.replace(self.tape)
        self.outer_log = base.use_log(self.log)
        for group in self.watched.groups():
            rate = group.get("lr")
            if isinstance(rate, float | int):
                symbol = self.table.symbol(functools.partial(_rate, group), float(rate))
                self.rates.append((group, rate, symbol))
                group["lr"] = symbol
        _ACTIVE.append(self.host)
        self.host.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.host.__exit__(*error)
        _ACTIVE.pop()
        tapes.replace(self.before)
        base.use_log(self.outer_log)
        changed = False
        for group, rate, symbol in self.rates:
            changed = changed or group["lr"] is not symbol
            group["lr"] = rate
        if changed and error[0] is None:
            raise CaptureError(
                "a learning rate was changed inside the compiled step (by a scheduler?), which a "
                "replay would not repeat; call scheduler.step() after the compiled step"
            )

    def finish(self, result: Any, *, first: bool) -> tuple[Replay | None, list[Value]]:
        """Execute what was recorded; returns how to replay it, or None if state was created."""
        self._drop_gradients()
        leaves, structure = pytree.tree_flatten(result)
        returned = [leaf for leaf in leaves if isinstance(leaf, base.LazyTensor)]
        values = [base.read(tensor) for tensor in returned]
        del returned
        plan = program.plan_of(self.tape)
        storages = self._written()
        targets = {storage.value.slot: storage for storage in storages}
        results = {value.slot for value in values}
        escaped = set(plan.live) - set(targets) - results
        if escaped:
            gc.collect()
            plan = program.plan_of(self.tape)
            escaped = set(plan.live) - set(targets) - results
        if escaped and not first:
            raise CaptureError(self._escape_message(escaped))
        if escaped:
            self._run_once(plan)
            return None, []
        return self._replay(plan, storages, leaves, structure, values)

    def _written(self) -> list[Storage]:
        """Storages from before the step that now have a value computed in it."""
        leaves = set(self.tape.leaves)
        found = []
        for storage, _ in self.log.storages.values():
            value = storage.value
            if value.tape is self.tape and value.slot not in leaves:
                found.append(storage)
        return found

    def _drop_gradients(self) -> None:
        """Gradients made inside the step stay inside the program."""
        for parameter in self.watched.parameters:
            gradient = parameter.grad
            if isinstance(gradient, base.LazyTensor):
                inside = id(gradient._storage) not in self.log.storages
                if inside and gradient._storage.value.tape is self.tape:
                    parameter.grad = None

    def _run_once(self, plan: program.Plan) -> None:
        tape = self.tape
        tape.scalars = [_present(scalar) for scalar in tape.scalars]
        program.execute(tape)

    def _replay(self, plan, storages, leaves, structure, values):
        tape = self.tape
        arrays = program.place([tape.values[slot] for slot in plan.leaves])
        plan.placed = tuple(tape.values[slot].layout for slot in plan.leaves)
        numbers = {slot: number for number, slot in enumerate(plan.live)}
        # Results in the order: written storages, then what is returned.
        order = [storage.value.slot for storage in storages]
        order += [
            value.slot for value in values if value.slot in numbers and value.slot not in order
        ]
        wanted = dict(zip(plan.live, plan.wanted, strict=True))
        plan.live = tuple(dict.fromkeys(order))
        plan.wanted = tuple(wanted[slot] for slot in plan.live)
        sources = [self._source(tape.values[slot]) for slot in plan.leaves]
        targets = [self._argument_of(storage, storage) for storage in storages]
        found = program.program_of(plan, arrays, tape.scalars)
        words = random.STATE.take(tape.draws)
        scalars = [_present(scalar) for scalar in tape.scalars]
        results = program.run(found, plan, arrays, scalars, words)
        numbers = {slot: number for number, slot in enumerate(plan.live)}
        outputs = self._outputs(leaves, structure, numbers)
        fresh = [Value(a, n) for a, n in zip(results, found.layouts, strict=True)]
        for slot, value in zip(plan.live, fresh, strict=True):
            old = tape.values[slot]
            old.array, old.layout, old.tape = value.array, value.layout, None
        program.forget(tape)
        replay = Replay(
            plan, found, sources, targets, self.table, list(tape.scalars), self.host, outputs
        )
        return replay, fresh

    def _source(self, value: Value) -> Any:
        """Where a replay finds an input: an argument, a storage, or here, if it is a constant."""
        for storage, first in self.log.storages.values():
            if first is value:
                return self._argument_of(storage, storage)
        if any(value is upload for upload in self.log.uploads):
            return value.array
        raise CaptureError(
            f"a compiled step reads a value of shape {value.array.shape} that belongs to no tensor "
            "alive before the step; make it an argument"
        )

    def _argument_of(self, storage: Storage, default: Any) -> Any:
        for number, tensor in enumerate(self.arguments):
            if tensor._storage is storage:
                return number
        return default

    def _outputs(self, leaves: list[Any], structure: Any, numbers: dict[int, int]) -> Any:
        marked = []
        for leaf in leaves:
            if isinstance(leaf, base.LazyTensor):
                argument = next((i for i, a in enumerate(self.arguments) if a is leaf), None)
                number = None if argument is not None else numbers.get(base.read(leaf).slot)
                if argument is None and number is None:
                    raise CaptureError(
                        "a compiled step returns a tensor that it neither computed nor got as an "
                        f"argument (shape {tuple(leaf.shape)}); use it directly instead"
                    )
                leaf = Output(number, argument, leaf._aval)
            marked.append(leaf)
        return pytree.tree_unflatten(marked, structure)

    def _escape_message(self, escaped: set[int]) -> str:
        shapes = []
        for slot in sorted(escaped)[:5]:
            shapes.append(f"value {slot}")
        return (
            f"{len(escaped)} tensors computed inside the compiled step outlive it without being "
            f"returned ({', '.join(shapes)}{', ..' if len(escaped) > 5 else ''}); a replay could "
            "not renew them. Return them from the step, or do not store them."
        )


def _rate(group: dict[str, Any]) -> float:
    return float(group["lr"])


def _present(scalar: Any) -> float:
    return scalar.node.value if isinstance(scalar, torch.SymFloat) else scalar


def _signature(leaves: list[Any]) -> tuple[Any, ...]:
    """What a program depends on in its arguments."""
    return tuple(
        (leaf._aval, leaf._chain, leaf._storage.value.layout, leaf.requires_grad)
        if isinstance(leaf, base.LazyTensor)
        else _static(leaf)
        for leaf in leaves
    )


def _static(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        raise CaptureError(
            f"a compiled step got a CPU tensor of shape {tuple(leaf.shape)} as an argument; move it "
            "with .to('jax') or isoshard.shard(tensor, mesh, spec) before the call"
        )
    try:
        hash(leaf)
    except TypeError:
        raise CaptureError(
            f"a compiled step got an argument of type {type(leaf).__name__}, which is neither a "
            "tensor nor hashable; pass tensors, numbers, strings, or nestings of them"
        ) from None
    return (type(leaf), leaf)


def _fill(outputs: Any, values: list[Value], arguments: list[base.LazyTensor]) -> Any:
    def leaf(mark: Any) -> Any:
        if not isinstance(mark, Output):
            return mark
        if mark.argument is not None:
            return arguments[mark.argument]
        return base.fresh(mark.aval, values[mark.result])

    return pytree.tree_map(leaf, outputs)


def symbol_of(tensor: base.LazyTensor) -> None:
    """Device values have no symbol: reading one in a captured step is refused by `to_host`."""
    return None
