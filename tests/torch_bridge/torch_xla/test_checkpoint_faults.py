"""A save that is interrupted, at any operation and any byte, and files that were altered."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from isoshard.torch_bridge.checkpoints import CheckpointError, CheckpointManager
from isoshard.torch_bridge.checkpoints import manager as managers
from tests.torch_bridge.torch_xla.checkpoint_states import (
    empty_state,
    restored,
    same,
    small_state,
)
from tests.torch_bridge.torch_xla.faulty_storage import Faults, FaultyLocal, Injected

OLD, NEW = 1, 2
SCENES = {
    "another step": {"step": 20},
    "the same step": {"step": 10},
    "the old one is removed": {"step": 20, "max_to_keep": 1},
}


@pytest.fixture(scope="module")
def states():
    return {seed: small_state(seed) for seed in (OLD, NEW)}


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
        patched.setattr(managers, "storage_at", lambda path: FaultyLocal(os.fspath(path), faults))
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
            state = restored(manager, one)
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


@pytest.mark.parametrize("once", [False, True], ids=["for good", "once"])
@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
@pytest.mark.filterwarnings("ignore:.*is left of a save that did not end")
def test_at_every_operation(scene, once, begin, states, monkeypatch):
    whole = count(begin, states, monkeypatch, scene)
    assert whole.operations > 25
    results = []
    for operation in range(whole.operations):
        folder, faults = begin(), Faults(operation=operation, once=once)
        results.append(save_with(faults, folder, states, monkeypatch, **scene))
        assert faults.failed
        check(folder, states, scene["step"], results[-1])
    assert not any(results), "a fault went unnoticed"


@pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)
def test_at_many_bytes(scene, begin, states, monkeypatch):
    whole = count(begin, states, monkeypatch, scene)
    for byte in [0, 1, *range(97, whole.bytes - 1, whole.bytes // 12), whole.bytes - 1]:
        folder, faults = begin(), Faults(byte=byte)
        assert not save_with(faults, folder, states, monkeypatch, **scene)
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


def test_processes_that_die_at_any_operation(tmp_path):
    """In children of one process that has imported everything: each is ended by `os._exit`."""
    script = tmp_path / "dies.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, shutil, sys, torch
            from isoshard.torch_bridge.checkpoints import CheckpointManager, manager as managers
            from isoshard.torch_bridge.checkpoints.remote_storage import storage_at
            sys.path.insert(0, sys.argv[2])
            from tests.torch_bridge.torch_xla.faulty_storage import FaultyLocal, Faults

            first, run = sys.argv[1] + "/first", sys.argv[1] + "/run"

            def save(folder, step, seed, faults=None):
                if faults is not None:
                    managers.storage_at = lambda path: FaultyLocal(path, faults)
                manager = CheckpointManager(folder, 10, 1, chkpt_on_preemption=False)
                manager.save(step, {"w": torch.full((300,), float(seed)), "n": seed})
                manager.close()
                managers.storage_at = storage_at

            def child(work):
                number = os.fork()
                if not number:
                    try:
                        work()
                        os._exit(0)
                    finally:
                        os._exit(1)
                return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

            def begin():
                shutil.rmtree(run, ignore_errors=True)
                shutil.copytree(first, run)

            def die():
                os._exit(9)

            assert child(lambda: save(first, 10, 1)) == 0
            kinds = {"operation": 0, "byte": 0}
            for kind, stride in (("operation", 1), ("byte", 211)):
                at = 0
                while True:
                    begin()
                    code = child(lambda: save(run, 20, 2, Faults(**{kind: at}, stop=die)))
                    if code == 0:
                        break
                    assert code == 9, code
                    manager = CheckpointManager(run, 10, chkpt_on_preemption=False)
                    steps = manager.all_steps()
                    assert steps in ([10], [10, 20], [20]), steps
                    for step in steps:
                        state = {"w": torch.zeros(300), "n": 0}
                        manager.restore(step, state)
                        assert state["n"] == step // 10 and bool((state["w"] == step // 10).all())
                    if steps != [10, 20]:
                        assert not [n for n in os.listdir(run) if n.startswith(".saving")]
                    manager.close()
                    kinds[kind] += 1
                    at += stride
            print(kinds["operation"], kinds["byte"])
            """
        )
    )
    done = subprocess.run(
        [sys.executable, script, tmp_path, Path.cwd()], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    operations, offsets = map(int, done.stdout.split())
    assert operations > 30 and offsets > 10


def damaged(folder, how):
    """Alter each file of a checkpoint in turn; yields its name."""
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for data in how(whole):
            path.write_bytes(data) if data is not None else path.unlink()
            yield path.name
            path.write_bytes(whole)


def flips(whole):
    for offset in sorted({0, 1, len(whole) - 1, *range(0, len(whole), len(whole) // 7)}):
        for bit in (0, 5, 7):
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
        names, state = set(), empty_state()
        for name in damaged(folder / "20", how):
            names.add(name)
            with pytest.raises(CheckpointError) as raised:
                manager.restore(20, state)
            assert str(folder / "20" / name) in str(raised.value)
            assert manager.all_steps() == [10, 20]
        assert names == {".manifest", ".metadata", "__0_0.distcp", "__0_1_0.distcp"}
        assert same(state, empty_state()), "a refused restore changed something"
        assert same(restored(manager, 10), states[OLD])
        assert same(restored(manager, 20), states[NEW])


def test_missing_files_are_named(begin, states):
    folder = begin()
    with CheckpointManager(folder, 10, chkpt_on_preemption=False) as manager:
        for name in damaged(folder / "10", lambda whole: [None]):
            if name == ".manifest":  # then it is no checkpoint
                assert manager.all_steps() == []
                continue
            with pytest.raises(CheckpointError, match=f"{name} is missing.*step: \\[\\]"):
                manager.restore(10, empty_state())


def test_every_altered_file_is_named_at_once(begin, states):
    folder = begin()
    for name in (".metadata", "__0_0.distcp"):
        with (folder / "10" / name).open("ab") as file:
            file.write(b"more")
    with CheckpointManager(folder, 10, chkpt_on_preemption=False) as manager:
        with pytest.raises(CheckpointError, match=r"\.metadata has (?s:.*)__0_0\.distcp has"):
            manager.restore(10, empty_state())
