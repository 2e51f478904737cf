"""The connections of `watch`: one from each rank to rank 0, lines of JSON both ways.

| from | line | meaning |
|---|---|---|
| a rank | `{"rank": 3, "word": ..}` | first of all: who it is, and the secret word |
| a rank | `{"fault": text}` | it has failed |
| rank 0 | `{"fault": text}` | somebody has |
| a rank | `{"heard": true}` | it knows, and ends |
| rank 0 | `{"known": true}` | all others know: the failing rank may end |
| both | `{"bye": true}` | it ends as it should; the connection closes |
"""

from __future__ import annotations

import json
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from isoshard.core.errors import DistributedError

_BEHIND = 0.1  # seconds to look for the death that made another rank fail


class Connection:
    """What a rank can say and hear."""

    def tell(self, fault: str, patience: float) -> None:
        """Say that this rank has failed; returns when all know it, or after `patience` seconds."""
        raise TypeError(f"{type(self).__name__} cannot tell")

    def wait(self) -> str | None:
        """Wait for a fault of another rank; None: there will be none any more."""
        raise TypeError(f"{type(self).__name__} cannot wait")

    def heard(self) -> None:
        """Say that this rank knows of the fault."""

    def last_out(self, patience: float) -> None:
        """Wait until those have ended who need this rank to end well."""

    def close(self) -> None:
        """Say that this rank ends as it should."""

    def abandon(self) -> None:
        """Close the connection without a word, in a forked child that does not own it."""


