"""CheckpointManager: which steps it keeps, restores and refuses; what `save_async` waits for."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import threading
import zlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import isoshard.torch_bridge as xs
from isoshard.core.checkpoint.steps import Steps
from isoshard.core.checkpoint.store import LocalStore
from isoshard.torch_bridge.checkpoints import CheckpointError, CheckpointManager, SPMDSavePlanner
from tests.torch_xla_bridge.checkpoint_states import (
    LAYOUTS,
    empty_state,
    numbers,
    restored,
    same,
    small_state,
)


@pytest.fixture
def make(tmp_path):
    """Make managers of one folder that do not watch for SIGTERM."""
    made = []

    def manager(save_interval=10, **options):
        made.append(
            CheckpointManager(tmp_path, save_interval, chkpt_on_preemption=False, **options)
        )
        return made[-1]

    yield manager
    for one in made:
        one.close()


@pytest.mark.parametrize("way", ["save", "save_async"])
def test_steps_of_the_interval_are_saved(make, way):
    manager, state = make(), small_state(1)
    assert manager.all_steps() == []
    taken = [step for step in range(31) if getattr(manager, way)(step, state)]
    manager.join()
    assert taken == manager.all_steps() == make().all_steps() == [0, 10, 20, 30]
    assert not manager.save(7, state)
    assert getattr(manager, way)(7, small_state(2), force=True)
    manager.join()
    assert manager.all_steps() == [0, 7, 10, 20, 30]
    assert same(restored(manager, 7), small_state(2))


def test_max_to_keep_counts_by_the_time_of_the_save(make):
    manager, state = make(max_to_keep=2), small_state(1)
    for step, kept in [(10, [10]), (20, [10, 20]), (30, [20, 30]), (10, [10, 30])]:
        assert manager.save(step, state)
        assert manager.all_steps() == kept
    manager = make(max_to_keep=2)
    assert manager.save(20, state)
    assert manager.all_steps() == [10, 20]


def test_saving_a_step_again_replaces_it(make, tmp_path):
    manager = make(num_of_threads=3)
    manager.save(10, small_state(1))
    manager.save(10, small_state(2, LAYOUTS[0]))
    assert manager.all_steps() == [10]
    assert same(restored(manager, 10), small_state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["10"]
    assert len(list((tmp_path / "10").glob("*.distcp"))) == 3  # one of each thread


def test_modules_and_optimizers_may_stand_at_the_top(make):
    def pair(seed):
        torch.manual_seed(seed)
        model = nn.Linear(8, 8).to("jax")
        xs.mark_sharding(model.weight, xs.Mesh(range(8), (8,), ("x",)), ("x", None))
        optimizer = torch.optim.SGD(model.parameters(), lr=seed, momentum=0.5)
        model(numbers(2, 8, seed=seed).to("jax")).sum().backward()
        optimizer.step()
        return {"model": model, "optim": optimizer}

    saved, other = pair(1), pair(2)
    manager = make()
    manager.save(0, saved)
    manager.restore(0, other)
    assert same(dict(other["model"].state_dict()), dict(saved["model"].state_dict()))
    assert same(other["optim"].state_dict(), saved["optim"].state_dict())
    assert other["optim"].param_groups[0]["lr"] == 1


def test_a_part_is_restored_and_what_does_not_fit_is_named(make):
    manager = make()
    manager.save(0, small_state(1))
    part = {"host": torch.zeros(5)}
    manager.restore(0, part)
    assert same(part, {"host": small_state(1)["host"]})
    wrong = {"weight": torch.zeros(8, 8).to("jax"), "more": 1}
    with pytest.raises(RuntimeError, match=r"does not fit(?s:.*)weight: \(8, 16\)(?s:.*)more: not"):
        manager.restore(0, wrong)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 20 .*of steps \[0\]"):
        manager.restore(20, empty_state())


def test_arguments(tmp_path, make):
    for options, message in (
        ({"save_interval": 0}, "save_interval is an integer of at least 1, not 0"),
        ({"save_interval": 2.5}, "save_interval is an integer of at least 1, not 2.5"),
        ({"save_interval": 1, "max_to_keep": -1}, "max_to_keep is an integer of at least 0"),
        ({"save_interval": 1, "max_pending_async": 0}, "max_pending_async is an integer of at"),
        ({"save_interval": 1, "num_of_threads": None}, "num_of_threads is an integer of at leas"),
    ):
        with pytest.raises(ValueError, match=message):
            CheckpointManager(tmp_path / "new", chkpt_on_preemption=False, **options)
        assert not (tmp_path / "new").exists()
    manager = make()
    for step in (-1, 1.5, "3", None):
        with pytest.raises(ValueError, match="step is an integer of at least 0"):
            manager.save(step, {}, force=True)
    with pytest.raises(RuntimeError, match="chkpt_on_preemption=True"):
        manager.reached_preemption(0)
    assert manager.save(np.int64(10), {"n": 1}) and manager.save(torch.tensor(20), {"n": 1})
    assert manager.all_steps() == [10, 20]


def test_files_that_are_no_checkpoints_are_left_alone(make, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "data").write_text("mine too")
    (tmp_path / "010").mkdir()
    manager = make(max_to_keep=1)
    for seed in (1, 2):  # beside the folder that is something else
        manager.save(7, small_state(seed), force=True)
        assert manager.all_steps() == [7]
        assert same(restored(manager, 7), small_state(seed))
    manager.save(8, small_state(2), force=True)
    assert manager.all_steps() == [8]
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "7" / "data").exists()
    assert (tmp_path / "010").exists()


def test_leftovers_are_ignored_and_removed_by_the_next_manager(make, tmp_path):
    manager = make()
    manager.save(10, small_state(1))
    shutil.copytree(tmp_path / "10", tmp_path / ".saving-20-0123abcd")
    shutil.copytree(tmp_path / "10", tmp_path / ".removing-5-0123abcd")
    assert manager.all_steps() == [10]
    assert make().all_steps() == [10]
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_a_save_under_way_is_no_leftover(make, tmp_path):
    steps = Steps(LocalStore(str(tmp_path)))
    with steps.saving(20) as folder:
        make().save(10, small_state(1))
        assert (tmp_path / folder).exists()
        steps.commit(folder, 20, {})
    assert make().all_steps() == [10, 20]


def test_where_files_have_no_locks_leftovers_stay(make, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / ".saving-20-0123abcd").mkdir()
    manager = make()
    manager.save(10, small_state(1))
    assert manager.all_steps() == [10]
    assert (tmp_path / ".saving-20-0123abcd").exists()


def test_a_leftover_that_cannot_be_removed_is_told(make, tmp_path, monkeypatch):
    (tmp_path / ".removing-5-0123abcd").mkdir()

    def refuse(self, path):
        raise PermissionError("read-only")

    monkeypatch.setattr(LocalStore, "remove_folder", refuse)
    with pytest.warns(UserWarning, match="left over from a killed save.*read-only"):
        manager = make()
    assert manager.all_steps() == []


def test_a_renamed_step_and_a_manifest_of_a_later_format_are_refused(make, tmp_path):
    manager = make()
    manager.save(10, small_state(1))
    (tmp_path / "10").rename(tmp_path / "20")
    with pytest.raises(CheckpointError, match="holds the checkpoint of step 10"):
        manager.restore(20, empty_state())
    path = tmp_path / "20" / ".manifest"
    content = json.loads(path.read_bytes().splitlines()[0])
    line = json.dumps(content | {"format": 9}).encode() + b"\n"
    path.write_bytes(line + f"{zlib.crc32(line):08x}\n".encode())
    with pytest.raises(CheckpointError, match="has format 9, and this version"):
        manager.restore(20, empty_state())


def test_checkpoints_of_torch_xla_s_manager_are_restored_and_pruned(make, tmp_path):
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(small_state(1), checkpoint_id=tmp_path / "10", planner=SPMDSavePlanner())
    manager = make(max_to_keep=2)
    assert manager.all_steps() == []
    (tmp_path / "10" / ".manager_metadata").write_bytes(b"a pickle")
    assert manager.all_steps() == [10]
    assert same(restored(manager, 10), small_state(1))
    manager.save(20, small_state(2))
    manager.save(0, small_state(3))
    assert manager.all_steps() == [0, 20]


def test_a_damaged_checkpoint_is_the_first_to_go(make, tmp_path):
    manager = make(max_to_keep=2)
    for step in (10, 20):
        manager.save(step, small_state(step))
    (tmp_path / "20" / ".manifest").write_bytes(b"")
    manager.save(30, small_state(30))
    assert manager.all_steps() == [10, 30]


def test_values_that_cannot_be_saved_leave_nothing(make, tmp_path):
    manager = make()
    with pytest.raises(Exception, match=r"pickle|local object"):
        manager.save(0, {"bad": lambda: None})
    with pytest.raises(Exception, match=r"pickle|local object"):
        manager.save_async(0, {"bad": lambda: None})
    assert manager.all_steps() == list(tmp_path.iterdir()) == []
    assert manager.save_async(0, small_state(1))


# --- save_async ----------------------------------------------------------------------------------


class Gate:
    """Holds every write of a manager until it is opened; or fails it."""

    def __init__(self, manager, monkeypatch):
        self.open = threading.Event()
        self.error = None
        save = manager._save

        def held(*args):
            assert self.open.wait(60)
            if self.error is not None:
                raise self.error
            save(*args)

        monkeypatch.setattr(manager, "_save", held)


@pytest.fixture
def manager(tmp_path):
    with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as one:
        yield one


@pytest.fixture
def gate(manager, monkeypatch):
    one = Gate(manager, monkeypatch)
    yield one
    one.open.set()


def test_later_writes_are_not_seen(manager, gate):
    state = small_state(1)
    state["rest"]["history"] = [1, 2]
    assert manager.save_async(0, state)
    state["weight"].add_(1)
    state["weight"][0] = 7
    state["count"].zero_()
    state["host"].zero_()
    state["rest"]["name"] = "other"
    state["rest"]["history"].append(3)
    xs.sync()
    assert manager.all_steps() == []
    gate.open.set()
    manager.join()
    found = empty_state()
    found["rest"]["history"] = None
    manager.restore(0, found)
    assert found["rest"].pop("history") == [1, 2]
    assert same(found, small_state(1))


def test_a_compiled_step_that_donates_is_not_seen(manager, gate):
    torch.manual_seed(0)
    model = nn.Linear(8, 8).to("jax")
    xs.mark_sharding(model.weight, xs.Mesh(range(8), (8,), ("x",)), ("x", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = numbers(4, 8).to("jax")

    @xs.compile
    def step():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(3):
        step()
    wanted = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    manager.save_async(0, {"model": model})
    for _ in range(3):
        step()
    gate.open.set()
    manager.join()
    assert not same(dict(model.state_dict()), wanted)
    manager.restore(0, {"model": model})
    assert same(dict(model.state_dict()), wanted)


CALLS = {
    "should_save": lambda manager: manager.should_save(5),
    "save": lambda manager: manager.save(5, {}),
    "save_async": lambda manager: manager.save_async(5, {}),
    "restore": lambda manager: manager.restore(0, {}),
    "all_steps": lambda manager: manager.all_steps(),
    "join": lambda manager: manager.join(),
    "close": lambda manager: manager.close(),
}


def test_an_error_surfaces_at_the_next_call_once(tmp_path, monkeypatch):
    for name, call in CALLS.items():
        manager = CheckpointManager(tmp_path / name, 1, chkpt_on_preemption=False)
        gate = Gate(manager, monkeypatch)
        gate.error = OSError("no space left")
        manager.save_async(0, {"n": 1})
        gate.open.set()
        (future,) = manager._pending
        assert isinstance(future.exception(60), OSError)
        with pytest.raises(
            CheckpointError, match="not written completely: step 0: OSError: no space left"
        ) as raised:
            call(manager)
        assert raised.value.__cause__ is gate.error
        assert manager.all_steps() == []
        gate.error = None
        if name != "close":
            assert manager.save_async(1, {"n": 1})
            manager.join()
            assert manager.all_steps() == [1]
            manager.close()


def test_all_failures_are_named(tmp_path, monkeypatch):
    manager = CheckpointManager(tmp_path, 1, max_pending_async=3, chkpt_on_preemption=False)
    gate = Gate(manager, monkeypatch)
    gate.error = OSError("gone")
    for step in range(3):
        manager.save_async(step, {})
    gate.open.set()
    with pytest.raises(CheckpointError, match=r"step 0: .*step 1: .*step 2: OSError: gone"):
        manager.join()
    manager.close()


def test_one_more_than_max_pending_waits(tmp_path, monkeypatch):
    with CheckpointManager(tmp_path, 1, max_pending_async=2, chkpt_on_preemption=False) as manager:
        gate = Gate(manager, monkeypatch)
        manager.save_async(0, {"n": 0})
        manager.save_async(1, {"n": 1})
        third = threading.Thread(target=manager.save_async, args=(2, {"n": 2}))
        third.start()
        third.join(0.2)
        assert third.is_alive()
        assert manager.all_steps() == []
        gate.open.set()
        third.join(60)
        assert not third.is_alive()
        manager.join()
        assert manager.all_steps() == [0, 1, 2]


def test_restore_and_save_wait_for_what_is_pending(manager, gate):
    manager.save_async(0, small_state(1))
    threading.Timer(0.1, gate.open.set).start()
    found = empty_state()
    manager.restore(0, found)
    assert same(found, small_state(1))
    manager.save_async(1, small_state(1))
    manager.save(2, small_state(1))
    assert manager.all_steps() == [0, 1, 2]


def test_leaving_the_context_waits(tmp_path):
    with CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
        for step in range(3):
            manager.save_async(step, {"n": step})
    assert manager.all_steps() == [0, 1, 2]
    with pytest.raises(RuntimeError, match="cannot schedule new futures"):
        manager.save_async(5, {})
