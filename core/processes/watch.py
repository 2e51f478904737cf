"""A process that fails tells the others, and they end: nobody waits for it in a collective.

Every process keeps a connection to the process of rank 0. What goes over it:

- A rank with an uncaught exception sends its last line ("rank 2 failed: ValueError: boom"). Rank 0
  passes it on, everyone else prints it and ends, whatever its main thread is doing: a thread of its
  own listens. The failing rank ends after the others have heard of it.
- A rank that is killed, or ends by `os._exit`, sends nothing: its connection closes, which the
  operating system sees to, and rank 0 (or, if it was rank 0, everyone) notices.
- A rank that comes to its end waits for the others in JAX's shutdown; one that fails meanwhile is
  still heard. If they do not come within the caller's patience, it counts as failed. `sys.exit` is
  an end as any other: no exit handler can see its code.

A machine that falls silent without closing its connections is noticed by the heartbeats of JAX's
coordination service, which ends the processes with a message of its own.

How long it takes: `HEARD` seconds until every rank knows, `ENDED` until every rank has ended, each
counted from the fault. A rank ends with exit code 1; its buffers of stdout and stderr are written,
its `finally` blocks do not run. No port needs to be given: rank 0 takes a free one, and says it
with a secret word through the coordination service.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from .watch_connections import Connection, Hub, Spoke

HEARD = 2.0
ENDED = 5.0
_GRACE = 1.0  # for the main thread to end by itself, as it does if it has found the same fault


class Watch:
    """This process's end of the watch.

    Args:
        rank: number of this process.
        line: to the other processes.
        before_leaving: called when this process ends as it should; waits for the others.
        patience: seconds to let it wait.
    """

    def __init__(
        self, rank: int, line: Connection, before_leaving: Callable[[], None], patience: float
    ) -> None:
        """Begin: exceptions, exits and what the others say are looked after from here on."""
        self.rank = rank
        self._line = line
        self._patience = patience
        self._before_leaving = before_leaving
        self._process = os.getpid()
        self._failed: int | None = None
        self._lock = threading.Lock()
        self._report: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=line.abandon)
        threading.Thread(target=self._listen, name="isoshard-watch", daemon=True).start()

    def fail(self, reason: str, code: int = 1) -> None:
        """Tell the other ranks that this one has failed; returns when they know, or after `HEARD`.

        Args:
            reason: one or a few lines.
            code: this process's exit code.
        """
        with self._lock:
            if self._failed is not None:
                return
            self._failed = code
        _later(ENDED - 1.0, os._exit, code)  # should the exit hang
        self._line.tell(f"rank {self.rank} failed: {reason}", HEARD)

    def _listen(self) -> None:
        """Wait, in a thread of its own, for a fault of another rank."""
        fault = self._line.wait()
        if fault is None:
            return
        _say(f"isoshard: {fault}; rank {self.rank} ends too")
        self._line.heard()
        if self._failed is None:  # else the main thread is about to end, by what it found itself
            time.sleep(_GRACE)
            self._end(1)

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._report(kind, error, trace)
        if os.getpid() == self._process:
            last = "".join(traceback.format_exception_only(kind, error)).strip()
            self.fail(last, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    def _leave(self) -> None:
        if os.getpid() != self._process:
            return
        if self._failed is not None:
            self._end(self._failed)
        alarm = _later(self._patience, self._left_alone)
        self._before_leaving()
        alarm.cancel()
        self._line.close()

    def _left_alone(self) -> None:
        reason = (
            f"it came to its end {self._patience:g} s ago, and others have not come to theirs. "
            "They may wait for it in a collective (did it leave a loop early, or by sys.exit?); "
            "if they only need longer, give iso.init_distributed a longer patience"
        )
        _say(f"isoshard: rank {self.rank} failed: {reason}")
        self.fail(reason)
        self._end(1)

    def _end(self, code: int) -> None:
        """End at once, with the buffers written: exit handlers would wait for the dead."""
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(0.5)  # the hung main thread may hold a stream's lock
        self._line.last_out(HEARD)
        os._exit(code)


def start(
    rank: int,
    size: int,
    host: str,
    post: Callable[[str | None], str],
    timeout: float,
    before_leaving: Callable[[], None],
    patience: float,
) -> Watch:
    """Connect this process to the others' watch.

    Args:
        rank: number of this process.
        size: number of processes.
        host: rank 0's machine, as the others reach it.
        post: gives rank 0's word to all ranks (the others call it with None).
        timeout: seconds within which all must have connected.
        before_leaving: called when this process ends as it should; waits for the others.
        patience: seconds to let it wait.

    Returns:
        The watch, which runs until the process ends.

    Raises:
        DistributedError: rank 0 cannot be reached.
    """
    line = Hub(size, host, post, timeout) if rank == 0 else Spoke(rank, post, timeout)
    return Watch(rank, line, before_leaving, patience)


def _later(seconds: float, action: Callable[..., Any], *arguments: Any) -> threading.Timer:
    timer = threading.Timer(seconds, action, arguments)
    timer.daemon = True
    timer.start()
    return timer


def _say(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # not sys.stderr, whose lock a hung thread may hold


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()
