"""`torch.compiler.is_compiling()` is true while a step is captured.

Libraries query it before they look at values ("is every position attended to?"), and take another
path if it is true. While a step is captured it is, in the thread that captures. torch's optimizers
query it too, but mean dynamo: their arithmetic on step counts is captured by `symbolic_numbers` and
`cpu_ops`, so inside `optimizer.step()` the result is unchanged.

torch stores the flag in one variable for all threads. While steps are captured, its value is an
object whose truth value depends on the thread and the caller.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.traced import COMPILING
from isoshard.torch_bridge.engine.recording.recorder import recorder


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Context in which `torch.compiler.is_compiling()` holds where a recorder has a capture.

    >>> from isoshard.torch_bridge.engine.recording.tape import Tape
    >>> tape = recorder()
    >>> with compiling():
    ...     print(bool(torch.compiler.is_compiling()))
    ...     tape.capture = "a step"
    ...     print(bool(torch.compiler.is_compiling()))
    ...     tape.capture = None
    False
    True
    """
    with _LOCK:
        before = COMPILING.of(torch.compiler)
        flag = before if isinstance(before, _IsCompiling) else _IsCompiling(before)
        flag.captures += 1
        _set_flag(flag)
    try:
        yield
    finally:
        with _LOCK:
            flag.captures -= 1
            if not flag.captures and COMPILING.of(torch.compiler) is flag:
                _set_flag(flag.outside)


class _IsCompiling:
    """The value of the flag while steps are captured.

    Args:
        outside: its value for code that is not captured.

    Attributes:
        outside: the same.
        captures: the number of steps that are being captured.
    """

    def __init__(self, outside: bool):
        """See the class."""
        self.outside = outside
        self.captures = 0

    def __bool__(self) -> bool:
        """Whether this thread captures, outside of an optimizer."""
        current = recorder()
        if (current.capture is None and current.refusal is None) or _in_optimizer():
            return bool(self.outside)
        return True

    def __eq__(self, other: object) -> bool:
        """As of a bool."""
        return bool(self) == other

    def __hash__(self) -> int:
        """As of a bool."""
        return hash(bool(self))

    def __int__(self) -> int:
        """As of a bool."""
        return int(bool(self))

    def __or__(self, other: Any) -> Any:
        """As of a bool."""
        return bool(self) | other

    def __and__(self, other: Any) -> Any:
        """As of a bool."""
        return bool(self) & other

    def __xor__(self, other: Any) -> Any:
        """As of a bool."""
        return bool(self) ^ other

    __ror__, __rand__, __rxor__ = __or__, __and__, __xor__

    def __repr__(self) -> str:
        """As of a bool."""
        return repr(bool(self))


def _in_optimizer() -> bool:
    """Whether the flag is read inside an optimizer's `step` in the captured step."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == torch.optim.Optimizer.__module__:
            return True
        if name.startswith(__package__):
            return False
        frame = frame.f_back
    return False


def _set_flag(flag: bool | _IsCompiling) -> None:
    COMPILING.put(torch.compiler, flag)


_LOCK = threading.Lock()
