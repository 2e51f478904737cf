"""Checks of values that are known only once a program has run.

A check is one more result of the program, so it costs no execution and no wait. It is looked at
where a script reads a value, which waits for the program anyway:

>>> import torch, isoshard as iso
>>> rest = iso.torch_function(lambda i: i % 1009, name="rest")
>>> wrong = rest(torch.tensor([2**40 + 7], device="jax"))
>>> try:
...     wrong.tolist()
... except iso.CopyError as error:
...     print(str(error).partition(",")[0])
rest was given int64 values that do not fit in int32
"""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import torch

from isoshard.torch_bridge.engine.values.value import Aval, Value

from . import lazy_tensor
from .recipes import Recipe
from .recorder import Recorder, recorder

KEPT = 256
"""How many checks wait for a value to be read; the oldest goes first."""


@dataclasses.dataclass(frozen=True, eq=False)
class Check:
    """A check that nobody has looked at.

    Attributes:
        flag: whether all is well: a bool.
        error: what is raised otherwise.
        message: of it.
        tape: that it was recorded on; None of a program that ran again.
    """

    flag: lazy_tensor.LazyTensor
    error: type[Exception]
    message: str
    tape: Recorder | None = None


def require(recipe: Recipe, value: Value, error: type[Exception], message: str) -> None:
    """Check a value when it is known.

    Args:
        recipe: computes from an array whether all is well.
        value: that it looks at.
        error: what is raised otherwise, where a value is read.
        message: of it.
    """
    tape = recorder()
    flag = lazy_tensor.fresh(_FLAG, tape.record(recipe, [value])[0])
    wait_for(Check(flag, error, message, tape))


def keep(value: Value) -> None:
    """Have a value computed that nobody looks at, for the effects of what computes it.

    Args:
        value: true.
    """
    wait_for(Check(lazy_tensor.fresh(_FLAG, value), RuntimeError, "", recorder()))


def wait_for(check: Check) -> None:
    """Look at a check when a value is read."""
    look()
    with _LOCK:
        _WAITING.append(check)
        del _WAITING[:-KEPT]


def of(tape: Recorder) -> list[Check]:
    """The checks that were recorded on a tape."""
    return [check for check in [*_WAITING] if check.tape is tape]


def forget(tape: Recorder) -> None:
    """Drop the checks of a tape.

    Args:
        tape: of a captured step, whose replays have checks of their own.
    """
    with _LOCK:
        _WAITING[:] = [check for check in _WAITING if check.tape is not tape]


def look() -> None:
    """Look at the checks whose programs have run.

    Raises:
        Exception: of the first check that found something.
    """
    if not _WAITING:
        return
    with _LOCK:
        ready = list(filter(_is_ready, _WAITING))
        _WAITING[:] = [check for check in _WAITING if check not in ready]
    for check in ready:
        if not np.asarray(check.flag._storage.value.array):
            raise check.error(check.message)


def _is_ready(check: Check) -> bool:
    array = check.flag._storage.value.array
    return array is not None and array.is_ready()


_FLAG = Aval.contiguous((), torch.bool)
_WAITING: list[Check] = []
_LOCK = threading.Lock()
