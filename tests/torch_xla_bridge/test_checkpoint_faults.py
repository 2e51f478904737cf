"""Saves interrupted at any operation or byte, altered files, storages, several processes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist

from isoshard.core.checkpoint.store import FsspecStore, LocalStore
from isoshard.core.processes.coordination import ProcessGroup
from isoshard.torch_bridge.checkpoints import CheckpointError, CheckpointManager
from isoshard.torch_bridge.checkpoints import manager as managers
from isoshard.torch_bridge.checkpoints.manager import store_at
from tests.torch_xla_bridge.checkpoint_states import (
    plain_state,
    plainly_restored,
    restored,
    same,
    small_state,
)
from tests.torch_xla_bridge.faulty_store import Faults, FaultyLocal, FaultyRemote, Injected

OLD, NEW = 1, 2
SCENES = {
    "the same step": {"step": 10},
    "the old one is removed": {"step": 20, "max_to_keep": 1},
}


@pytest.fixture(scope="module")
def states():
    return {seed: plain_state(seed) for seed in (OLD, NEW)}


@pytest.fixture
def begin(tmp_path, states):
    """A folder with one checkpoint, made again for each fault."""
    with CheckpointManager(tmp_path / "first", 10, chkpt_on_preemption=False) as manager:
        manager.save(10, states[OLD])

    def again():
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "first", folder)
        return folder

    return again


def save_with(faults, folder, states, monkeypatch, step, max_to_keep=0):
    """Save the new state; whether it went well."""
    with monkeypatch.context() as patched:
        patched.setattr(managers, "store_at", lambda path: FaultyLocal(os.fspath(path), faults))
        # Leftovers that cannot be removed are told in a warning: here that is the fault itself.
        try:
            manager = CheckpointManager(
                folder, 10, max_to_keep, num_of_threads=2, chkpt_on_preemption=False
            )
            with manager:
                manager.save(step, states[NEW])
        except Injected:
            return False
    return True


def check(folder, states, step, succeeded):
    """Every listed step restores exactly; the old state is lost only to the new one."""
    with CheckpointManager(folder, 10, chkpt_on_preemption=False) as manager:
        steps = manager.all_steps()
        found = {}
        for one in steps:
            state = plainly_restored(manager, one)
            found[one] = next(seed for seed, wanted in states.items() if same(state, wanted))
        assert found.get(10, found.get(step)) in (OLD, NEW)
        if 10 not in found or found[10] == NEW:
            assert found[step] == NEW
        if succeeded:
            assert found[step] == NEW
        # the next save is not hindered, and leaves nothing behind but checkpoints
        manager.save(30, states[OLD])
        assert all(path.name.isdecimal() for path in folder.iterdir())


def count(begin, states, monkeypatch, scene):
    faults = Faults()
    assert save_with(faults, begin(), states, monkeypatch, **scene)
    return faults


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
@pytest.mark.filterwarnings("ignore:.*is left over from a killed save")
def test_at_every_operation(scene, begin, states, monkeypatch):
    """For good, or once: what one scene has once the next one has for good."""
    whole = count(begin, states, monkeypatch, scene)
    assert whole.operations > 25
    cases = [
        Faults(operation=number, once=bool((number + scene["step"] // 10) % 2))
        for number in range(whole.operations)
    ]
    for faults in (*cases, Faults(byte=0), Faults(byte=97), Faults(byte=whole.bytes - 1)):
        folder = begin()
        assert not save_with(faults, folder, states, monkeypatch, **scene), "not noticed"
        assert faults.failed
        check(folder, states, scene["step"], False)


def test_everything_is_on_the_disk_before_the_commit(begin, states, monkeypatch):
    log = count(begin, states, monkeypatch, {"step": 20}).log
    (commit,) = [n for n, (name, *paths) in enumerate(log) if name == "rename" and paths[1] == "20"]
    folder = log[commit][1]
    opened = [entry[1].rpartition("/")[2] for entry in log[:commit] if entry[0] == "open"]
    synced = [entry[1].rpartition("/")[2] for entry in log[:commit] if entry[0] == "written"]
    assert sorted(opened) == sorted(synced)
    assert synced[-1] == ".manifest"
    assert log[commit - 1] == ("kept", folder)
    assert ("kept", "") in log[commit:]
    assert not any(entry[0] in ("open", "write") for entry in log[commit:])


def damaged(folder, how):
    """Alter each file of a checkpoint in turn; yields its name."""
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for data in how(whole):
            path.write_bytes(data) if data is not None else path.unlink()
            yield path.name
            path.write_bytes(whole)


def flips(whole):
    places = sorted({0, 1, len(whole) - 1, *range(0, len(whole), len(whole) // 7)})
    for number, offset in enumerate(places):
        bit = (0, 5, 7)[number % 3]
        yield whole[:offset] + bytes([whole[offset] ^ 1 << bit]) + whole[offset + 1 :]


def cuts(whole):
    for length in {0, 1, len(whole) // 2, len(whole) - 1}:
        yield whole[:length]
    yield whole + b"\0"
    yield bytes(len(whole))


@pytest.mark.parametrize("how", [flips, cuts])
def test_altered_files_are_named(how, begin, states):
    folder = begin()
    with CheckpointManager(folder, 10, num_of_threads=2, chkpt_on_preemption=False) as manager:
        manager.save(20, states[NEW])
        names, state = set(), {"w": torch.zeros(9, 16), "n": -1}
        for name in damaged(folder / "20", how):
            names.add(name)
            with pytest.raises(CheckpointError) as raised:
                manager.restore(20, state)
            assert str(folder / "20" / name) in str(raised.value)
            assert manager.all_steps() == [10, 20]
        assert names == {".manifest", ".metadata", "__0_0.distcp", "__0_1_0.distcp"}
        assert same(state, {"w": torch.zeros(9, 16), "n": -1}), (
            "a refused restore changed something"
        )
        assert same(plainly_restored(manager, 10), states[OLD])
        assert same(plainly_restored(manager, 20), states[NEW])


def test_missing_files_and_all_altered_ones_are_named(begin):
    folder, state = begin(), plain_state(3)
    with CheckpointManager(folder, 10, chkpt_on_preemption=False) as manager:
        for name in damaged(folder / "10", lambda whole: [None]):
            if name == ".manifest":  # then it is no checkpoint
                assert manager.all_steps() == []
                continue
            with pytest.raises(CheckpointError, match=f"{name} is missing.*step: \\[\\]"):
                manager.restore(10, state)
        for name in (".metadata", "__0_0.distcp"):
            with (folder / "10" / name).open("ab") as file:
                file.write(b"more")
        with pytest.raises(CheckpointError, match=r"\.metadata has (?s:.*)__0_0\.distcp has"):
            manager.restore(10, state)


# --- Storages ------------------------------------------------------------------------------------


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
    assert isinstance(store_at(tmp_path), LocalStore)
    assert isinstance(store_at(f"memory://{ROOT}"), FsspecStore)
    assert store_at(f"file://{tmp_path}").full_path("5") == str(tmp_path / "5")
    assert store_at(f"memory://{ROOT}").full_path("5") == f"memory://{ROOT}/5"
    with CheckpointManager(f"file://{tmp_path}/run", 1, chkpt_on_preemption=False) as manager:
        manager.save(0, plain_state(1))
        assert same(plainly_restored(manager, 0), plain_state(1))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["0"]


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_both_kinds_do_the_same(kind, tmp_path, memory):
    store = store_at(tmp_path / "new" if kind == "local" else f"memory://{ROOT}")
    assert store.names("") == store.names("a") == []
    store.make_folder("")
    store.make_folder("a")
    store.make_folder("a")
    with store.writing("a/one") as file:
        file.write(b"12")
    with store.writing("a/two") as file:
        file.write(b"345")
    assert store.names("a") == ["one", "two"] and store.names("") == ["a"]
    assert store.exists("a") and store.exists("a/one") and not store.exists("a/three")
    assert store.is_folder("a") and not store.is_folder("a/one")
    store.rename("a/two", "a/three")
    with store.reading("a/three") as file:
        assert file.read() == b"345"
    store.sync_folder("a")
    store.make_folder("a/deep")
    with store.writing("a/deep/four") as file:
        file.write(b"")
    store.remove_tree("a", last="one")
    assert store.names("") == []
    store.remove_tree("a")


def test_save_restore_and_prune(remote, memory):
    manager = remote(max_to_keep=2, num_of_threads=2)
    for step, kept in [(10, [10]), (20, [10, 20]), (30, [20, 30]), (20, [20, 30])]:
        manager.save(step, plain_state(step))
        assert manager.all_steps() == kept
        assert same(plainly_restored(manager, step), plain_state(step))
    manager.save_async(40, plain_state(4))
    manager.join()
    assert remote().all_steps() == [20, 40]
    assert sorted({name.split("/")[2] for name in memory.store}) == ["20.1", "40"]
    assert not [name for name in memory.store if ".saving" in name]


@pytest.mark.parametrize(("step", "keep"), [(10, 0), (20, 1)])
def test_at_every_operation_of_a_remote_storage(step, keep, remote, memory, monkeypatch):
    """For good, or once: what one case has once the next one has for good."""
    states = {seed: plain_state(seed) for seed in (1, 2)}
    remote().save(10, states[1])
    first = {name: memory.cat_file(name) for name in memory.store}

    def attempt(faults):
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
        memory.pipe(first)
        with monkeypatch.context() as patched:
            patched.setattr(managers, "store_at", lambda _: FaultyRemote(memory, ROOT, faults))
            try:
                remote(max_to_keep=keep).save(step, states[2])
            except Injected:
                return False
        return True

    whole = Faults()
    assert attempt(whole)
    first_once = step // 10 + keep
    cases = [
        Faults(operation=number, once=bool((number + first_once) % 2))
        for number in range(whole.operations)
    ]
    cases += [Faults(byte=number) for number in range(0, whole.bytes, whole.bytes // 5)]
    for faults in cases:
        assert not attempt(faults)
        manager = remote()
        found = {}
        for one in manager.all_steps():
            state = plainly_restored(manager, one)
            found[one] = next(seed for seed, wanted in states.items() if same(state, wanted))
        assert found in ({10: 1}, {10: 1, 20: 2}, {20: 2}, {10: 2})
        assert found.get(step) == 2 or found[10] == 1
        manager.save(30, states[1])
        folders = {name.split("/")[2] for name in memory.store}
        assert {int(name.partition(".")[0]) for name in folders} == {*found, 30}
        assert len(folders) == len(found) + 1
        assert not [name for name in memory.store if name.endswith(".saving")]


# --- Several processes ---------------------------------------------------------------------------


SCRIPT = """
import os, signal, sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
sys.path.insert(0, sys.argv[2])
import torch, torch.distributed as dist
from isoshard.torch_bridge.checkpoints import CheckpointError, CheckpointManager
from isoshard.torch_bridge.checkpoints import manager as managers
from tests.torch_xla_bridge.checkpoint_states import empty_state, restored, same, small_state
from tests.torch_xla_bridge.faulty_store import FaultyLocal, Faults

