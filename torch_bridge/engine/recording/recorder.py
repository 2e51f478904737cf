"""Where operations go, and all else that decides what an operation does.

Each thread has its own current `Recorder`, and so has each asyncio task: what one of them opens (a
capture, a trace, a subprogram) the others do not see. There are three kinds: `tape.Tape` collects
operations to compile them together, `immediate.Immediate` runs them at once while JAX traces,
`subtrace.SubTrace` records the body of a loop or of a function.

>>> import threading
>>> mine, theirs = recorder(), []
>>> thread = threading.Thread(target=lambda: theirs.append(recorder()))
>>> thread.start(); thread.join()
>>> recorder() is mine, theirs[0] is mine
(True, False)
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from asyncio import _get_running_loop as _running_loop
from collections.abc import Callable, Sequence
from typing import Any

from isoshard.torch_bridge.engine.values.value import Value

from .recipes import Recipe


class Recorder:
    """Where operations go, and what decides what they do there.

    Attributes:
        log: the `MemoryLog` of the memory that operations touch; None without one.
        capture: the `CpuOps` of the step that is being captured, which rejects what a replay
            could not repeat; None outside of captures.
        mark: the `random_state.DrawnKeys` that notes the keys taken; None without one.
        source: the `random_state.RandomState` drawn from; None for the device's own.
        regions: each open `Region` of the script, with whether its code has run.
        opened: it was opened for some code, and other asyncio tasks are not to find it.
        imports: CPU tensors among operands are constants, and no mistake.
        failed: it could not be executed as a whole.
        plans: what is recorded is looked at, and never executed.
        refusal: the error of reading a value in code that JAX traces; None elsewhere.
        noted: the `OriginLog` of what is recorded here; None without one.
    """

    __slots__ = ("__weakref__", "capture", "log", "mark", "opened", "regions", "source")

    imports = False
    failed = False
    plans = False
    refusal: str | None = None
    noted: Any = None

    def __init__(self) -> None:
        """Nothing is noted, and nothing rejected."""
        self.log: Any = None  # these are of modules that import this one
        self.capture: Any = None
        self.mark: Any = None
        self.source: Any = None
        self.regions: tuple[tuple[Any, bool], ...] = ()
        self.opened = False

    def take_over(self, around: Recorder) -> None:
        """Note, draw and reject as the recorder around this one does."""
        self.log = around.log
        self.capture = around.capture
        self.mark = around.mark
        self.source = around.source
        self.regions = around.regions

    def record(
        self, recipe: Recipe, inputs: Sequence[Value], scalars: Sequence[Any] = ()
    ) -> list[Value]:
        """Add an operation and return its results."""
        raise NotImplementedError

    def view(self, base: Value, chain: Any) -> Value | None:
        """The value of a view that was read before, or None."""
        raise NotImplementedError

    def keep_view(self, base: Value, chain: Any, view: Value) -> None:
        """Remember the value of a view."""
        raise NotImplementedError

    def meant(self, layout: int) -> int:
        """The layout that a mark requests here; a plan's marks are on the mesh that is planned."""
        return layout

    def refuse(self, what: str) -> None:
        """Raise for a value that a replay of a captured step could not get.

        Raises:
            CaptureError: a step is being captured here.
        """
        if self.capture is not None:
            self.capture.refuse(what)

    def refuse_upload(self, tensor: Any) -> None:
        """Refuse a CPU tensor that a captured step takes from outside, but for a single number.

        Raises:
            CaptureError: a step is being captured here, and it is such a tensor.
        """
        if self.capture is not None:
            self.capture.refuse_upload(tensor)

    def check_process(self) -> None:
        """Raise in a process that has no devices; see `forking`."""

    def check_execution(self) -> None:
        """Raise if what is recorded here cannot be executed.

        Raises:
            CaptureError: a step is being captured here.
        """
        if self.log is not None and self.log.tape is self:
            self.log.refuse_others()
            self.refuse("the value of a tensor")

    def constant(self, value: Value) -> Any:
        """The array of a recorded value that is the same whatever the code is given, or None."""
        return None

    def check_handing_out(self) -> None:
        """Raise if an array is not to be handed out here.

        Raises:
            CaptureError: a step is being captured here, and a replay could not hand out another.
        """
        self.refuse("the value of a tensor")

    def value_before(self, value: Value) -> Value | None:
        """The value of memory before a step that another thread captures wrote `value` to it.

        None if it is not for another thread to know: it is computed where it was recorded.
        """
        if self.log is None or self.log.tape is not self:
            return None
        return self.log.before(value)


_Execute = Callable[[Any, Value | None], None]


class _Wiring:
    """What recorders are made by and executed by; set once, when those modules are imported."""

    def __init__(self) -> None:
        self.new: Callable[[], Recorder] = Recorder
        self.execute: _Execute = _not_wired


def _not_wired(tape: Any, only: Value | None) -> None:
    raise RuntimeError("import isoshard.torch_bridge before its engine")


_WIRING = _Wiring()


class _CurrentRecorder(threading.local):
    """The recorders of one thread: of its asyncio tasks, and of code outside of tasks."""

    def __init__(self) -> None:
        self.recorder = _WIRING.new()
        self.tasks: weakref.WeakKeyDictionary[Any, Recorder] = weakref.WeakKeyDictionary()


def wire_new(new: Callable[[], Recorder]) -> None:
    """Let each thread and task begin with what `new` makes."""
    _WIRING.new = new
    _THREAD.recorder = new()


def wire_execute(execute: _Execute) -> None:
    """Let `execute(recorder, only)` compute the values recorded somewhere."""
    _WIRING.execute = execute


def recorder() -> Recorder:
    """Where the operations of this thread, or of this asyncio task, go now."""
    if _running_loop() is None:
        return _THREAD.recorder
    return _of_task(asyncio.current_task())


def _of_task(task: Any) -> Recorder:
    if task is None:
        return _THREAD.recorder
    recorder = _THREAD.tasks.get(task)
    if recorder is None:
        if _THREAD.recorder.opened:  # the loop runs inside the code that it was opened for
            return _THREAD.recorder
        recorder = _THREAD.tasks[task] = _WIRING.new()
    return recorder


def replace(new: Recorder) -> Recorder:
    """Send this thread's (or task's) operations elsewhere; returns what took them before."""
    old = recorder()
    task = None if _running_loop() is None else asyncio.current_task()
    if task is None:
        _THREAD.recorder = new
    elif new is _THREAD.recorder:
        _THREAD.tasks.pop(task, None)
    else:
        _THREAD.tasks[task] = new
    return old


def execute(tape: Recorder, only: Value | None = None) -> None:
    """Compute what is recorded somewhere, or only one value of it."""
    _WIRING.execute(tape, only)


def materialize(values: Sequence[Value]) -> None:
    """Compute the array of every value, by executing their tapes."""
    for value in values:
        tape = value.tape  # another thread may execute it now: it sets the array, then the tape
        if value.array is None and tape is not None and tape.refusal is not None:
            value.array = tape.constant(value)
        if value.array is None and tape is not None:
            execute(tape, value if tape.failed else None)
            if value.array is None and value.tape is not tape:  # failed
                execute(value.tape)


_THREAD = _CurrentRecorder()
