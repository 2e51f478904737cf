"""A process that fails tells the others, and they end: nobody waits for it in a collective.

The first fault is put under a key of JAX's coordination service, for which a thread of every rank
waits. What that service would notice by missing heartbeats only, a process that has died, is seen
by a connection from every process to the one of rank 0.

- A rank with an uncaught exception puts its last line ("rank 2 failed: ValueError: boom"). Everyone
  else prints it and ends, whatever its main thread is doing. The failing rank ends after the others
  have heard of it.
- A rank that is killed, or ends by `os._exit`, says nothing: its connection closes, which the
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
import selectors
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from isoshard.core.errors import DistributedError

from . import coordination
from .watch_connections import Connections, has_died, say_goodbye

HEARD = 2.0
ENDED = 5.0
_GRACE = 1.0  # for the main thread to end by itself, as it does if it has found the same fault
_BEHIND = 0.1  # seconds to look for the death that made another rank fail
_FAULT, _KNOWN = "watch/fault", "watch/known"
_OVER = "over"  # in the place of a fault: all ranks have come to their end
_HOUR = 3600.0


class Watch:
    """This process's end of the watch.

    Args:
        rank: number of this process.
        size: number of processes.
        connections: see `connect`.
        before_leaving: called when this process ends as it should; waits for the others.
        patience: seconds to let it wait.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Connections,
        before_leaving: Callable[[], None],
        patience: float,
    ) -> None:
        """Begin: exceptions, exits and what the others say are looked after from here on."""
        self.rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._connections = connections
        self._patience = patience
        self._before_leaving = before_leaving
        self._process = os.getpid()
        self._failed: int | None = None
        self._told = ""
        self._knows = threading.Event()
        self._lock = threading.Lock()
        self._report: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._abandon)
        self._deaths = threading.Thread(target=self._see, name="isoshard-deaths", daemon=True)
        self._deaths.start()
        self._listener = threading.Thread(target=self._listen, name="isoshard-watch", daemon=True)
        self._listener.start()

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
        end = time.monotonic() + HEARD
        if self._knows.wait(_BEHIND):
            return
        self._told = f"rank {self.rank} failed: {reason}"
        if not _put(_FAULT, self._told):  # there is another fault already
            self._knows.wait(HEARD)
            return
        for other in self._others:
            coordination.take(f"{_KNOWN}/{other}", max(0.0, end - time.monotonic()))

    def _listen(self) -> None:
        """Wait, in a thread of its own, for a fault of another rank."""
        fault = None
        while fault is None:
            try:
                fault = coordination.take(_FAULT, _HOUR)
            except DistributedError:  # all have come to their end, or rank 0 is dead
                return
        if fault not in (self._told, _OVER):
            self._end_too(fault)

    def _see(self) -> None:
        """Wait, in a thread of its own, for connections that close without a goodbye."""
        with selectors.DefaultSelector() as selector:
            for rank, peer in self._connections.items():
                selector.register(peer, selectors.EVENT_READ, rank)
            while selector.get_map():
                for key, _ in selector.select():
                    peer = self._connections[key.data]
                    selector.unregister(peer)
                    if not has_died(peer):
                        continue
                    fault = (
                        f"rank {key.data} ended without a word (killed, out of memory, or a "
                        "crash; its own output may say more)"
                    )
                    if key.data == 0:  # with it the service has gone
                        self._end_too(fault)
                    else:
                        _put(_FAULT, fault)

    def _end_too(self, fault: str) -> None:
        with self._lock:
            if self._knows.is_set():
                return
            _say(f"isoshard: {fault}; rank {self.rank} ends too")
            self._knows.set()
        if self._failed is None:  # else the main thread is about to end, by what it found itself
            _later(_GRACE, self._end, 1)
        _put(f"{_KNOWN}/{self.rank}", "known")

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
        # A thread that waits in JAX's service while Python ends would take the process with it.
        _put(_FAULT, _OVER)
        self._listener.join(HEARD)
        say_goodbye(self._connections)

    def _left_alone(self) -> None:
        reason = (
            f"it came to its end {self._patience:g} s ago, and others have not come to theirs. "
            "They may wait for it in a collective (did it leave a loop early, or by sys.exit?); "
            "if they only need longer, give iso.distributed.init_distributed a longer patience"
        )
        _say(f"isoshard: rank {self.rank} failed: {reason}")
        self.fail(reason)
        self._end(1)

    def _end(self, code: int) -> None:
        """End at once, with the buffers written: exit handlers would wait for the dead."""
        flusher = threading.Thread(target=_flush, daemon=True)
        flusher.start()
        flusher.join(0.5)  # the hung main thread may hold a stream's lock
        if self.rank == 0:  # JAX's service is here, and its clients complain if it goes first
            self._deaths.join(HEARD)
        os._exit(code)

    def _abandon(self) -> None:
        """Close the connections in a forked child, which does not own them."""
        for peer in self._connections.values():
            peer.close()


def _put(key: str, value: str) -> bool:
    """Put a word into the service; False if there is one, or the service has gone."""
    try:
        coordination.put(key, value)
    except DistributedError:
        return False
    return True


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