folder, other = sys.argv[1], os.fork()
rank = int(other == 0)
signal.alarm(240)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
manager = CheckpointManager(f"{folder}/run", 10, max_to_keep=2)
for step in (0, 10, 20):
    manager.save_async(step, small_state(step))     # equal in both: each value is written once
manager.save(30, small_state(30))
manager.join()
assert manager.all_steps() == [20, 30]
assert same(restored(manager, 20), small_state(20))
wrote = [n for n in os.listdir(f"{folder}/run/30") if n.startswith(f"__{rank}_")]
assert len(wrote) == 1, wrote

# the second process fails: none commits, and each hears of it
if rank == 1:
    faults = Faults(byte=100, once=True)
    manager._steps.store = FaultyLocal(f"{folder}/run", faults)
try:
    manager.save(40, small_state(40))
    raise SystemExit("the fault went unnoticed")
except (OSError, CheckpointError) as error:
    told = str(error)
assert ("byte 100" in told) and (rank == 1 or "rank 1: Injected" in told), told
assert manager.all_steps() == [20, 30]

# SIGTERM in one is known to all
if rank == 1:
    os.kill(os.getpid(), signal.SIGTERM)
assert manager.should_save(41) and manager.save(41, small_state(41))
assert manager.all_steps() == [30, 41]

