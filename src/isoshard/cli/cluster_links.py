"""Links between the ranks of a run: reachability, speed, and clock differences.

Each rank listens at a free port, as gloo's and JAX's own connections do, and calls some others:
all of them where there are few, those 1, 2, 4, .. ranks further where there are many.

>>> distances(4), distances(64)
([1, 2, 3], [1, 2, 4, 8, 16, 32])
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import socket
import struct
import threading
import time

_FEW = 8
_PINGS = 10
_BULK = 8 << 20  # bytes
_TIME = struct.Struct("!d")


@dataclasses.dataclass(frozen=True)
class Link:
    """What one rank has seen of another.

    Attributes:
        start: who called.
        end: who was called.
        round_trip: seconds for a byte and its answer.
        ahead: seconds by which the clock of `end` is ahead of that of `start`.
        rate: bytes per second to `end`, while all ranks send.
        fault: why there is no connection; "" if there is one.
    """

    start: int
    end: int
    round_trip: float = 0.0
    ahead: float = 0.0
    rate: float = 0.0
    fault: str = ""


@dataclasses.dataclass(frozen=True)
class Door:
    """Where a rank is called.

    Attributes:
        host: address of its machine, on the interface that leads to the coordinator.
        port: of its listener.
        word: the first message of a caller, as authentication.
    """

    host: str
    port: int
    word: str


def distances(size: int) -> list[int]:
    """How much further the ranks are that a rank calls.

    Args:
        size: number of ranks.
    """
    if size <= _FEW:
        return list(range(1, size))
    return [1 << power for power in range((size - 1).bit_length())]


def local_address(host: str) -> str:
    """This machine's address on the way to another one; nothing is sent.

    Args:
        host: name or address of the other one.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return probe.getsockname()[0]
    except OSError:
        return ""


class Listener:
    """Answers the other ranks, in threads, until it is closed.

    Args:
        host: address that is published to the other ranks.
        limit: seconds that a caller may be silent.
    """

    def __init__(self, host: str, limit: float):
        """Listen at a free port of every interface."""
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._server = socket.create_server(
            ("", 0), family=family, dualstack_ipv6=both, backlog=128
        )
        self._limit = limit
        self.door = Door(host, self._server.getsockname()[1], secrets.token_hex(16))
        threading.Thread(target=self._listen, name="isoshard-doctor", daemon=True).start()

    def close(self) -> None:
        """Take no more calls."""
        self._server.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                peer, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:  # the caller reports the error
            peer.settimeout(self._limit)
            if _read(peer, len(self.door.word)) != self.door.word.encode():
                return
            for _ in range(_PINGS):
                _read(peer, 1)
                peer.sendall(_TIME.pack(_now()))
            _read(peer, _BULK)
            peer.sendall(b".")
            _read(peer, 1)


def call(start: int, end: int, door: Door, limit: float) -> Link:
    """Measure the way from this rank to another one.

    Args:
        start: number of this rank.
        end: number of the other one.
        door: where it listens.
        limit: seconds for each step.
    """
    try:
        with socket.create_connection((door.host, door.port), limit) as peer:
            peer.settimeout(limit)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.sendall(door.word.encode())
            round_trip, ahead = min(_ping(peer) for _ in range(_PINGS))
            begin = time.perf_counter()
            peer.sendall(bytes(_BULK))
            _read(peer, 1)
            rate = _BULK / (time.perf_counter() - begin)
            peer.sendall(b".")
            return Link(start, end, round_trip, ahead, rate)
    except OSError as error:
        return Link(start, end, fault=f"{door.host}:{door.port}: {error or type(error).__name__}")


def _now() -> float:
    return time.time()


def _ping(peer: socket.socket) -> tuple[float, float]:
    """Seconds of a round trip, and how far the other clock is ahead in its middle."""
    sent_at, begin = _now(), time.perf_counter()
    peer.sendall(b".")
    [peer_time] = _TIME.unpack(_read(peer, _TIME.size))
    took = time.perf_counter() - begin
    return took, peer_time - (sent_at + took / 2)


def _read(peer: socket.socket, count: int) -> bytes:
    """All of `count` bytes."""
    chunks = []
    while count:
        chunk = peer.recv(min(count, 1 << 20))
        if not chunk:
            raise ConnectionError("the other side hung up")
        chunks.append(chunk)
        count -= len(chunk)
    return b"".join(chunks)