class Spoke(Connection):
    """The connection of a rank to rank 0.

    Args:
        rank: number of this process.
        post: gives rank 0's word, which is its address and the secret.
        timeout: seconds to reach it.
    """

    def __init__(self, rank: int, post: Callable[[str | None], str], timeout: float) -> None:
        """Connect."""
        said = json.loads(post(None))
        try:
            self._socket = socket.create_connection((said["host"], said["port"]), timeout)
        except OSError as error:
            raise DistributedError(
                f"rank {rank} cannot reach rank 0 at {said['host']}:{said['port']} to watch for "
                f"failures ({error}); open the ports between the machines, or start with "
                "iso.init_distributed(watch_failures=False): then failures are noticed by missing "
                "heartbeats only"
            ) from None
        self._socket.settimeout(None)
        self._known = threading.Event()
        self._ending = False
        _send(self._socket, {"rank": rank, "word": said["word"]})

    def tell(self, fault: str, patience: float) -> None:
        """Send it to rank 0, and wait for the word that all know."""
        _send(self._socket, {"fault": fault})
        self._known.wait(patience)

    def wait(self) -> str | None:
        """Read what rank 0 says."""
        for line in _lines(self._socket):
            if "known" in line:
                self._known.set()
            elif "bye" in line:
                return None
            elif "fault" in line:
                self._known.set()
                return line["fault"]
        self._known.set()
        return None if self._ending else _death(0)

    def heard(self) -> None:
        """Say so to rank 0."""
        _send(self._socket, {"heard": True})

    def close(self) -> None:
        """Say goodbye to rank 0."""
        self._ending = True
        _send(self._socket, {"bye": True})
        self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Close the socket here."""
        self._socket.close()


class Hub(Connection):
    """Rank 0's end of all connections, served by the thread that calls `wait`, and after it.

    Args:
        size: number of ranks.
        host: this machine, as the others reach it.
        post: tells all ranks the address and the secret.
        timeout: seconds within which all must have connected.
    """

    def __init__(
        self, size: int, host: str, post: Callable[[str | None], str], timeout: float
    ) -> None:
        """Listen, and say where."""
        self._word = secrets.token_hex(16)
        self._deadline = time.monotonic() + timeout
        self._missing = set(range(1, size))
        self._listener = _listener()
        port = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._ranks: dict[socket.socket, int] = {}
        self._partial: dict[socket.socket, bytes] = {}
        self._gone: set[int] = set()
        self._knowing: set[int] = set()
        self._suspect: tuple[float, int, str] | None = None
        self._spread: int | None = None
        self._all_know = threading.Event()
        self._faults: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._ending = False
        post(json.dumps({"host": host, "port": port, "word": self._word}))
        threading.Thread(target=self._serve, name="isoshard-hub", daemon=True).start()

    def tell(self, fault: str, patience: float) -> None:
        """Pass this rank's own fault to all."""
        self._note(time.monotonic() + _BEHIND, 0, fault)
        self._waker.send(b"!")
        self._all_know.wait(patience)

    def wait(self) -> str | None:
        """Wait for what the serving thread finds."""
        return self._faults.get()

    def last_out(self, patience: float) -> None:
        """JAX's service lives in this process, and its clients complain loudly if it goes first."""
        end = time.monotonic() + patience
        while self._ranks and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> None:
        """Say goodbye to all ranks."""
        self._ending = True
        for peer in list(self._ranks):
            _send(peer, {"bye": True})
        self._faults.put(None)

    def abandon(self) -> None:
        """Close all sockets here."""
        for one in (self._listener, self._wake, self._waker, *self._ranks):
            one.close()

    def _serve(self) -> None:
        while not self._ending:
            for key, _ in self._selector.select(self._pause()):
                one: Any = key.fileobj
                if one is self._listener:
                    peer, _ = self._listener.accept()
                    self._selector.register(peer, selectors.EVENT_READ)
                elif one is self._wake:
                    self._wake.recv(16)
                else:
                    self._read(one)
            now = time.monotonic()
            if self._missing and now > self._deadline:
                late = min(self._missing)
                self._missing.clear()
                self._publish(late, f"rank {late} did not come to the watch in time")
            if self._suspect is not None and now >= self._suspect[0]:
                self._publish(*self._suspect[1:])

    def _pause(self) -> float | None:
        ends = [self._suspect[0]] if self._suspect is not None else []
        if self._missing:
            ends.append(self._deadline)
        return max(0.0, min(ends) - time.monotonic()) + 0.001 if ends else None

    def _read(self, peer: socket.socket) -> None:
        try:
            got = peer.recv(1 << 16)
        except OSError:
            got = b""
        if not got:
            self._closed(peer)
            return
        *whole, rest = (self._partial.get(peer, b"") + got).split(b"\n")
        self._partial[peer] = rest
        for raw in whole:
            line = _parse(raw)
            if peer not in self._ranks:
                if line.get("word") != self._word:
                    self._closed(peer)  # somebody else's knock
                    return
                self._ranks[peer] = line["rank"]
                self._missing.discard(line["rank"])
            elif "fault" in line:
                self._note(time.monotonic() + _BEHIND, self._ranks[peer], line["fault"])
            elif "heard" in line:
                self._know(self._ranks[peer])
            elif "bye" in line:
                self._gone.add(self._ranks[peer])

    def _closed(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        peer.close()
        self._partial.pop(peer, None)
        rank = self._ranks.pop(peer, None)
        if rank is None:
            return
        if rank not in self._gone and not self._ending:
            self._publish(rank, _death(rank))
        self._gone.add(rank)
        self._know(rank)

    def _note(self, when: float, rank: int, fault: str) -> None:
        """A fault that a death may be behind: it is told a moment later, unless there is one."""
        if self._suspect is None and self._spread is None:
            self._suspect = (when, rank, fault)

    def _publish(self, rank: int, fault: str) -> None:
        self._suspect = None
        if self._spread is not None:
            return
        self._spread = rank
        for peer, other in self._ranks.items():
            if other != rank:
                _send(peer, {"fault": fault})
        self._know(rank)
        if rank != 0:
            self._faults.put(fault)

    def heard(self) -> None:
        """Rank 0 itself knows."""
        self._know(0)

    def _know(self, rank: int) -> None:
        self._knowing.add(rank)
        if self._spread is None or not {*self._ranks.values()} <= self._knowing:
            return
        if self._spread != 0 and 0 not in self._knowing:
            return
        self._all_know.set()
        for peer, other in self._ranks.items():
            if other == self._spread:
                _send(peer, {"known": True})


def _death(rank: int) -> str:
    return (
        f"rank {rank} ended without a word (killed, out of memory, or a crash; "
        "its own output may say more)"
    )


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _send(peer: socket.socket, line: dict[str, Any]) -> None:
    """Send one line; a peer that is gone is found by whoever reads from it."""
    try:
        peer.sendall(json.dumps(line).encode() + b"\n")
    except OSError:
        return


def _lines(peer: socket.socket) -> Any:
    rest = b""
    while True:
        try:
            got = peer.recv(1 << 16)
        except OSError:
            return
        if not got:
            return
        *whole, rest = (rest + got).split(b"\n")
        for raw in whole:
            yield _parse(raw)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        line = json.loads(raw)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}
