"""The lines between rank 0 and the others, within one process."""

import json
import queue
import socket
import threading
import time

import pytest

from isoshard.core.errors import DistributedError
from isoshard.core.processes.watch_connections import Hub, Spoke


@pytest.fixture
def lines():
    """Rank 0, and a way to connect others; all is closed afterwards."""
    words = queue.SimpleQueue()
    hub = Hub(3, "127.0.0.1", lambda word: words.put(word) or word, 60.0)
    word = words.get()
    spokes = []

    def connect(rank):
        spokes.append(Spoke(rank, lambda _: word, 10.0))
        return spokes[-1]

    yield hub, json.loads(word), connect
    hub.close()
    hub.abandon()
    for spoke in spokes:
        spoke.abandon()


def _in_thread(action):
    found = queue.SimpleQueue()
    threading.Thread(target=lambda: found.put(action()), daemon=True).start()
    return lambda: found.get(timeout=10)


def test_a_fault_reaches_all_and_the_teller_learns_of_it(lines):
    hub, _, connect = lines
    one, two = connect(1), connect(2)
    at_zero, at_two = _in_thread(hub.wait), _in_thread(two.wait)
    _in_thread(one.wait)
    told = _in_thread(lambda: one.tell("rank 1 failed", 10.0) or time.monotonic())
    assert at_zero() == at_two() == "rank 1 failed"
    heard = time.monotonic()
    hub.heard()
    two.heard()
    assert told() >= heard


def test_a_fault_of_rank_0_reaches_all(lines):
    hub, _, connect = lines
    one, two = connect(1), connect(2)
    at_one, at_two = _in_thread(one.wait), _in_thread(two.wait)
    told = _in_thread(lambda: hub.tell("rank 0 failed", 10.0) or True)
    assert at_one() == at_two() == "rank 0 failed"
    one.heard()
    two.heard()
    assert told()


def test_a_closed_connection_is_a_death_unless_it_said_goodbye(lines):
    hub, _, connect = lines
    one, two = connect(1), connect(2)
    one.close()
    time.sleep(0.2)
    two._socket.shutdown(socket.SHUT_RDWR)
    assert _in_thread(hub.wait)().startswith("rank 2 ended without a word")


def test_a_death_is_the_reason_and_not_what_came_of_it(lines):
    hub, _, connect = lines
    one, two = connect(1), connect(2)
    _in_thread(lambda: one.tell("rank 1 failed: connection closed by peer", 1.0))
    two._socket.shutdown(socket.SHUT_RDWR)
    assert _in_thread(hub.wait)().startswith("rank 2 ended without a word")


def test_who_does_not_know_the_word_is_nobody(lines):
    hub, word, connect = lines
    connect(1), connect(2)
    for said in (b'{"rank": 1, "word": "guess"}\n', b"GET / HTTP/1.1\r\n\r\n", b"\xff\n"):
        with socket.create_connection((word["host"], word["port"]), 10) as stranger:
            stranger.sendall(said + b'{"fault": "lies"}\n')
            assert stranger.recv(1) == b""  # rank 0 hangs up
    hub.close()
    assert hub.wait() is None


def test_a_rank_that_does_not_come_is_named():
    hub = Hub(2, "127.0.0.1", lambda word: word, 0.2)
    assert _in_thread(hub.wait)() == "rank 1 did not come to the watch in time"
    hub.close()
    hub.abandon()


def test_rank_0_cannot_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    word = json.dumps({"host": "127.0.0.1", "port": port, "word": "x"})
    with pytest.raises(DistributedError, match=r"rank 1 cannot reach rank 0 at 127.*open the port"):
        Spoke(1, lambda _: word, 1.0)
