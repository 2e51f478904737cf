"""What is wrong between the reports of a run's processes."""

import dataclasses

import pytest

from isoshard.core.errors import DistributedError
from isoshard.core.processes import coordination
from isoshard.core.processes.handshake import (
    MUST_MATCH,
    EnvReport,
    cautions,
    conflicts,
    env_report,
    handshake_by_service,
)
from isoshard.core.processes.launchers import Launch
from tests.core.processes.counting_store import Store, run

FIRST = EnvReport(0, 64, "torchrun", "job 7", "n0", "boot a", "10.0.0.1", 11, {"isoshard": "0.2"})
VERSIONS = {"isoshard": "0.2", "jax": "0.10", "jaxlib": "0.10", "torch": None, "python": "3.11.2"}


def reports(*changes):
    """One for each rank, on one machine, each with its changes."""
    first = EnvReport(0, len(changes), "slurm", "", "n0", "boot", "10.0.0.1", 7, VERSIONS)
    return [dataclasses.replace(first, rank=rank, **change) for rank, change in enumerate(changes)]


def test_nothing_is_wrong():
    assert conflicts(reports({}, {}, {})) == cautions(reports({}, {}, {})) == []


@pytest.mark.parametrize("name", MUST_MATCH)
def test_another_version_is_a_conflict(name):
    [conflict] = conflicts(reports({}, {}, {"versions": {**VERSIONS, name: "9"}}))
    first = VERSIONS[name] or "missing"
    assert conflict.startswith(
        f"{name} is {first} on ranks 0, 1 (n0), 9 on rank 2 (n0): install one"
    )


def test_another_python_is_a_caution():
    found = reports({}, {"versions": {**VERSIONS, "python": "3.12.2"}})
    assert cautions(found) == [
        "Python is 3.11 on rank 0 (n0), 3.12 on rank 1 (n0): objects pickled by one may "
        "not load in another"
    ]
    assert not cautions(reports({}, {"versions": {**VERSIONS, "python": "3.11.9"}}))


def test_another_count_is_a_conflict():
    [conflict] = conflicts(reports({}, {"size": 3, "host": "n1"}))
    assert "rank 0 (n0) one of 2, rank 1 (n1) one of 3. Start them by one command" in conflict


def test_two_machines_of_one_name():
    [told] = cautions(reports({}, {"machine": "other"}, {"machine": "other"}))
    assert told.startswith("rank 0 and ranks 1, 2 run on different machines that are both called")


def test_a_loopback_address_matters_between_machines_only():
    loop = {"address": "127.0.1.1"}
    assert not cautions(reports(loop, loop))
    [told] = cautions(reports({}, {**loop, "host": "n1", "machine": "other"}))
    assert told.startswith("rank 1 (n1) resolves its own host name to 127.0.1.1")


def test_many_ranks_are_listed_shortly():
    [conflict] = conflicts(reports(*[{}] * 20, {"versions": {**VERSIONS, "jax": "9"}}))
    assert "jax is 0.10 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more (n0), 9 on" in conflict


def test_the_report_of_this_process(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    report = env_report(Launch("torchrun", 1, 4))
    assert (report.rank, report.size, report.run, report.address) == (
        1,
        4,
        "TORCHELASTIC_RUN_ID=a",
        "",
    )
    assert set(report.versions) == {*MUST_MATCH, "python"} and report.versions["jax"]


@pytest.fixture
def store(monkeypatch):
    found = Store()
    monkeypatch.setattr(coordination, "_client", lambda: found)
    return found


def test_no_rank_asks_for_each_other(store):
    reports = [dataclasses.replace(FIRST, rank=rank) for rank in range(64)]
    assert run(64, lambda rank: handshake_by_service(reports[rank], 60.0)) == [None] * 64
    assert max(store.requests.values()) <= 6
    assert all(store.bytes[str(rank)] < 1000 for rank in range(1, 64))


def test_other_versions_and_absent_ranks_are_told_to_all(store):
    reports = [dataclasses.replace(FIRST, rank=rank, size=4) for rank in range(4)]
    reports[3] = dataclasses.replace(reports[3], host="n1", versions={"isoshard": "0.1"})

    def call(rank):
        if rank != 2:
            handshake_by_service(reports[rank], 1.5)

    found = run(4, call)
    for rank in (0, 1, 3):
        assert isinstance(found[rank], DistributedError)
        assert "isoshard is 0.2 on ranks 0, 1 (n0), 0.1 on rank 3 (n1)" in str(found[rank])
        assert "rank 2 of 4 did not connect within 1.5 s" in str(found[rank])
