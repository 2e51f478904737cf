"""What ranks say to each other, counted: up to 128 of them, as threads, a store in memory."""

from __future__ import annotations

import json
import statistics
import time

import pytest

from benchmarks.hosts.growth import fitted
from isoshard.core.errors import CheckpointError
from isoshard.core.processes import agreement, coordination
from isoshard.core.processes.coordination import ProcessGroup, ServiceTransport
from tests.core.processes.counting_store import Store, run

LINES = [f"w{number}: (4096, 4096) float32 by P('x')" for number in range(100)]
SIZES = (2, 8, 32, 128)


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr(coordination, "_client", lambda: found)
    return found


def agreed(size, number=0, said=lambda rank: LINES, late=None, timeout=60.0):
    team = tuple(range(size))

    def work(rank):
        if late and rank == late[0]:
            time.sleep(late[1])
        one = agreement._Agreement("layouts", said(rank), team, number, rank, timeout)
        try:
            return one.wait()
        finally:
            one.leave()

    return run(size, work)


def grouped(rank, size):
    return ProcessGroup(rank, size, ServiceTransport(rank, range(size), "save"))


def counted(store, size):
    requests = [store.requests[str(rank)] for rank in range(size)]
    return statistics.median(requests), max(requests), sum(requests)


def test_a_comparison_costs_a_rank_the_same_whatever_their_number(monkeypatch):
    monkeypatch.setattr(coordination, "PATIENCE", 60.0)  # threads start one after the other
    usual, most, every = [], [], []
    for size in SIZES:
        store = Store()
        monkeypatch.setattr(coordination, "_client", lambda store=store: store)
        assert agreed(size) == [""] * size
        for counts, one in zip((usual, most, every), counted(store, size), strict=True):
            counts.append(one)
        assert max(store.bytes.values()) < 500, "what is compared is not sent"
    assert usual[1:] == [3] * 3 and max(most) <= 5
    assert fitted(SIZES, usual, slack=0.2).shape == "constant"
    growth = fitted(SIZES, every)
    assert growth.shape == "n" and growth.slope == pytest.approx(3, rel=0.01)


def test_a_rank_that_is_late_costs_the_others_one_request(store, monkeypatch):
    monkeypatch.setattr(coordination, "PATIENCE", 0.05)
    size = 128
    assert agreed(size, late=(7, 2.0)) == [""] * size
    usual, most, every = counted(store, size)
    assert usual <= 5  # and not one for each other rank, again and again
    assert most < 150 and every < 6 * size + 150  # the first looks around, every 0.05 s


def test_all_are_told_who_said_what(store):
    size = 128
    odd = [*LINES[:50], "w50: (8, 8) float32", *LINES[51:]]
    found = agreed(size, said=lambda rank: odd if rank == 5 else LINES)
    assert len({*found}) == 1
    told = found[0].splitlines()
    assert "  rank 5: layouts: w50: (8, 8) float32" in told
    assert f"  ranks 0 to 4, 6 to 127: layouts: {LINES[50]}" in told


def test_a_silent_rank_is_named_in_all_others(store, monkeypatch):
    monkeypatch.setattr(coordination, "_SENDING_LATE", 0.3)
    team = (0, 1, 2, 3)

    def work(rank):
        if rank == 0:
            return "absent"
        return agreement._Agreement("w", LINES, team, 0, rank, 0.5).wait()

    assert run(4, work)[1:] == [agreement._missing_message([0], "w", 0.5)] * 3
    late = agreement._Agreement("w", LINES, team, 0, 0, 0.5).wait()
    assert late == agreement._missing_message([0], "w", 0.5)


def test_who_comes_as_the_time_is_over_agrees_still(store, monkeypatch):
    """One asks all for their lines, and meanwhile the last one comes with the same."""
    monkeypatch.setattr(coordination, "_SENDING_LATE", 5.0)

    def work(rank):
        if rank == 2:
            time.sleep(1.0)
        return agreement._Agreement("w", LINES, (0, 1, 2), 0, rank, 0.3).wait()

    assert run(3, work) == ["", "", ""]


def test_a_rank_that_has_failed_leaves_its_words(store):
    fault = agreement._Agreement("w", ["ValueError: no rows"], (0, 1, 2), 0, 1, 0.1)
    assert "ranks arrived within 0.1 s" in fault.wait(to_the_end=False)
    others = run(
        3, lambda n: n != 1 and agreement._Agreement("w", LINES, (0, 1, 2), 0, n, 9).wait()
    )
    assert others[0] == others[2] and "  rank 1: w: ValueError: no rows" in others[0]


def test_rooms_that_wait_for_each_other_are_ended(store, monkeypatch):
    monkeypatch.setattr(coordination, "PATIENCE", 0.1)
    teams = {0: (0, 1, 2, 3), 1: (0, 1), 2: (0, 1, 2, 3), 3: (0, 1, 2, 3)}

    def work(rank):
        return agreement._Agreement(
            f"mesh of {len(teams[rank])}", [], teams[rank], 0, rank, 9
        ).wait()

    found = run(4, work)
    told = {json.loads(one.removeprefix(agreement._ENDED))["message"] for one in found}
    assert len(told) == 1
    assert "  rank 1: mesh of 2:  (of ranks 0, 1)" in told.pop()


def test_rooms_that_only_wait_are_left(store, monkeypatch):
    """Rank 1 is late for the second room, since rank 2 is late for the first."""
    monkeypatch.setattr(coordination, "PATIENCE", 0.05)

    def work(rank):
        told = []
        if rank == 2:
            time.sleep(0.6)
        if rank:
            told.append(agreement._Agreement("b", [], (1, 2), 0, rank, 9).wait())
        if rank < 2:
            told.append(agreement._Agreement("a", [], (0, 1), 0, rank, 9).wait())
        return told

    assert run(3, work) == [[""], ["", ""], [""]]


def test_processes_that_save_together(monkeypatch):
    monkeypatch.setattr(coordination, "PATIENCE", 60.0)
    usual, most = [], []
    for size in (2, 8, 32):
        store = Store()
        monkeypatch.setattr(coordination, "_client", lambda store=store: store)

        def work(rank, size=size):
            group = grouped(rank, size)
            made = group.broadcast(lambda: "folder")
            group.run(lambda: None)
            return made, group.gather(lambda: [rank])

        found = run(size, work)
        assert found[0] == ("folder", [[rank] for rank in range(size)])
        assert found[1:] == [("folder", [])] * (size - 1)
        counts = counted(store, size)
        usual.append(counts[0])
        most.append(counts[1])
    assert usual[1:] == [8] * 2
    assert max(most) <= 12


def test_a_fault_of_one_is_raised_in_all(store):
    def work(rank):
        def part():
            if rank == 3:
                raise OSError("no space left")

        grouped(rank, 5).run(part)

    found = run(5, work)
    assert isinstance(found[3], OSError)
    for error in [*found[:3], found[4]]:
        assert isinstance(error, CheckpointError)
        assert str(error) == "other processes failed: rank 3: OSError: no space left"


def test_a_fault_of_the_first_is_raised_in_all(store):
    def work(rank):
        grouped(rank, 3).broadcast(lambda: 1 / 0)

    found = run(3, work)
    assert isinstance(found[0], ZeroDivisionError)
    assert {str(error) for error in found[1:]} == {
        "other processes failed: rank 0: ZeroDivisionError: division by zero"
    }
