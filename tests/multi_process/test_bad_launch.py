"""Ports, coordinators, counts, versions, clocks and host names that are wrong: each is said."""

from __future__ import annotations

import contextlib
import re
import socket
import threading

import pytest

from tests.multi_process import ranks

LATE = 60  # seconds for ranks that all come, on a busy machine
SOON = 4  # for those that wait for nobody


def _rank(rank, size, port, kind, timeout=LATE, **more):
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TEST_KIND": kind,
        "TEST_TIMEOUT": str(timeout),
        **more,
    }


def _ranks(kind, *places, **more):
    """Of (rank, size), with a port of their own."""
    port = ranks.free_port()
    return [_rank(rank, size, port, kind, **more) for rank, size in places]


def _environments(taken, talking, silent):
    stray = ranks.free_port()
    return {
        "taken": [_rank(0, 2, taken, "taken")],
        "nobody": _ranks("nobody", (1, 2), timeout=SOON),
        "no name": _ranks("no name", (1, 2), timeout=SOON, MASTER_ADDR="nowhere.invalid"),
        "talking": [_rank(1, 2, talking, "talking")],
        "silent": [_rank(1, 2, silent, "silent", timeout=SOON)],
        "stray": [
            _rank(0, 2, stray, "stray", timeout=LATE / 5, TORCHELASTIC_RUN_ID="a"),
            _rank(1, 2, stray, "stray", TORCHELASTIC_RUN_ID="b"),
        ],
        "twice": _ranks("twice", (0, 3), (1, 3), (1, 3)),
        "count": _ranks("count", (0, 3), (1, 2)),
        "version": _ranks("version", (0, 2), (1, 2)),
        "clock": _ranks("clock", (0, 2), (1, 2)),
        "hosts": _ranks("hosts", (0, 2), (1, 2)),
    }


@contextlib.contextmanager
def _somebody(greeting):
    """A program that listens, and greets with its own words or waits for others'."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        peers = []

        def serve():
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    peers.append(server.accept()[0])
                    peers[-1].sendall(greeting)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        for peer in peers:
            peer.close()


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """What each process of each kind said; one launch for all, as most of the time is imports."""
    with _somebody(b"") as taken, _somebody(b"220 mail ESMTP\r\n") as talking:
        kinds = _environments(taken, talking, taken)
        listed = [one for environments in kinds.values() for one in environments]
        scratch = tmp_path_factory.mktemp("bad")
        outcome = ranks.processes("bad_launch", len(listed), scratch, listed.__getitem__)
    assert None not in outcome.codes, outcome.output
    said = iter(zip(outcome.codes, outcome.outputs, strict=True))
    return {kind: [next(said) for _ in environments] for kind, environments in kinds.items()}


REFUSED = {
    "taken": [r"rank 0 of 2 cannot listen at port \d+ of .*: another program uses it.*free p"],
    "nobody": [r"rank 1 \(.+\) of 2 could not reach rank 0 at 127.0.0.1:\d+ within 4 s: no proc"],
    "no name": [r"rank 0 at nowhere.invalid:\d+ within 4 s: the name 'nowhere.invalid' cannot"],
    "talking": [r"the listener at 127.0.0.1:\d+ is not rank 0 of this run, which rank 1 \(.+\) of"],
    "silent": [r"the listener at 127.0.0.1:\d+ is not rank 0 of this run, which rank 1 \(.+\) of"],
    "stray": [
        r"rank 1 of 2 did not connect within 12 s",
        r"port of another run: rank 1 \(.+\) belongs to TORCHELASTIC_RUN_ID=b, rank 0 there to .*a",
    ],
    "twice": [r"two processes are rank 1 of 3: process \d+ on \S+ and process \d+ on \S+. A ran"]
    * 3,
    "count": [r"have different sizes: rank 0 \(.+\) one of 3, rank 1 \(.+\) one of 2. Start them"]
    * 2,
    "version": [r"isoshard is \S+ on rank 0 \(.+\), 0.0.7 on rank 1 \(.+\): install one version"]
    * 2,
}


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused(launched, kind):
    for (code, output), message in zip(launched[kind], REFUSED[kind], strict=True):
        assert code == 1, output
        assert re.search(f"(?s)DistributedError: .*{message}", output), output


WARNED = {
    "clock": ["", r"ClusterWarning: the clock of rank 1 \(.+\) is 3600 s behind rank 0's.*chrony"],
    "hosts": [r"rank 0 and rank 1 run on different machines that are both called 'node': NCCL", ""],
}


@pytest.mark.parametrize("kind", WARNED)
def test_it_is_told(launched, kind):
    for (code, output), message in zip(launched[kind], WARNED[kind], strict=True):
        assert code == 0, output
        assert bool(message) == ("ClusterWarning" in output), output
        assert re.search(message, output), output
