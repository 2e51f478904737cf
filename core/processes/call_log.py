"""Calls in which a rank compares arguments with other ranks, or would compare other arguments.

Ranks compare only new arguments that concern several of them. So a rank with other arguments may
compare nothing: it goes on, and the others wait for it.

Calls are counted by call site: every line of the program from the outermost to the user's
innermost. A rank that has waited for a while queries the rank that it waits for: "have you passed
the third call at this site?" A thread of that rank answers, at once or when it passes the call.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from isoshard.core.errors import DistributedError
from isoshard.core.runtime.caches import Bounded
from isoshard.core.runtime.metrics import user_frame

from . import coordination

_HOUR = 3600.0
_CALLS = 1024  # that are logged
_OVER = "over"


class Call(NamedTuple):
    """A call in a rank.

    Attributes:
        digest: of its subject and its call site.
        index: of the calls with this digest.
    """

    digest: str
    index: int


class _CallSite:
    __slots__ = ("codes", "count", "digest")

    def __init__(self, subject: str, frame: FrameType | None):
        self.codes: list[CodeType] = []  # kept alive, so no other code gets their ids
        lines: list[str] = []
        while frame is not None:
            code = frame.f_code
            self.codes.append(code)
            lines.append(f"{Path(code.co_filename).name} {code.co_qualname} {frame.f_lasti}")
            frame = frame.f_back
        self.digest = hashlib.sha256("\n".join([subject, *lines]).encode()).hexdigest()[:16]
        self.count = 0


class CallLog:
    """The log of this process."""

    def __init__(self) -> None:
        """Start without a thread, until there is a call."""
        self._sites: Bounded[Any, _CallSite] = Bounded(_CALLS, "calls by line", agreed=True)
        self._passed: Bounded[Call, Callable[[], str]] = Bounded(
            _CALLS, "calls that compared nothing", agreed=True
        )
        self._questions: dict[Call, str] = {}
        self._answered: list[str] = []
        self._lock = threading.Lock()
        self._listener: threading.Thread | None = None

    def enter(self, subject: str, describe: Callable[[], str] | None) -> Call:
        """Log a call; `describe` is given for a call that compares nothing."""
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
            site = self._sites.get(key)
            if site is None:
                site = self._sites[key] = _CallSite(subject, frame)
            site.count += 1
            call = Call(site.digest, site.count)
            if describe is None:
                return call
            self._passed[call] = describe
            namespace = self._questions.pop(call, None)
        if namespace is not None:
            self._answer(namespace, describe)
        return call

    def answered(self) -> list[str]:
        """The agreements that waited for this rank, which has passed them; each is listed once."""
        namespaces, self._answered = self._answered, []
        return namespaces

    def _answer(self, namespace: str, describe: Callable[[], str]) -> None:
        rank = coordination.rank_and_size()[0]
        coordination.put_if_absent(f"{namespace}/passed/{rank}", describe())
        self._answered.append(namespace)

    def _listen(self) -> None:
        """Answer queries, in a thread of its own."""
        rank, index = coordination.rank_and_size()[0], 0
        while True:
            try:
                text = coordination.get(f"asked/{rank}/{index}", _HOUR)
                if text is None:
                    continue
                index += 1
                if text == _OVER:
                    return
                question = json.loads(text)
                call = Call(*question["call"])
                with self._lock:
                    describe = self._passed.get(call)
                    if describe is None:
                        self._questions[call] = question["namespace"]
                if describe is not None:
                    self._answer(question["namespace"], describe)
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


_log = CallLog()
enter = _log.enter
answered = _log.answered


def _ask(rank: int, question: str) -> None:
    for index in itertools.count():
        key = f"asked/{rank}/{index}"
        if coordination.get(key) is None and coordination.put_if_absent(key, question):
            return


def answer_of(rank: int, call: Call, namespace: str) -> str | None:
    """The arguments of a rank that has passed a call; None as long as it has not answered."""
    if coordination.put_if_absent(f"{namespace}/asks/{rank}", "asked"):
        _ask(rank, json.dumps({"call": call, "namespace": namespace}))
    return coordination.get(f"{namespace}/passed/{rank}")
