"""An operation that fails poisons its results and what depends on them, and nothing else.

A tape is one program, so one operation that cannot be lowered, compiled or executed would take with
it whatever else was waiting. The operation at fault is looked for: an error while the program is
traced tells it; for any other, the program is bisected. Its results and those that depend on them
have failed: reading one raises the error again. The rest is computed.

>>> import jax, torch, isoshard
>>> def refuses(_):
...     raise ValueError("not today")
>>> refused = isoshard.torch_function(
...     lambda x: jax.pure_callback(refuses, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
... )
>>> x = torch.ones(2, device="jax")
>>> good, bad = x + 1, refused(x) + 1
>>> good
tensor([2., 2.], device='jax:0')
>>> try:
...     bad.tolist()
... except jax.errors.JaxRuntimeError as error:
...     print("not today" in str(error), error.__notes__[0].partition(",")[0])
True in the operation <lambda>
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from isoshard.core.runtime.jaxprs import equations
from isoshard.torch_bridge.engine.recording.recipes import RECIPES
from isoshard.torch_bridge.engine.recording.recorder import Recorder
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.values.value import Value, first_donated

from .compile_request import CompileRequest
from .interpreting import entry_index, needed


class FailedOps(Recorder):
    """Stands where the tape of a value stood that was never computed.

    Args:
        error: why.
    """

    __slots__ = ("_error", "_trace")
    failed = True

    def __init__(self, error: Exception):
        """See the class."""
        super().__init__()
        self._error = error
        self._trace = error.__traceback__

    def check_execution(self) -> None:
        """Raise the error that the operation failed with."""
        raise self._error.with_traceback(self._trace)


def abandon(tape: Tape, error: Exception) -> None:
    """Give up what a tape has recorded and will not compute."""
    failed = FailedOps(error)
    for slot in range(len(tape.slots)):
        value = tape.value(slot)
        if value is not None and value.tape is tape and value.array is None:
            value.tape = failed


def is_of_an_operation(error: Exception, arrays: Sequence[Any]) -> bool:
    """Whether an error may be one operation's own, and the others can be tried.

    Args:
        error: raised by a program, while it was made or run.
        arrays: its inputs; where they are gone, there is nothing to compute from.
    """
    exhausted = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
    return not exhausted and first_donated(arrays) is None


def calls_host(program: Any) -> bool:
    """Whether a traced program calls Python while it runs."""
    return any("callback" in step.primitive.name for step in equations(program))


def mark_failed(
    tape: Tape, plan: CompileRequest, error: Exception, fails: Callable[[CompileRequest], bool]
) -> bool:
    """Give up what an operation at fault makes, and all that depends on it.

    Returns:
        Whether the operation was found, and the rest of the tape can be tried.
    """
    index = entry_index(error)
    index = _searched(plan, fails) if index is None else index
    if index is None:
        return False
    lost = _dependents(plan.program, index)
    values = [tape.value(slot) for slot in plan.live if slot in lost]
    if not isinstance(error, FloatingPointError):  # explained where it was raised
        explain(error, plan, index, "; what does not depend on it is computed")
    _drop_frames(error)
    failed = FailedOps(error)
    for value in values:
        if value is not None:
            value.tape = failed
    return any(isinstance(value, Value) for value in values)


def _searched(plan: CompileRequest, fails: Callable[[CompileRequest], bool]) -> int | None:
    """The first entry with which a program fails; None where it fails without any, or no more."""
    used = needed(plan.program, plan.live)
    slots = _slots(plan.program)
    candidates = [
        index
        for index, entry in enumerate(plan.program)
        if used[index] and isinstance(entry[0], int)
    ]

    def first(count: int) -> bool:
        live = [slot for index in candidates[:count] for slot in slots[index]]
        request = dataclasses.replace(
            plan, live=tuple(live), result_layouts=(-1,) * len(live), donated=(), blocks=()
        )
        return fails(request)

    low, high = 0, len(candidates)  # the first `low` entries do not fail, the first `high` do
    if not high or not first(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if first(middle) else (middle, high)
    return candidates[low]


def _slots(entries: Sequence[Any]) -> list[range]:
    """The slots of each entry's results."""
    slots: list[range] = []
    slot = 0
    for entry in entries:
        count = RECIPES[entry[0]].count if isinstance(entry[0], int) else 1
        slots.append(range(slot, slot + count))
        slot += count
    return slots


def _dependents(entries: Sequence[Any], index: int) -> set[int]:
    """The slots of an entry's results, and of whatever is computed from them."""
    slots = _slots(entries)
    lost = set(slots[index])
    for entry, results in zip(entries[index + 1 :], slots[index + 1 :], strict=True):
        if isinstance(entry[0], int) and not lost.isdisjoint(entry[1:]):
            lost.update(results)
    return lost


def explain(error: Exception, plan: CompileRequest, index: int, rest: str = "") -> None:
    """Name the operation at fault in an error: its module, and the lines of user code."""
    entry = plan.program[index]
    if not isinstance(entry[0], int):
        shape, dtype = entry
        error.add_note(f"it is in an input of the program, of shape {shape} and dtype {dtype}")
        return
    recipe, origins = RECIPES[entry[0]], () if plan.notes is None else plan.notes.origins
    origin = origins[index] if index < len(origins) else None
    where = f"first recorded at {recipe.line}" if origin is None else str(origin)
    error.add_note(f"in the operation {recipe.name}, {where}{rest}")


def _drop_frames(error: Exception) -> None:
    """Drop the references of the frames."""
    trace = error.__traceback__
    if trace is not None and trace.tb_next is not None:
        error.__traceback__ = trace.tb_next  # without the frame that is running
        traceback.clear_frames(trace.tb_next)
