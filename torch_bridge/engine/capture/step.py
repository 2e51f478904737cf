"""Capture one training step, to replay it without Python model code.

`compile(step)` runs `step` on the tape as usual, but looks at what comes in and what goes out: the
arguments, the storages it read (parameters, buffers, optimizer state, gradients), the numbers that
will be different next time (learning rates, step counts), and the storages it wrote. From then on a
call gathers those inputs, runs the one compiled program, and stores its outputs. Model code,
autograd and optimizer do not run again.

```
step.CompiledStep -> step_recording.Recording -> assemble.Assembly -> replay.Replay
   which program?           run it once           name inputs, outputs   run it again
```

The limits are those of any ahead-of-time capture: Python side effects other than tensor writes
happen once. What would silently become a constant is refused with `CaptureError`: reading a
tensor's value, branching on a changing number, uploading a CPU tensor that is not an argument,
random numbers of the CPU, a scheduler stepping inside, a tensor that outlives the step without
being returned. A refused step leaves parameters and optimizer as they were.
"""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from isoshard.core.errors import CaptureError, RecompilationWarning
from isoshard.core.runtime import metrics
from isoshard.core.runtime.uncollected import uncollected
from isoshard.torch_bridge import naming
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.engine.compiling import program
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.ambient import ambient
from isoshard.torch_bridge.engine.recording.immediate import is_tracing
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.values.dynamic_views import split_starts

from .assemble import Assembly, line_of
from .guards import Change, is_plain
from .holders import Holder
from .replay import Replay
from .rolled_step import Repeat, checked_repeat
from .step_arguments import signature
from .step_recording import Recording

Placing = Callable[[tuple[Any, ...], dict[str, Any]], None]
"""Lays out the arguments of one call."""


