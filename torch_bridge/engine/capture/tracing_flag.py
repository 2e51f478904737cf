"""Tell the user's code that it is being traced.

Libraries ask `torch.compiler.is_compiling()` before they look at values ("is every position
attended to?") and take another way if the answer is yes. While a step is captured it is, in the
thread that captures. torch's optimizers ask too, but mean dynamo: their arithmetic on step counts
is followed by `symbolic_numbers` and `host_counters`, so inside `optimizer.step()` the answer stays
what it was.

torch keeps the answer in one variable for all threads. While steps are captured, an object stands
there that looks at who asks.
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
    with _CHANGING:
        before = COMPILING.of(torch.compiler)
        mine = before if isinstance(before, _Answer) else _Answer(before)
        mine.captures += 1
        _answer(mine)
    try:
        yield
    finally:
        with _CHANGING:
            mine.captures -= 1
            if not mine.captures and COMPILING.of(torch.compiler) is mine:
                _answer(mine.otherwise)


class _Answer:
    """Whether the code that asks is being traced.

    Args:
        otherwise: what torch itself would say.

    Attributes:
        otherwise: the same.
        captures: how many steps are being captured.
    """

    def __init__(self, otherwise: bool):
        """See the class."""
        self.otherwise = otherwise
        self.captures = 0

    def __bool__(self) -> bool:
        """The answer to this thread."""
        here = recorder()
        if (here.capture is None and here.refusal is None) or _in_optimizer():
            return bool(self.otherwise)
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
    """Whether an optimizer's `step` inside of the captured step has called what asks."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name == torch.optim.Optimizer.__module__:
            return True
        if name.startswith(__package__):
            return False
        frame = frame.f_back
    return False


def _answer(answer: bool | _Answer) -> None:
    COMPILING.put(torch.compiler, answer)


_CHANGING = threading.Lock()
