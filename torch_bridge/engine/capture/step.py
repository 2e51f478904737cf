"""Capture one training step, to replay it without Python model code.

`compile(step)` runs `step` on a tape as usual and records what it reads and writes: its arguments,
the storages it read (parameters, buffers, optimizer state, gradients), the floats that change from
call to call (learning rates, step counts), and the storages it wrote. From then on a call gathers
those inputs, runs one compiled program, and stores its outputs. Model code, autograd and optimizer
do not run again.

```
step.CompiledStep -> step_recording.Recording -> assemble.Assembly -> replay.Replay
   which program?           run it once           bind inputs, outputs     run it again
```

Two calls share a program if their arguments have the same shapes, dtypes and shardings, view their
storage in the same way, share storages with each other in the same way, if everything that is not
a tensor is equal (`signature`), and if the guards of the program pass.

The limits are those of any ahead-of-time capture: Python side effects other than tensor writes
happen once. What would silently become a constant raises `CaptureError`: reading a tensor's value,
branching on a changing float, uploading a CPU tensor that is not an argument, random numbers of the
CPU, a scheduler that steps inside, a tensor that outlives the step without being returned.
Parameters and optimizer state are then as they were before the call.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from isoshard.core.errors import CaptureError, RecompilationWarning
from isoshard.core.runtime import metrics
from isoshard.core.runtime.exact_keys import exact
from isoshard.core.runtime.uncollected import uncollected
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.ambient import ambient
from isoshard.torch_bridge.engine.recording.immediate import is_tracing
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values.dynamic_views import split_starts

from .assemble import Assembly, Repeat, checked_repeat, line_of
from .guard_sources import Source
from .guards import Change, is_plain
from .opaque_types import is_user_type
from .replay import Replay
from .step_gradients import raw_gradient
from .step_recording import Recording
from .tensor_guards import gradient_state
from .wrapper_nodes import tree_flatten

ShardArguments = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Shards the arguments of one call."""


