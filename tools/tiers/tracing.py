"""Which files of the repository execute: every call of a Python function is noted while it lasts.

    with executed() as files:
        function()
    files    # {"core/layout/mesh.py", ..}

It sees the functions that run in this process: in the thread that asks, and in Python threads which
start meanwhile. What a module does when it is imported, and what a subprocess does, it does not.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from .sources import ours


@contextlib.contextmanager
def executed() -> Iterator[set[str]]:
    """Note the files whose functions run; the set is complete when the context ends."""
    codes: set[CodeType] = set()
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        codes.add(frame.f_code)

    before = sys.gettrace()
    threading.settrace(note)
    sys.settrace(note)
    try:
        yield files
    finally:
        sys.settrace(before)
        threading.settrace(before)  # type: ignore[arg-type]
        names = {code.co_filename for code in codes}
        files.update(filter(None, map(ours, names)))
