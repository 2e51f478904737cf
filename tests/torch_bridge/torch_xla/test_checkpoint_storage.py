"""Storages: folders, and what fsspec knows, where nothing can be renamed in one step."""

from __future__ import annotations

import fsspec
import pytest

from isoshard.torch_bridge.checkpoints import CheckpointError, CheckpointManager
from isoshard.torch_bridge.checkpoints import manager as managers
from isoshard.torch_bridge.checkpoints.remote_storage import (
    LocalStorage,
    RemoteStorage,
    remove_tree,
    storage_at,
)
from tests.torch_bridge.torch_xla.checkpoint_states import (
    empty_state,
    restored,
    same,
    small_state,
)
from tests.torch_bridge.torch_xla.faulty_storage import Faults, FaultyRemote, Injected

ROOT = "/checkpoint-tests"


@pytest.fixture
def memory():
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    yield files
    files.store.clear()
    files.pseudo_dirs[:] = [""]


@pytest.fixture
def remote(memory):
    """Make managers of one folder in memory."""
    made = []

    def manager(**options):
        made.append(CheckpointManager(f"memory://{ROOT}", 10, chkpt_on_preemption=False, **options))
        return made[-1]

    yield manager
    for one in made:
        one.close()


def test_kinds(tmp_path):
    assert isinstance(storage_at(tmp_path), LocalStorage)
    assert isinstance(storage_at(f"file://{tmp_path}"), LocalStorage)
    assert isinstance(storage_at(f"memory://{ROOT}"), RemoteStorage)
    assert storage_at(f"file://{tmp_path}").where("5") == str(tmp_path / "5")
    assert storage_at(f"memory://{ROOT}").where("5") == f"memory://{ROOT}/5"


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_both_kinds_do_the_same(kind, tmp_path, memory):
    storage = storage_at(tmp_path / "new" if kind == "local" else f"memory://{ROOT}")
    assert storage.names("") == storage.names("a") == []
    storage.make_folder("")
    storage.make_folder("a")
    storage.make_folder("a")
    with storage.writing("a/one") as file:
        file.write(b"12")
    with storage.writing("a/two") as file:
        file.write(b"345")
    assert storage.names("a") == ["one", "two"] and storage.names("") == ["a"]
    assert storage.exists("a") and storage.exists("a/one") and not storage.exists("a/three")
    assert storage.is_folder("a") and not storage.is_folder("a/one")
    storage.rename("a/two", "a/three")
    with storage.reading("a/three") as file:
        assert file.read() == b"345"
    storage.keep_names("a")
    storage.make_folder("a/deep")
    with storage.writing("a/deep/four") as file:
        file.write(b"")
    remove_tree(storage, "a", last="one")
    assert storage.names("") == []
    remove_tree(storage, "a")


def test_a_file_url_is_as_safe_as_the_folder(tmp_path):
    with CheckpointManager(f"file://{tmp_path}/run", 1, chkpt_on_preemption=False) as manager:
        manager.save(0, small_state(1))
        assert same(restored(manager, 0), small_state(1))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["0"]


def test_save_restore_and_prune(remote, memory):
    manager = remote(max_to_keep=2, num_of_threads=2)
    for step, kept in [(10, [10]), (20, [10, 20]), (30, [20, 30]), (20, [20, 30])]:
        manager.save(step, small_state(step))
        assert manager.all_steps() == kept
        assert same(restored(manager, step), small_state(step))
    manager.save_async(40, small_state(4))
    manager.join()
    assert remote().all_steps() == [20, 40]
    assert sorted({name.split("/")[2] for name in memory.store}) == ["20.1", "40"]
    assert not [name for name in memory.store if ".saving" in name]


def test_altered_files_are_named(remote, memory):
    manager = remote()
    manager.save(10, small_state(1))
    for name in [name for name in memory.store if "/10/" in name]:
        whole = memory.cat_file(name)
        for data in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1])):
            memory.pipe_file(name, data)
            with pytest.raises(CheckpointError, match=f"memory://{name} "):
                manager.restore(10, empty_state())
        memory.pipe_file(name, whole)
    assert same(restored(manager, 10), small_state(1))


@pytest.mark.parametrize("once", [False, True], ids=["for good", "once"])
@pytest.mark.parametrize(("step", "keep"), [(20, 0), (10, 0), (20, 1)])
def test_at_every_operation(step, keep, once, remote, memory, monkeypatch):
    states = {seed: small_state(seed) for seed in (1, 2)}
    remote().save(10, states[1])
    first = {name: memory.cat_file(name) for name in memory.store}

    def attempt(faults):
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
        memory.pipe(first)
        with monkeypatch.context() as patched:
            patched.setattr(managers, "storage_at", lambda _: FaultyRemote(memory, ROOT, faults))
            try:
                remote(max_to_keep=keep).save(step, states[2])
            except Injected:
                return False
        return True

    whole = Faults()
    assert attempt(whole)
    cases = [Faults(operation=number, once=once) for number in range(whole.operations)]
    cases += [Faults(byte=number, once=once) for number in range(0, whole.bytes, whole.bytes // 7)]
    for faults in cases:
        assert not attempt(faults)
        manager = remote()
        found = {}
        for one in manager.all_steps():
            state = restored(manager, one)
            found[one] = next(seed for seed, wanted in states.items() if same(state, wanted))
        assert found in ({10: 1}, {10: 1, 20: 2}, {20: 2}, {10: 2})
        assert found.get(step) == 2 or found[10] == 1
        manager.save(30, states[1])
        folders = {name.split("/")[2] for name in memory.store}
        assert {int(name.partition(".")[0]) for name in folders} == {*found, 30}
        assert len(folders) == len(found) + 1
        assert not [name for name in memory.store if name.endswith(".saving")]
