"""Calls in which a rank asked no other one, for those that wait for it there.

Ranks compare only what is new and is theirs together. So a rank that is given something else than
the others may have nothing to compare: a tensor of its own for a DTensor, a mesh without itself, an
exchange that was agreed on before. It goes on, and the others wait for it.

So each rank counts its calls by the place in the program, which is every line from the outermost
to the user's innermost, and remembers what it was given where it asked nobody. A rank that has
waited for a while asks for the one it waits for: "you are to come here for the third time; have you
passed by?" A thread of that one answers, at once or when it passes.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from isoshard.core.errors import DistributedError
from isoshard.core.runtime.bounded import Bounded
from isoshard.core.runtime.metrics import user_frame

from . import coordination

_HOUR = 3600.0
_KEPT = 1024
_OVER = "over"


class Call(NamedTuple):
    """One call among those of one place in the program.

    Attributes:
        place: a digest of what the ranks are asked and of the lines that led there.
        number: how often this rank has come there.
    """

    place: str
    number: int


class _Place:
    __slots__ = ("codes", "digest", "number")

    def __init__(self, subject: str, frame: FrameType | None):
        self.codes: list[CodeType] = []  # alive, so their ids stay theirs
        lines: list[str] = []
        while frame is not None:
            code = frame.f_code
            self.codes.append(code)
            lines.append(f"{Path(code.co_filename).name} {code.co_qualname} {frame.f_lasti}")
            frame = frame.f_back
        self.digest = hashlib.sha256("\n".join([subject, *lines]).encode()).hexdigest()[:16]
        self.number = 0


class _Calls:
    """Those of this process."""

    def __init__(self) -> None:
        self._places: Bounded[Any, _Place] = Bounded(_KEPT)
        self._passed: Bounded[Call, Callable[[], str]] = Bounded(_KEPT)
        self._asked: dict[Call, str] = {}
        self._answered: list[str] = []
        self._lock = threading.Lock()
        self._listener: threading.Thread | None = None

    def come(self, subject: str, words: Callable[[], str] | None) -> Call:
        """Count a call; with words, of one that asks nobody."""
        frame = line = user_frame()
        steps: list[int] = []
        while line is not None:
            steps += (id(line.f_code), line.f_lasti)
            line = line.f_back
        key = (subject, *steps)
        with self._lock:
            if self._listener is None:
                self._listener = threading.Thread(target=self._listen, daemon=True)
                self._listener.start()
                atexit.register(self._leave, os.getpid())
            place = self._places.get(key)
            if place is None:
                place = self._places[key] = _Place(subject, frame)
            place.number += 1
            call = Call(place.digest, place.number)
            if words is None:
                return call
            self._passed[call] = words
            room = self._asked.pop(call, None)
        if room is not None:
            self._answer(room, words)
        return call

    def answered(self) -> list[str]:
        """The agreements that this rank was waited for in, and has passed by; each once."""
        found, self._answered = self._answered, []
        return found

    def _answer(self, room: str, words: Callable[[], str]) -> None:
        me = coordination.rank_and_size()[0]
        coordination.put_if_absent(f"{room}/passed/{me}", words())
        self._answered.append(room)

    def _listen(self) -> None:
        """Wait for questions, in a thread of its own."""
        me, number = coordination.rank_and_size()[0], 0
        while True:
            try:
                told = coordination.get(f"asked/{me}/{number}", _HOUR)
                if told is None:
                    continue
                number += 1
                if told == _OVER:
                    return
                question = json.loads(told)
                call = Call(*question["call"])
                with self._lock:
                    words = self._passed.get(call)
                    if words is None:
                        self._asked[call] = question["room"]
                if words is not None:
                    self._answer(question["room"], words)
            except DistributedError:  # the run is over; there may be another one
                self._listener = None
                return

    def _leave(self, process: int) -> None:
        """End the thread: if it waited in JAX's service as Python ends, the process would crash."""
        if os.getpid() != process or self._listener is None or not coordination.is_started():
            return
        try:
            _ask(coordination.rank_and_size()[0], _OVER)
        except DistributedError:
            return
        self._listener.join(2.0)


def _ask(rank: int, question: str) -> None:
    number = 0
    while True:
        key = f"asked/{rank}/{number}"
        if coordination.get(key) is None and coordination.put_if_absent(key, question):
            return
        number += 1


_calls = _Calls()
come = _calls.come
answered = _calls.answered


def answer_of(rank: int, call: Call, room: str) -> str | None:
    """What a rank was given that has passed by a call; None as far as is known.

    Args:
        rank: which is waited for.
        call: where.
        room: of the agreement that it is waited for in.
    """
    if coordination.put_if_absent(f"{room}/asks/{rank}", "asked"):
        _ask(rank, json.dumps({"call": call, "room": room}))
    return coordination.get(f"{room}/passed/{rank}")
