"""Failure monitor: a process that fails ends the others, which would wait in a collective.

The first failure is put under a key of JAX's coordination service, for which a thread of every rank
waits. A process that has died, which that service would notice by missing heartbeats only, is
detected by its connection to rank 0: the operating system closes the connections of a process that
ends, of whatever cause, and an end without a goodbye is a death.

- A rank with an uncaught exception puts its last line ("rank 2 failed: ValueError: boom"). Everyone
  else prints it and ends, whatever its main thread is doing. The failing rank ends after the others
  have heard of it.
- A rank that is killed, or ends by `os._exit`, sends nothing: its connection closes, and rank 0
  (or, if it was rank 0, every rank) notices.
- A rank that ends normally waits for the others in JAX's shutdown, and still receives their
  failures. If they do not end within the caller's patience, it counts as failed. `sys.exit` is a
  normal end: no exit handler can see its code.

A machine that falls silent without closing its connections is noticed by the heartbeats of JAX's
coordination service, which ends the processes with a message of its own.

How long it takes: `HEARD` seconds until every rank knows, `ENDED` until every rank has ended, each
counted from the failure. A rank ends with exit code 1; its buffers of stdout and stderr are
written, its `finally` blocks do not run. No port needs to be given: rank 0 takes a free one, and
sends it with a secret word through the coordination service. A rank that connects sends that word
and its rank, "5f0c.. 3".
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from isoshard.core.errors import DistributedError

from . import coordination

HEARD = 2.0
ENDED = 5.0
_GRACE = 1.0  # for the main thread to end by itself, as it does if it had the same error
_BEHIND = 0.1  # seconds to look for the death that made another rank fail
_FAILURE, _HEARD_BY = "watch/failure", "watch/heard"
_OVER = "over"  # instead of a failure: all ranks have ended normally
_GOODBYE = b"."
_LONGEST = 64  # bytes that a connection may send first
_INTRODUCTION = 5.0  # seconds for that
_HOUR = 3600.0

Connections = dict[int, socket.socket]
"""By the rank at the other end: of rank 0 those to all others, of another rank that to rank 0."""


class FailureMonitor:
    """The monitor in this process; it handles exceptions and exits from now on.

    Args:
        rank: of this process.
        size: number of processes.
        connections: see `connect`.
        before_leaving: called when this process ends normally; waits for the others.
        patience: seconds that it may wait.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        connections: Connections,
        before_leaving: Callable[[], None],
        patience: float,
    ) -> None:
        """See the class."""
        self.rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._connections = connections
        self._patience = patience
        self._before_leaving = before_leaving
        self._process = os.getpid()
        self._failed: int | None = None
        self._text = ""
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._report: Callable[..., Any] = sys.excepthook
        sys.excepthook = self._uncaught
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=self._abandon)
        self._deaths = threading.Thread(
            target=self._watch_connections, name="isoshard-deaths", daemon=True
        )
        self._deaths.start()
        self._listener = threading.Thread(target=self._listen, name="isoshard-watch", daemon=True)
        self._listener.start()

    def fail(self, reason: str, code: int = 1) -> None:
        """Report to the other ranks that this one has failed, and wait for at most `HEARD`."""
        with self._lock:
            if self._failed is not None:
                return
            self._failed = code
        _later(ENDED - 1.0, os._exit, code)  # should the exit hang
        end = time.monotonic() + HEARD
        if self._ending.wait(_BEHIND):
            return
        self._text = f"rank {self.rank} failed: {reason}"
        if not _put(_FAILURE, self._text):  # there is another failure already
            self._ending.wait(HEARD)
            return
        for other in self._others:
            coordination.get(f"{_HEARD_BY}/{other}", max(0.0, end - time.monotonic()))

    def _listen(self) -> None:
        """Wait, in a thread of its own, for a failure of another rank."""
        failure = None
        while failure is None:
            try:
                failure = coordination.get(_FAILURE, _HOUR)
            except DistributedError:  # all have ended, or rank 0 is dead
                return
        if failure not in (self._text, _OVER):
            self._end_too(failure)

    def _watch_connections(self) -> None:
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
                    failure = (
                        f"rank {key.data} ended without reporting an error (killed, out of "
                        "memory, or a crash; its own output may have more)"
                    )
                    if key.data == 0:  # with it the service has gone
                        self._end_too(failure)
                    else:
                        _put(_FAILURE, failure)

    def _end_too(self, failure: str) -> None:
        with self._lock:
            if self._ending.is_set():
                return
            _write(f"isoshard: {failure}; rank {self.rank} ends too")
            self._ending.set()
        if self._failed is None:  # else the main thread is about to end, by its own error
            _later(_GRACE, self._end, 1)
        _put(f"{_HEARD_BY}/{self.rank}", "heard")

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
        _put(_FAILURE, _OVER)
        self._listener.join(HEARD)
        say_goodbye(self._connections)

    def _left_alone(self) -> None:
        reason = (
            f"it ended {self._patience:g} s ago, and other ranks have not. "
            "They may wait for it in a collective (did it leave a loop early, or by sys.exit?); "
            "if they only need longer, give iso.distributed.init_distributed a longer patience"
        )
        _write(f"isoshard: rank {self.rank} failed: {reason}")
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
    """Set a key; False if it has a value, or the service has gone."""
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


