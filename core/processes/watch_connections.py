"""The connections of `watch`: one from each rank to rank 0, which says nothing but goodbye.

The operating system closes the connections of a process that ends, whatever it died of: an end
without a goodbye is a death. Who calls at rank 0's port says the secret word and its number:

    5f0c.. 3
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable

from isoshard.core.errors import DistributedError

_GOODBYE = b"."
_LONGEST = 64  # bytes of what a caller says
_PATIENCE = 5.0  # seconds for a caller to say it

Connections = dict[int, socket.socket]


def connect(
    rank: int, size: int, host: str, post: Callable[[str | None], str], timeout: float
) -> Connections:
    """Connect this rank to rank 0, or rank 0 to all.

    Args:
        rank: number of this process.
        size: number of processes.
        host: rank 0's machine, as the others reach it.
        post: gives rank 0's word, its address and the secret, to all (the others pass None).
        timeout: seconds within which all must have connected.

    Returns:
        The connections by the rank at their other end.

    Raises:
        DistributedError: rank 0 cannot be reached, or a rank did not come.
    """
    if rank:
        return {0: _call(rank, post, timeout)}
    found: Connections = {}
    deadline = time.monotonic() + timeout
    with _listener() as listener:
        word = secrets.token_hex(16)
        post(json.dumps({"host": host, "port": listener.getsockname()[1], "word": word}))
        while len(found) < size - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                late = min({*range(1, size)} - {*found})
                raise DistributedError(
                    f"rank {late} did not come to the watch in {timeout:g} s; do all ranks call "
                    "iso.distributed.init_distributed with the same watch_failures?"
                ) from None
            said, _, number = _introduction(peer).partition(" ")
            if said == word:
                found[int(number)] = peer
            else:
                peer.close()  # somebody else's knock
    return found


def say_goodbye(connections: Connections) -> None:
    """Tell the other ends that this process ends as it should."""
    for peer in connections.values():
        try:
            peer.sendall(_GOODBYE)
        except OSError:
            continue  # it has ended already


def has_died(peer: socket.socket) -> bool:
    """Whether the other end, which is about to be read from, has ended without a goodbye."""
    try:
        return peer.recv(1) != _GOODBYE
    except OSError:
        return True


def _call(rank: int, post: Callable[[str | None], str], timeout: float) -> socket.socket:
    said = json.loads(post(None))
    try:
        peer = socket.create_connection((said["host"], said["port"]), timeout)
    except OSError as error:
        raise DistributedError(
            f"rank {rank} cannot reach rank 0 at {said['host']}:{said['port']} to watch for "
            f"failures ({error}); open the ports between the machines, or start with "
            "iso.distributed.init_distributed(watch_failures=False): then failures are noticed by "
            "missing heartbeats only"
        ) from None
    peer.settimeout(None)
    peer.sendall(f"{said['word']} {rank}\n".encode())
    return peer


def _introduction(peer: socket.socket) -> str:
    """The first line that a caller says; it says no more before its goodbye."""
    peer.settimeout(_PATIENCE)
    try:
        with peer.makefile("rb") as said:
            line = said.readline(_LONGEST)
    except OSError:
        return ""
    peer.settimeout(None)
    return line.decode(errors="replace").strip()


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
