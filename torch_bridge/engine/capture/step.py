"""Capture one training step, to replay it without Python model code.

`compile(step)` runs `step` on the tape as usual, but looks at what comes in and what goes out: the
arguments, the storages it read (parameters, buffers, optimizer state, gradients), the numbers that
will be different next time (learning rates, step counts), and the storages it wrote. From then on a
call gathers those inputs, runs the one compiled program, and stores its outputs. Model code,
autograd and optimizer do not run again.

```
step.CompiledStep -> recording.Recording -> assemble.Assembly -> replay.Replay
   which program?         run it once            name inputs, outputs   run it again
```

The limits are those of any ahead-of-time capture: Python side effects other than tensor writes
happen once. What would be frozen without a word is refused with `CaptureError`: reading a tensor's
value, branching on a changing number, uploading a CPU tensor that is not an argument, random
numbers of the CPU, a scheduler stepping inside, a tensor that outlives the step without being
returned. A refused step leaves parameters and optimizer as they were.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from isoshard.core import metrics
from isoshard.torch_bridge._torch_internals import pytree

from .. import base, program, settings
from .. import tape as tapes
from .arguments import signature
from .assemble import Assembly, line_of
from .recording import ACTIVE, Recording
from .replay import Replay
from .symbolic import CaptureError
from .watch import Watched


def refuse_if_capturing(what: str) -> None:
    """Raise where a captured step asks for something that a replay could not give."""
    if ACTIVE:
        ACTIVE[-1].refused = CaptureError(
            f"{metrics.user_location()}: a compiled step needs {what} in the middle of the step, "
            "which a replay could not repeat. Return the tensor from the step and read it outside "
            "(for a Python branch, use torch.where)."
        )
        raise ACTIVE[-1].refused


def note_upload(tensor: torch.Tensor) -> None:
    """Refuse a CPU tensor that comes from outside a captured step."""
    if ACTIVE and not ACTIVE[-1].made_here(tensor):
        raise CaptureError(
            f"{metrics.user_location()}: a compiled step moves a CPU tensor of shape "
            f"{tuple(tensor.shape)} to the jax device that is not one of its arguments; a replay "
            "would use this one for ever. Move it before the step and pass it as an argument."
        )


class CompiledStep:
    """A step function that runs as one XLA program.

    Calls with other shapes, dtypes, layouts or static arguments are captured as further programs;
    so are calls after a module changed between training and evaluation, or an optimizer's
    hyperparameters other than the learning rate changed, or gradients are there that were not.

    In a class it decorates methods; each object has programs of its own.

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
            steps.bound[id(self)] = CompiledStep(self.step.__get__(instance, owner))
        return steps.bound[id(self)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        arguments = [leaf for leaf in leaves if isinstance(leaf, base.LazyTensor)]
        if self._watched is None:
            self._watched = Watched(self.step, (args, kwargs))
        described = (signature(leaves, arguments), settings.current())
        key = (structure, described, self._watched.guard())
        replay = self._replays.get(key)
        if replay is not None and replay.fits(self._watched.identity()):
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
        if tapes.is_tracing() or ACTIVE:
            where = "inside another compiled step" if ACTIVE else "while JAX traces"
            raise CaptureError(
                f"{metrics.user_location()}: a compiled step was called {where}; call the step "
                "function itself there"
            )
        program.sync()
        assert self._watched is not None
        recording = Recording(self._watched, arguments)
        try:
            recording.run(self.step, args, kwargs)
            may_open = key[:2] not in self._opened
            if may_open and recording.restart_with_state():
                self._watched = Watched(self.step, (args, kwargs))
                key = (*key[:2], self._watched.guard())
                recording = Recording(self._watched, arguments)
                recording.run(self.step, args, kwargs)
            assembly = Assembly(recording, line_of(self.step))
            plan, escaped = assembly.plan()
            if escaped and may_open:  # state was created: capture the next call
                self._opened.add(key[:2])
                self._watched = None
                return recording.execute()
            if escaped:
                assembly.refuse(escaped)
            replay = assembly.replay(plan)
        except BaseException:
            recording.take_back()
            raise
        replay.identity = self._watched.identity()
        self._replays[key] = self._last = replay
        del recording, assembly
        return replay.run(arguments)


class _Steps:
    """The compiled methods of one object; copies of the object compile anew."""

    def __init__(self):
        self.bound: dict[int, CompiledStep] = {}

    def __deepcopy__(self, memo: Any) -> _Steps:
        return _Steps()

    def __reduce__(self) -> Any:
        return _Steps, ()
