"""How much Python a call runs, counted: a measure of work that no busy machine changes."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

CALLS = ("call", "c_call")
ROUNDS = 5


def calls_of(call: Callable[[], Any]) -> int:
    """The calls of Python and C functions in `call`, in this thread: the fewest of some runs.

    The first runs fill what is kept for the next time, and end what an earlier run had left. A
    lambda of one call counts two: itself, and that.
    """
    return min(_counted(call) for _ in range(ROUNDS))


def _counted(call: Callable[[], Any]) -> int:
    counted = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal counted
        counted += event in CALLS

    before = sys.getprofile()
    collecting = gc.isenabled()
    gc.disable()  # what ends with the garbage runs calls of its own
    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(before)
        if collecting:
            gc.enable()
    return counted - 1  # less that of `sys.setprofile`
