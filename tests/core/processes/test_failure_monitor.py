"""The connections between rank 0 and the others, within one process."""

import json
import queue
import socket
import threading

import pytest

from isoshard.core.errors import DistributedError
from isoshard.core.processes.failure_monitor import connect, has_died, say_goodbye

STRANGERS = (b"guess 1\n", b"GET / HTTP/1.1\r\n\r\n", b"\xff\n", b"x" * 100)


@pytest.fixture
def ends():
    """Rank 0's connections and those of two others; strangers knock before them."""
    words, found = queue.SimpleQueue(), queue.SimpleQueue()
    post = lambda word: words.put(word) or word  # noqa: E731
    threading.Thread(
        target=lambda: found.put(connect(0, 3, "127.0.0.1", post, 60.0)), daemon=True
    ).start()
    word = words.get()
    said = json.loads(word)
    for knock in STRANGERS:
        with socket.create_connection((said["host"], said["port"]), 10) as stranger:
            stranger.sendall(knock)
            _hangs_up(stranger)
    others = {rank: connect(rank, 3, "", lambda _: word, 10.0) for rank in (1, 2)}
    hub = found.get(timeout=10)
    yield hub, others
    for connections in (hub, *others.values()):
        for one in connections.values():
            one.close()


def _hangs_up(stranger):
    try:
        assert stranger.recv(1) == b""
    except ConnectionResetError:
        return


def test_rank_0_knows_who_is_who_and_no_strangers(ends):
    hub, others = ends
    assert sorted(hub) == [1, 2]
    for rank, connections in others.items():
        assert [*connections] == [0]
        assert hub[rank].getpeername()[1] == connections[0].getsockname()[1]


def test_a_closed_connection_is_a_death_unless_it_said_goodbye(ends):
    hub, others = ends
    say_goodbye(others[1])
    for rank in (1, 2):
        others[rank][0].close()
    assert [has_died(hub[rank]) for rank in (1, 2)] == [False, True]
    say_goodbye(hub)  # nobody minds that they have ended


def test_a_rank_that_does_not_come_is_named():
    with pytest.raises(
        DistributedError, match=r"rank 1 did not connect to the failure monitor within 0\.2 s"
    ):
        connect(0, 2, "127.0.0.1", lambda word: word, 0.2)


def test_rank_0_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    word = json.dumps({"host": "127.0.0.1", "port": port, "word": "x"})
    with pytest.raises(DistributedError, match=r"rank 1 cannot reach rank 0 at 127.*open the port"):
        connect(1, 2, "", lambda _: word, 1.0)