# a damaged file is found by whoever reads it, and told to all
dist.barrier()
if rank == 0:
    with open(f"{folder}/run/30/__1_0.distcp", "ab") as file:
        file.write(b"more")
dist.barrier()
try:
    manager.restore(30, empty_state())
    raise SystemExit("the damage went unnoticed")
except CheckpointError as error:
    assert "__1_0.distcp has" in str(error), error
dist.barrier()
manager.close()
dist.destroy_process_group()
print("well", flush=True)
if rank == 0:
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


def test_two_processes(tmp_path, processes):
    done = processes.run("-c", SCRIPT, tmp_path, Path.cwd())
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("well") == 2, done.stdout
    with CheckpointManager(tmp_path / "run", 1, chkpt_on_preemption=False) as manager:
        assert manager.all_steps() == [30, 41]
        assert same(restored(manager, 41), small_state(41))


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one(group, tmp_path):
    for given in (None, dist.group.WORLD):
        with CheckpointManager(tmp_path / "run", 1, process_group=given) as manager:
            manager.save(0, small_state(1))
            manager.save_async(1, small_state(2))
            manager.join()
            assert manager.all_steps() == [0, 1]
            assert same(restored(manager, 1), small_state(2))


def test_alone_an_error_is_raised_as_it_is():
    with pytest.raises(ZeroDivisionError):
        ProcessGroup().all_gather(lambda: 1 // 0)
    assert ProcessGroup().broadcast(lambda: torch.tensor(3)).item() == 3
