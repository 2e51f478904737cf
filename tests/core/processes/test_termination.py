"""SIGTERM as a request; what several processes agree on is in tests/multi_process."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

import isoshard as iso
from isoshard.core.processes import coordination, termination
from tests.core.processes.counting_store import Store, run


def test_a_signal_is_noted_and_handlers_are_put_back():
    calls = []
    before = signal.signal(signal.SIGTERM, lambda *given: calls.append(given[0]))
    try:
        mine = signal.getsignal(signal.SIGTERM)
        with iso.distributed.Termination() as termination:
            assert not termination.reached()
            os.kill(os.getpid(), signal.SIGTERM)
            assert termination.reached() and termination.reached()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert calls == [signal.SIGTERM]  # the one of before was called as well
    finally:
        signal.signal(signal.SIGTERM, before)


def test_whoever_waits_for_the_byte_of_a_signal_still_gets_it():
    import socket

    hear, ring = socket.socketpair()
    ring.setblocking(False)
    before = signal.set_wakeup_fd(ring.fileno())
    try:
        with iso.distributed.Termination(signals=(signal.SIGUSR1, signal.SIGUSR2)) as termination:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert termination.reached()
            hear.settimeout(5)
            assert hear.recv(1) == bytes([signal.SIGUSR1])
        assert signal.set_wakeup_fd(before) == ring.fileno()
    finally:
        signal.set_wakeup_fd(before)
        hear.close()
        ring.close()


def test_leave_ends_with_its_status():
    with pytest.raises(ValueError, match="above 0, not 0"):
        iso.distributed.Termination(grace=0)
    with (
        pytest.raises(SystemExit) as raised,
        iso.distributed.Termination(signals=()) as termination,
    ):
        termination.leave()
    assert raised.value.code == iso.distributed.Termination.STATUS == 75


def test_in_a_thread_only_request_asks():
    faults = []

    def run():
        with pytest.raises(RuntimeError, match=r"only the main thread .*signals=\(\)"):
            iso.distributed.Termination()
        termination = iso.distributed.Termination(signals=())
        termination.request()
        faults.append(termination.reached())
        termination.close()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert faults == [True]


def test_no_thread_stays():
    before = threading.active_count()
    for _ in range(3):
        with iso.distributed.Termination() as termination:
            termination.request()
    time.sleep(0.2)
    assert threading.active_count() <= before


HANGS = """
import ctypes, isoshard as iso
iso.distributed.Termination(grace=1.0)
print("ready", flush=True)
ctypes.CDLL(None).system(b"sleep 60")      # C code, which no Python handler interrupts
"""


def test_a_process_that_does_not_end_is_ended():
    with subprocess.Popen(
        [sys.executable, "-c", HANGS],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            start = time.monotonic()
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(30) == 128 + signal.SIGTERM
            assert 0.9 < time.monotonic() - start < 10
            assert "rank 0 was requested to end 1 s ago and has not" in process.stderr.readline()
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_all_processes_stop_after_the_same_step(monkeypatch):
    size, store, mine = 16, Store(), threading.local()
    monkeypatch.setattr(coordination, "_client", lambda: store)
    monkeypatch.setattr(coordination, "rank_and_size", lambda: (mine.rank, size))
    monkeypatch.setattr(termination, "_indices", itertools.repeat(0))  # each is the first one

    def steps(rank):
        mine.rank = rank
        with iso.distributed.Termination(signals=()) as one:
            for step in itertools.count(1):
                time.sleep(0.001 * (rank % 5))
                if rank == 3 and step == 10:
                    one.request()
                if one.reached():
                    return step

    found = run(size, steps)
    assert len({*found}) == 1 and found[0] > 10
    every = sum(store.requests.values())
    assert every <= 7 * size + 10  # five to settle, and the word