class CompiledStep:
    """A step function that runs as one XLA program.

    Calls with other shapes, dtypes, shardings or static arguments are captured as further programs;
    so are calls after a module changed between training and evaluation, hyperparameters of an
    optimizer other than the learning rate changed, or gradients were added or removed.

    In a class it decorates methods; each object has programs of its own.

    Args:
        step: a function of tensors on the `jax` device (in any nesting) and of hashable values.
        repeat: "auto" or "always" to compile equal layers as loops; None unrolled.

    Attributes:
        step: the step function.
        repeat: the same as the argument.

    Raises:
        ValueError: `repeat` has another value.
        CaptureError: when called, if `step` does something that a replay would not repeat.
        TypeError: it decorates a method, and the object has `__slots__` without a `__dict__`.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> step = xs.compile(lambda x: x.square().sum())
        >>> step(torch.ones(2, device="jax")).item(), step(torch.ones(3, device="jax")).item()
        (2.0, 3.0)
        >>> len(step.replays)                           # a program for each shape
        2
    """

    def __init__(self, step: Callable[..., Any], repeat: Repeat = None):
        """See the class."""
        functools.update_wrapper(self, step, updated=())
        self.step = step
        self.repeat: Repeat = checked_repeat(repeat)
        self._replays: dict[Any, list[Replay]] = {}
        self._restarted: set[Any] = set()
        self._float_inputs: dict[tuple[int, Any], Source] = {}
        self._constant_floats: set[tuple[int, Any]] = set()
        self._count_inputs: dict[tuple[int, Any], Source] | None = {}  # None: they are constants
        self._reasons: collections.Counter[str] = collections.Counter()
        self._view_offsets: dict[Any, set[tuple[int, ...]]] = {}
        self._last: Replay | None = None
        self._shard_arguments: ShardArguments | None = None

    def __get__(self, instance: Any, owner: Any = None) -> CompiledStep:
        """The compiled method of one object."""
        if instance is None:
            return self
        if not hasattr(instance, "__dict__"):
            raise TypeError(
                f"a compiled method keeps its programs in the object's __dict__, and "
                f"{type(instance).__name__} has __slots__ without one; compile the bound method "
                "instead: step = isoshard.torch_bridge.compile(instance.method)"
            )
        steps = vars(instance).setdefault("_isoshard_compiled", _Steps())
        if id(self) not in steps.bound:
            steps.bound[id(self)] = CompiledStep(self.step.__get__(instance, owner), self.repeat)
        return steps.bound[id(self)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        if PLANNING and recorder().plans:
            return self.step(*args, **kwargs)
        if self._shard_arguments is not None:
            self._shard_arguments(args, kwargs)
        if STAND_INS:
            for argument in (*args, *kwargs.values()):
                if type(argument) in STAND_INS:
                    return STAND_INS[type(argument)](self, args, kwargs)
        return self.run(args, kwargs)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the step with its arguments as they are."""
        leaves, structure = _flattened(args, kwargs)
        arguments = [leaf for leaf in leaves if isinstance(leaf, lazy_tensor.LazyTensor)]
        key = (structure, signature(leaves, arguments), ambient())
        replays = self._replays.setdefault(key, [])
        for index, replay in enumerate(replays):
            if replay.fits(arguments):
                if index:
                    replays.insert(0, replays.pop(index))
                self._last = replay
                return replay(arguments)
        self._last = None
        self._note_guard_failures(replays)
        objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        with uncollected():
            return self._capture(key, args, kwargs, objects, arguments)

    @property
    def replays(self) -> list[Replay]:
        """The captured programs, oldest first."""
        return [replay for replays in self._replays.values() for replay in reversed(replays)]

    @property
    def last(self) -> Replay | None:
        """The program that ran last; None before the first capture."""
        return self._last

    def _capture(
        self,
        key: Any,
        args: Any,
        kwargs: Any,
        objects: list[Any],
        arguments: list[lazy_tensor.LazyTensor],
    ) -> Any:
        is_nested = recorder().capture is not None
        if is_nested or is_tracing():
            context = "inside another compiled step" if is_nested else "while JAX traces"
            raise CaptureError(
                f"{metrics.user_location()}: a compiled step was called {context}; call the step "
                "function itself there"
            )
        program.sync()
        for sharder in ARGUMENT_SHARDERS if self._shard_arguments is None else ():
            self._shard_arguments = sharder(self.step, args, kwargs)
            if self._shard_arguments is not None:
                return self(*args, **kwargs)
        metrics.count("captures")

        call = (args, kwargs, objects, arguments)
        recording = self._record(call)
        try:
            is_first = key not in self._restarted
            if is_first and recording.restart_with_state():
                recording = self._record(call)
            if is_first and recording.initializes():
                recording = self._record_again(call, recording)
            reason = recording.reason()
            if reason is not None:
                self._add_float_input(recording.change)
                if self._count_inputs is not None:
                    counts = recording.side_effects.counts()
                    self._count_inputs |= {count.key(0): count for count in counts}
                self._count_not_replayed(reason)
                return recording.execute()
            assembly = Assembly(recording, line_of(self.step), self.repeat)
            plan, escaped = assembly.plan()
            if escaped and (is_first or recording.is_optimizer_state(escaped)):
                # The next call is captured.
                self._restarted.add(key)
                return recording.execute()
            if escaped:
                assembly.raise_escaped(escaped)
            replay = assembly.replay(plan)
        except BaseException:
            recording.rollback()
            raise
        recording.floats.restore()
        for rebinding in recording.rebindings:
            rebinding.restore()
        self._store(key, replay)
        self._warn_of_views(arguments)
        del recording, assembly
        return replay.run(arguments)

    def _record(self, call: tuple[Any, ...]) -> Recording:
        """Run the step on a tape; if that fails, with one float input less."""
        args, kwargs, objects, arguments = call
        floats = [*self._float_inputs.values(), *(self._count_inputs or {}).values()]
        recording = Recording(self.step, objects, arguments, floats)
        try:
            recording.run(args, kwargs)
        except Exception:
            recording.rollback()
            if not floats:
                raise
        except BaseException:
            recording.rollback()
            raise
        else:
            return recording
        recording.side_effects.restore()
        # The code may need the value of the float.
        if self._count_inputs:
            self._count_inputs = None
        else:
            self._constant_floats.add(self._float_inputs.popitem()[0])
        return self._record(call)

    def _record_again(self, call: tuple[Any, ...], first: Recording) -> Recording:
        """Record the step as later calls will run, if they compute what this one computes.

        A first call often initializes attributes: a cache, an option that is computed once.
        """
        computed = first.computed()
        first.side_effects.restore_tensors(first.existed_before)
        first.rollback()
        second = self._record(call)
        if second.reason() is None and second.computes(computed):
            return second
        second.rollback()
        second.side_effects.restore()
        first.side_effects.restore()
        return self._record(call)

    def _note_guard_failures(self, replays: list[Replay]) -> None:
        """Handle the first change that failed the guard of each replay."""
        changes = [replay.guards[0].change() for replay in replays]
        for change in changes:
            self._add_float_input(change)
        if changes and changes[0] is not None and changes[0].key not in self._float_inputs:
            self._warn(
                changes[0].name,
                f"a compiled step was captured again {WARN_AFTER} times because a value changed: "
                f"{changes[0].text}. Each value of it is another capture; pass it as a tensor, or "
                "make it a float, which becomes an input",
            )

    def _warn_of_views(self, arguments: list[lazy_tensor.LazyTensor]) -> None:
        """Warn of arguments that view their storage at another offset in each call."""
        views = [split_starts(argument._chain.ops) for argument in arguments]
        offsets = tuple([start for _, view_offsets in views for start in view_offsets])
        if not offsets:
            return
        key = tuple([argument._aval for argument in arguments]), tuple([ops for ops, _ in views])
        seen = self._view_offsets.setdefault(key, set())
        if len(seen) < WARN_AFTER:
            seen.add(offsets)
            if len(seen) == WARN_AFTER:
                self._emit(
                    f"a compiled step was captured {WARN_AFTER} times because an argument was "
                    f"another slice of a tensor each time, last at {metrics.user_location()}. The "
                    "offset of an argument in its storage is part of the program: pass "
                    "data[i].clone(), which is one program for every i, or get the batches from "
                    "isoshard.data.loader",
                    stacklevel=5,
                )

    def _add_float_input(self, change: Change | None) -> None:
        """Make a float that changed an input of the next capture."""
        if change is None or change.key in self._constant_floats:
            return
        if type(change.before) is float and type(change.now) is float:
            source = change.single_source
            if source is not None:
                self._float_inputs[change.key] = source

    def _store(self, key: Any, replay: Replay) -> None:
        """Store a replay as the first one to try; drop those whose storages were replaced."""
        replays = [replay]
        for other in self._replays.get(key, ()):
            values, tensors = other.guards
            change = values.change()
            if tensors.views_unchanged() and (change is None or is_plain(change.before)):
                replays.append(other)
        self._replays[key] = replays[:MAX_CAPTURES]
        self._last = replay

    def _count_not_replayed(self, reason: str) -> None:
        """Count a call that was not captured, and warn when it happens again and again."""
        metrics.count("calls_without_replay")
        self._warn(
            reason.partition(", which was ")[0],
            f"{WARN_AFTER} calls of a compiled step ran as without compile, since a replay would "
            f"not be equivalent: {reason}. Move it out of the step, store it in a tensor on the "
            f"{naming.current().type} device, or pass it as an argument",
        )

    def _warn(self, reason: str, text: str) -> None:
        """Count a reason, and warn when it comes again and again."""
        self._reasons[reason] += 1
        if self._reasons[reason] == WARN_AFTER:
            self._emit(text, stacklevel=6)

    def _emit(self, text: str, *, stacklevel: int) -> None:
        where = line_of(self.step)
        warnings.warn(f"{where}: {text}.", RecompilationWarning, stacklevel=stacklevel)


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call, and a key for its structure."""
    if not kwargs and all(isinstance(arg, lazy_tensor.LazyTensor) for arg in args):
        return list(args), len(args)
    return tree_flatten((args, kwargs))


PLANNING: set[int] = set()
"""Ids of the recorders that plan a step: a compiled step inside it is its function."""
ARGUMENT_SHARDERS: list[Callable[..., ShardArguments | None]] = []
"""Called with a step and its first arguments; return a function that shards arguments, or None."""
StandInRunner = Callable[[CompiledStep, tuple[Any, ...], dict[str, Any]], Any]
STAND_INS: dict[type, StandInRunner] = {}
"""By the type of an argument: runs a step with another object in its place."""
MAX_CAPTURES = 16
"""Captures for arguments of one signature."""
WARN_AFTER = 8
"""Calls that are not captured, or captured again, for one reason before a warning."""


class _Steps:
    """The compiled methods of one object; copies of the object compile anew."""

    def __init__(self):
        self.bound: dict[int, CompiledStep] = {}

    def __deepcopy__(self, memo: Any) -> _Steps:
        return _Steps()

    def __reduce__(self) -> Any:
        return _Steps, ()


def signature(leaves: list[Any], arguments: list[lazy_tensor.LazyTensor]) -> tuple[Any, ...]:
    """A hashable key for the arguments of a call.

    Args:
        leaves: every argument, flattened.
        arguments: those that are tensors on the `jax` device.

    Raises:
        CaptureError: an argument is a CPU tensor, or neither a tensor nor hashable.
    """
    storages = [id(argument._storage) for argument in arguments]
    return (
        tuple([_leaf_key(leaf) for leaf in leaves]),
        tuple([storages.index(storage) for storage in storages]),
    )


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, lazy_tensor.LazyTensor):
        fields = (leaf._aval, leaf._chain, leaf._storage.value.layout, leaf.requires_grad)
        may_have_gradient = leaf.requires_grad and leaf.is_leaf
        return (*fields, gradient_state(raw_gradient(leaf))) if may_have_gradient else fields
    if isinstance(leaf, torch.Tensor):
        raise CaptureError(
            f"a compiled step got a CPU tensor of shape {tuple(leaf.shape)} as an argument; move "
            f"it with {naming.moving()} or isoshard.shard(tensor, mesh, spec) before the call"
        )
    try:
        hash(leaf)
    except TypeError:
        raise CaptureError(
            f"a compiled step got an argument of type {type(leaf).__name__}, which is neither a "
            "tensor nor hashable; pass tensors, numbers, strings, or nestings of them (a dataclass "
            "becomes one with torch.utils._pytree.register_dataclass)"
        ) from None
    return _value_key(leaf)


def _value_key(leaf: Any) -> Any:
    """A key that two leaves share if no code can distinguish them.

    Objects of user classes are compared by identity, since equal ones may have other attributes.
    """
    cls = type(leaf)
    if dataclasses.is_dataclass(leaf) and getattr(cls, "__dataclass_params__").frozen:  # noqa: B009
        return (cls, *(_value_key(getattr(leaf, field.name)) for field in dataclasses.fields(leaf)))
    return (cls, id(leaf)) if is_user_type(cls) else exact(leaf)
