"""What is wrong between the notes of a run."""

import dataclasses

import pytest

from isoshard.core.processes.launchers import Launch
from isoshard.core.processes.notes import MUST_MATCH, Note, cautions, faults, note_of

VERSIONS = {"isoshard": "0.2", "jax": "0.10", "jaxlib": "0.10", "torch": None, "python": "3.11.2"}


def notes(*changes):
    """One for each rank, on one machine, each with its changes."""
    first = Note(0, len(changes), "slurm", "", "n0", "boot", "10.0.0.1", 7, VERSIONS)
    return [dataclasses.replace(first, rank=rank, **change) for rank, change in enumerate(changes)]


def test_nothing_is_wrong():
    assert faults(notes({}, {}, {})) == cautions(notes({}, {}, {})) == []


@pytest.mark.parametrize("name", MUST_MATCH)
def test_another_version_is_a_fault(name):
    [fault] = faults(notes({}, {}, {"versions": {**VERSIONS, name: "9"}}))
    first = VERSIONS[name] or "missing"
    assert fault.startswith(f"{name} is {first} on ranks 0, 1 (n0), 9 on rank 2 (n0): install one")


def test_another_python_is_a_caution():
    found = notes({}, {"versions": {**VERSIONS, "python": "3.12.2"}})
    assert cautions(found) == [
        "Python is 3.11 on rank 0 (n0), 3.12 on rank 1 (n0): what one pickles another may not read"
    ]
    assert not cautions(notes({}, {"versions": {**VERSIONS, "python": "3.11.9"}}))


def test_another_count_is_a_fault():
    [fault] = faults(notes({}, {"size": 3, "host": "n1"}))
    assert "rank 0 (n0) one of 2, rank 1 (n1) one of 3. Start them by one command" in fault


def test_two_machines_of_one_name():
    [told] = cautions(notes({}, {"machine": "other"}, {"machine": "other"}))
    assert told.startswith("rank 0 and ranks 1, 2 run on different machines that are both called")


def test_a_loopback_address_matters_between_machines_only():
    loop = {"address": "127.0.1.1"}
    assert not cautions(notes(loop, loop))
    [told] = cautions(notes({}, {**loop, "host": "n1", "machine": "other"}))
    assert told.startswith("rank 1 (n1) takes its own host name for 127.0.1.1")


def test_many_ranks_are_listed_shortly():
    [fault] = faults(notes(*[{}] * 20, {"versions": {**VERSIONS, "jax": "9"}}))
    assert "jax is 0.10 on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more (n0), 9 on" in fault


def test_a_note_of_this_process(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    note = note_of(Launch("torchrun", 1, 4))
    assert (note.rank, note.size, note.run, note.address) == (1, 4, "TORCHELASTIC_RUN_ID=a", "")
    assert set(note.versions) == {*MUST_MATCH, "python"} and note.versions["jax"]
