"""Programs that were recorded before, with the origins of their operations.

Reading the stack for each operation costs as much as recording it. A tape that repeats a program
has the origins of that one, so operations are compared with the program that was recorded last and
the stack is read from the first that differs on.

>>> from isoshard.torch_bridge.engine.recording.origins import Origin
>>> remember(EarlierProgram(((1, 0), (2, 1)), (Origin("Net/a"), Origin("Net/b"))))
>>> beginning_with([(1, 0)]).origins[1].path
'Net/b'
>>> beginning_with([(1, 3)]) is None
True
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from isoshard.core.runtime import caches

from .origins import Origin


class EarlierProgram(NamedTuple):
    """A program as it was recorded.

    Attributes:
        entries: as `Tape.program`.
        origins: of each entry; None for an input.
    """

    entries: tuple[Any, ...]
    origins: tuple[Origin | None, ...]


_MOST = 64
_PROGRAMS: list[EarlierProgram] = []
_CHANGING = threading.Lock()
caches.register("engine: origins of programs", _MOST, lambda: len(_PROGRAMS), _PROGRAMS.clear)


def remember(program: EarlierProgram) -> None:
    """Keep a program, as the newest."""
    with _CHANGING:
        _PROGRAMS.insert(0, program)
        del _PROGRAMS[_MOST:]


def newest() -> EarlierProgram | None:
    """The program that was kept last."""
    return next(iter(_PROGRAMS), None)


def beginning_with(entries: Sequence[Any]) -> EarlierProgram | None:
    """A program that begins with these entries."""
    count = len(entries)
    last = entries[-1]
    prefix = None
    for program in _PROGRAMS.copy():
        if len(program.entries) < count or program.entries[count - 1] != last:
            continue
        prefix = tuple(entries) if prefix is None else prefix
        if program.entries[:count] == prefix:
            return program
    return None