def _write(text: str) -> None:
    os.write(2, f"{text}\n".encode())  # not sys.stderr, whose lock a hung thread may hold


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            stream.flush()


def connect(
    rank: int, size: int, host: str, post: Callable[[str | None], str], timeout: float
) -> Connections:
    """Connect this rank to rank 0, or rank 0 to all ranks.

    Args:
        rank: of this process.
        size: number of processes.
        host: of rank 0, as the others reach it.
        post: sends rank 0's text, its address and the secret, to all (the others pass None).
        timeout: seconds within which all must connect.

    Raises:
        DistributedError: rank 0 cannot be reached, or a rank did not connect.
    """
    if rank:
        return {0: _call(rank, post, timeout)}
    connections: Connections = {}
    deadline = time.monotonic() + timeout
    with _listener() as listener:
        word = secrets.token_hex(16)
        post(json.dumps({"host": host, "port": listener.getsockname()[1], "word": word}))
        while len(connections) < size - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                late = min({*range(1, size)} - {*connections})
                raise DistributedError(
                    f"rank {late} did not connect to the failure monitor within {timeout:g} s; do "
                    "all ranks call "
                    "iso.distributed.init_distributed with the same watch_failures?"
                ) from None
            secret, _, peer_rank = _introduction(peer).partition(" ")
            if secret == word:
                connections[int(peer_rank)] = peer
            else:
                peer.close()  # of another program
    return connections


def say_goodbye(connections: Connections) -> None:
    """Send the other ends that this process ends normally."""
    for peer in connections.values():
        try:
            peer.sendall(_GOODBYE)
        except OSError:
            continue  # it has ended already


def has_died(peer: socket.socket) -> bool:
    """Whether the other end, whose socket is readable, has ended without a goodbye."""
    try:
        return peer.recv(1) != _GOODBYE
    except OSError:
        return True


def _call(rank: int, post: Callable[[str | None], str], timeout: float) -> socket.socket:
    hub = json.loads(post(None))
    try:
        peer = socket.create_connection((hub["host"], hub["port"]), timeout)
    except OSError as error:
        raise DistributedError(
            f"rank {rank} cannot reach rank 0 at {hub['host']}:{hub['port']} to watch for "
            f"failures ({error}); open the ports between the machines, or start with "
            "iso.distributed.init_distributed(watch_failures=False): then failures are noticed by "
            "missing heartbeats only"
        ) from None
    peer.settimeout(None)
    peer.sendall(f"{hub['word']} {rank}\n".encode())
    return peer


def _introduction(peer: socket.socket) -> str:
    """The first line of a connection; nothing follows before its goodbye."""
    peer.settimeout(_INTRODUCTION)
    try:
        with peer.makefile("rb") as lines:
            line = lines.readline(_LONGEST)
    except OSError:
        return ""
    peer.settimeout(None)
    return line.decode(errors="replace").strip()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
