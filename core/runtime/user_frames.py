"""The line of user code that is running, for messages and reports."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

# Code of these packages is never the user's own; the demo in isoshard.cli is.
_INTERNAL = ("isoshard.", "torch.", "jax.", "jaxlib.", "flax.", "optax.", "numpy.")
_INTERNAL += ("contextlib.", "functools.", "logging.", "warnings.")
_OWN = ("isoshard.cli.",)


def user_location() -> str:
    """Find the line of user code that is running.

    Returns:
        `file.py:123` of the innermost call outside isoshard, torch, jax, flax, optax and numpy;
        "unknown" where there is none.

    Example:
        >>> user_location().partition(":")[0]             # here doctest is the user
        'doctest.py'
    """
    frame = user_frame()
    return "unknown" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def user_frame() -> FrameType | None:
    """Find the innermost call outside isoshard, torch, jax, flax, optax and numpy, if any."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "") + "."
        if not module.startswith(_INTERNAL) or module.startswith(_OWN):
            return frame
        frame = frame.f_back
    return None