class CompiledStep:
    """A step function that runs as one XLA program.

    Calls with other shapes, dtypes, layouts or static arguments are captured as further programs;
    so are calls after a module changed between training and evaluation, or an optimizer's
    hyperparameters other than the learning rate changed, or gradients are there that were not.

    In a class it decorates methods; each object has programs of its own.

    Args:
        step: a function of tensors on the `jax` device (in any nesting) and of hashable values.
        repeat: "auto" or "always" to compile equal layers as loops; None as they are.

    Attributes:
        step: as given.
        repeat: likewise.

    Raises:
        ValueError: `repeat` is something else.
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
        self._opened: set[Any] = set()
        self._places: dict[tuple[int, Any], Holder] = {}
        self._fixed: set[tuple[int, Any]] = set()
        self._reasons: collections.Counter[str] = collections.Counter()
        self._starts: dict[Any, set[tuple[int, ...]]] = {}
        self._last: Replay | None = None
        self._placing: Placing | None = None

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
        if PLANS and recorder().plans:
            return self.step(*args, **kwargs)
        if self._placing is not None:
            self._placing(args, kwargs)
        leaves, structure = _flattened(args, kwargs)
        arguments = [leaf for leaf in leaves if isinstance(leaf, lazy_tensor.LazyTensor)]
        key = (structure, signature(leaves, arguments), ambient())
        known = self._replays.setdefault(key, [])
        for place, replay in enumerate(known):
            if replay.fits(arguments):
                if place:
                    known.insert(0, known.pop(place))
                self._last = replay
                return replay(arguments)
        self._last = None
        self._note_changes(known)
        objects = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        with uncollected():
            return self._capture(key, args, kwargs, objects, arguments)

    @property
    def replays(self) -> list[Replay]:
        """The captured programs, oldest first."""
        return [replay for known in self._replays.values() for replay in reversed(known)]

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
        inside = recorder().capture is not None
        if inside or is_tracing():
            where = "inside another compiled step" if inside else "while JAX traces"
            raise CaptureError(
                f"{metrics.user_location()}: a compiled step was called {where}; call the step "
                "function itself there"
            )
        program.sync()
        for lay_out in LAYING_OUT if self._placing is None else ():
            self._placing = lay_out(self.step, args, kwargs)
            if self._placing is not None:
                return self(*args, **kwargs)
        metrics.count("captures")

        call = (args, kwargs, objects, arguments)
        recording = self._record(call)
        try:
            may_open = key not in self._opened
            if may_open and recording.restart_with_state():
                recording = self._record(call)
            if may_open and recording.initializes():
                recording = self._settled(call, recording)
            reason = recording.reason()
            if reason is not None:
                self._note_change(recording.changed)
                self._tell(reason)
                return recording.execute()
            assembly = Assembly(recording, line_of(self.step), self.repeat)
            plan, escaped = assembly.plan()
            if escaped and (may_open or recording.makes_state(escaped)):  # capture the next call
                self._opened.add(key)
                return recording.execute()
            if escaped:
                assembly.refuse(escaped)
            replay = assembly.replay(plan)
        except BaseException:
            recording.take_back()
            raise
        recording.numbers.put_back()
        for one in recording.rebound:
            one.put_back()
        self._keep(key, replay)
        self._note_places(arguments)
        del recording, assembly
        return replay.run(arguments)

    def _record(self, call: tuple[Any, ...]) -> Recording:
        """Run the step on a tape; where it refuses a number that is an input, without that."""
        args, kwargs, objects, arguments = call
        recording = Recording(self.step, objects, arguments, list(self._places.values()))
        try:
            recording.run(args, kwargs)
        except Exception:
            recording.take_back()
            if not self._places:
                raise
        except BaseException:
            recording.take_back()
            raise
        else:
            return recording
        recording.effects.put_back()
        self._fixed.add(self._places.popitem()[0])  # the code may want the number itself
        return self._record(call)

    def _settled(self, call: tuple[Any, ...], first: Recording) -> Recording:
        """The step as its later calls will run, if they compute what this one computes.

        A first call often fills in what was not there: a cache, an option worked out once.
        """
        computed = first.computed()
        first.effects.put_back_tensors(first.is_outer)
        first.take_back()
        again = self._record(call)
        if again.reason() is None and again.computes(computed):
            return again
        again.take_back()
        again.effects.put_back()
        first.effects.put_back()
        return self._record(call)

    def _note_changes(self, known: list[Replay]) -> None:
        """Note what kept each replay from being used, and hold it no longer than that."""
        changed = [replay.guards[0].change() for replay in known]
        for change in changed:
            self._note_change(change)
        if changed and changed[0] is not None and changed[0].address not in self._places:
            self._warn(
                changed[0].name,
                f"a compiled step was captured anew {PATIENCE} times because another value was "
                f"found: {changed[0].text}. Each value of it is another capture; pass it as a "
                "tensor, or keep a float there, which becomes an input",
            )

    def _note_places(self, arguments: list[lazy_tensor.LazyTensor]) -> None:
        """Warn of arguments that view their memory at another place in each call."""
        views = [split_starts(argument._chain.ops) for argument in arguments]
        starts = tuple([start for _, places in views for start in places])
        if not starts:
            return
        kind = tuple([argument._aval for argument in arguments]), tuple([ops for ops, _ in views])
        seen = self._starts.setdefault(kind, set())
        if len(seen) < PATIENCE:
            seen.add(starts)
            if len(seen) == PATIENCE:
                self._say(
                    f"a compiled step was captured {PATIENCE} times because an argument was "
                    f"another part of a tensor each time, last at {metrics.user_location()}. Which "
                    "part of its memory an argument shows belongs to the program: pass "
                    "data[i].clone(), which is one program for every i, or let "
                    "isoshard.data.loader bring the batches",
                    stacklevel=5,
                )

    def _note_change(self, change: Change | None) -> None:
        """Let a number that changes be an input from the next capture on."""
        if change is None or change.address in self._fixed:
            return
        if type(change.before) is float and type(change.now) is float and change.number >= 0:
            place = change.holder.single(change.number)
            if place is not None:
                self._places[change.address] = place

    def _keep(self, key: Any, replay: Replay) -> None:
        """Keep a replay as the first to be tried, without those whose memory was replaced."""
        known = [replay]
        for other in self._replays.get(key, ()):
            values, tensors = other.guards
            change = values.change()
            if tensors.are_in_place() and (change is None or is_plain(change.before)):
                known.append(other)
        self._replays[key] = known[:KEPT]
        self._last = replay

    def _tell(self, reason: str) -> None:
        """Count a call that was not captured, and warn when it happens again and again."""
        metrics.count("calls_without_replay")
        self._warn(
            reason.partition(", which was ")[0],
            f"{PATIENCE} calls of a compiled step ran as they would without compile, since a "
            f"replay would not do what the step does: {reason}. Move it out of the step, keep it "
            f"in a tensor on the {naming.current().type} device, or pass it as an argument",
        )

    def _warn(self, reason: str, text: str) -> None:
        """Count a reason, and warn when it comes again and again."""
        self._reasons[reason] += 1
        if self._reasons[reason] == PATIENCE:
            self._say(text, stacklevel=6)

    def _say(self, text: str, *, stacklevel: int) -> None:
        where = line_of(self.step)
        warnings.warn(f"{where}: {text}.", RecompilationWarning, stacklevel=stacklevel)


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of a call, and what tells it from calls of another structure."""
    if not kwargs and all(isinstance(one, torch.Tensor) for one in args):
        return list(args), len(args)
    return pytree.tree_flatten((args, kwargs))


PLANS: set[int] = set()
"""Ids of the recorders that plan a step just now: a compiled step inside it is its function."""
LAYING_OUT: list[Callable[..., Placing | None]] = []
"""Called with a step and the arguments of its first call: what was asked to lay them out."""
KEPT = 16
"""Captures kept for arguments of one kind."""
PATIENCE = 8
"""Calls that are not captured, or captured anew, for one reason before a warning says so."""


class _Steps:
    """The compiled methods of one object; copies of the object compile anew."""

    def __init__(self):
        self.bound: dict[int, CompiledStep] = {}

    def __deepcopy__(self, memo: Any) -> _Steps:
        return _Steps()

    def __reduce__(self) -> Any:
        return _Steps, ()
