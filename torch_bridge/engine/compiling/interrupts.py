"""Signals that wait until a program's results are where they belong.

A program overwrites its donated inputs. If Ctrl-C raised `KeyboardInterrupt` after that and before
the results are stored, a model would be lost. So Python's handlers of SIGINT and SIGTERM are put
off, and called at the end:

>>> import signal
>>> steps = []
>>> try:
...     with Uninterrupted():
...         signal.raise_signal(signal.SIGINT)
...         steps.append("stored")
... except KeyboardInterrupt:
...     steps.append("interrupted")
>>> steps
['stored', 'interrupted']

Only the main thread runs handlers, so other threads have nothing to put off.
"""

from __future__ import annotations

import importlib
import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (int(signal.SIGINT), int(signal.SIGTERM))
_C: Any = importlib.import_module("_signal")  # what `signal` wraps, without enums: a tenth of it


class Uninterrupted:
    """Context in which the handlers of signals wait; see the module."""

    __slots__ = ("_came", "_handlers")

    def __enter__(self) -> None:
        """Put the handlers off."""
        self._handlers: list[tuple[int, Any]] = []
        self._came: list[tuple[int, FrameType | None]] = []
        if threading.get_ident() != threading.main_thread().ident:
            return
        for signum in _SIGNALS:
            handler = _C.getsignal(signum)
            if callable(handler) and not isinstance(handler, Uninterrupted):
                self._handlers.append((signum, handler))
                _C.signal(signum, self)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Note that a signal came."""
        self._came.append((signum, frame))

    def __exit__(self, *exc: object) -> None:
        """Let them come."""
        for signum, handler in self._handlers:
            _C.signal(signum, handler)
        if self._came:
            handlers = dict(self._handlers)
            for signum, frame in self._came:
                handlers[signum](signum, frame)
