"""The roll called through JAX's coordination service, with ranks as threads."""

from __future__ import annotations

import dataclasses

import pytest

from isoshard.core.errors import DistributedError
from isoshard.core.processes import coordination
from isoshard.core.processes.notes import Note
from isoshard.core.processes.roll_call import call_through_service
from tests.core.processes.counting_store import Store, run

FIRST = Note(0, 64, "torchrun", "job 7", "n0", "boot a", "10.0.0.1", 11, {"isoshard": "0.2"})


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr(coordination, "_client", lambda: found)
    return found


def test_no_rank_asks_for_each_other(store):
    notes = [dataclasses.replace(FIRST, rank=rank) for rank in range(64)]
    assert run(64, lambda rank: call_through_service(notes[rank], 60.0)) == [None] * 64
    assert max(store.requests.values()) <= 6
    assert all(store.bytes[str(rank)] < 1000 for rank in range(1, 64))


def test_other_versions_and_absent_ranks_are_told_to_all(store):
    notes = [dataclasses.replace(FIRST, rank=rank, size=4) for rank in range(4)]
    notes[3] = dataclasses.replace(notes[3], host="n1", versions={"isoshard": "0.1"})

    def call(rank):
        if rank != 2:
            call_through_service(notes[rank], 1.5)

    found = run(4, call)
    for rank in (0, 1, 3):
        assert isinstance(found[rank], DistributedError)
        assert "isoshard is 0.2 on ranks 0, 1 (n0), 0.1 on rank 3 (n1)" in str(found[rank])
        assert "rank 2 of 4 did not come within 1.5 s" in str(found[rank])
