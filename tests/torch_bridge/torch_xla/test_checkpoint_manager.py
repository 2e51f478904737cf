"""CheckpointManager: which steps it keeps, what it restores, what it refuses."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import zlib

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

import isoshard.torch_bridge as xs
from isoshard.core.checkpoint.steps import Steps
from isoshard.torch_bridge.checkpoints import CheckpointError, CheckpointManager, SPMDSavePlanner
from isoshard.torch_bridge.checkpoints.remote_storage import LocalStorage
from tests.torch_bridge.torch_xla.checkpoint_states import (
    LAYOUTS,
    empty_state,
    numbers,
    place,
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
    assert taken == manager.all_steps() == [0, 10, 20, 30]
    assert make().all_steps() == taken


@pytest.mark.parametrize("layout", range(len(LAYOUTS)))
def test_restores_onto_another_mesh(make, layout):
    make().save(0, small_state(3, LAYOUTS[layout]))
    for other in LAYOUTS:
        assert same(restored(make(), 0, other), small_state(3))


def test_force(make):
    manager = make()
    assert not manager.save(7, small_state(1))
    assert manager.save(7, small_state(1), force=True)
    assert manager.save_async(8, small_state(2), True)
    manager.join()
    assert manager.all_steps() == [7, 8]
    assert same(restored(manager, 7), small_state(1))


def test_max_to_keep_counts_by_the_time_of_the_save(make):
    manager, state = make(max_to_keep=2), small_state(1)
    for step, kept in [(10, [10]), (20, [10, 20]), (30, [20, 30]), (10, [10, 30])]:
        assert manager.save(step, state)
        assert manager.all_steps() == kept
    manager = make(max_to_keep=2)
    assert manager.save(20, state)
    assert manager.all_steps() == [10, 20]


def test_saving_a_step_again_replaces_it(make, tmp_path):
    manager = make()
    manager.save(10, small_state(1))
    manager.save(10, small_state(2))
    assert manager.all_steps() == [10]
    assert same(restored(manager, 10), small_state(2))
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_several_threads_write_several_files(make, tmp_path):
    manager = make(num_of_threads=3)
    manager.save(10, small_state(1, LAYOUTS[0]))
    assert len(list((tmp_path / "10").glob("*.distcp"))) == 3
    assert same(restored(manager, 10), small_state(1))


def test_a_step_s_folder_is_a_checkpoint_of_torch(make, tmp_path):
    make().save(10, small_state(1))
    plain = {"weight": torch.zeros(8, 16), "count": torch.zeros(2).long()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(plain, checkpoint_id=tmp_path / "10")
    assert same(plain, {name: small_state(1)[name] for name in plain})


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


def test_restore_keeps_what_the_checkpoint_does_not_have_to_say(make):
    manager = make()
    manager.save(0, small_state(1))
    part = {"host": torch.zeros(5)}
    manager.restore(0, part)
    assert same(part, {"host": small_state(1)["host"]})


def test_what_does_not_fit_is_named(make):
    manager = make()
    manager.save(0, small_state(1))
    wrong = {"weight": torch.zeros(8, 8).to("jax"), "more": 1}
    with pytest.raises(RuntimeError, match=r"does not fit(?s:.*)weight: \(8, 16\)(?s:.*)more: not"):
        manager.restore(0, wrong)


def test_an_unknown_step_is_refused(make, tmp_path):
    manager = make()
    manager.save(10, small_state(1))
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 20 .*of steps \[10\]"):
        manager.restore(20, empty_state())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"save_interval": 0}, "save_interval is an integer of at least 1, not 0"),
        ({"save_interval": 2.5}, "save_interval is an integer of at least 1, not 2.5"),
        ({"save_interval": 1, "max_to_keep": -1}, "max_to_keep is an integer of at least 0"),
        ({"save_interval": 1, "max_pending_async": 0}, "max_pending_async is an integer of at"),
        ({"save_interval": 1, "num_of_threads": None}, "num_of_threads is an integer of at leas"),
    ],
)
def test_arguments(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        CheckpointManager(tmp_path / "new", chkpt_on_preemption=False, **options)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [-1, 1.5, "3", None])
def test_steps_are_integers(step, make):
    with pytest.raises(ValueError, match="step is an integer of at least 0"):
        make().save(step, {}, force=True)


def test_steps_of_numpy_and_torch(make):
    manager = make()
    assert manager.save(np.int64(10), small_state(1))
    assert manager.save(torch.tensor(20), small_state(1))
    assert manager.all_steps() == [10, 20]


def test_reached_preemption_wants_a_watch(make):
    with pytest.raises(RuntimeError, match="chkpt_on_preemption=True"):
        make().reached_preemption(0)


def test_files_that_are_no_checkpoints_are_left_alone(make, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "data").write_text("mine too")
    (tmp_path / "010").mkdir()
    manager = make(max_to_keep=1)
    manager.save(7, small_state(1), force=True)
    manager.save(8, small_state(2), force=True)
    assert manager.all_steps() == [8]
    assert (tmp_path / "notes.txt").exists() and (tmp_path / "7" / "data").exists()
    assert (tmp_path / "010").exists()


def test_a_step_whose_folder_is_taken_by_something_else_is_saved_beside_it(make, tmp_path):
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "data").write_text("mine")
    manager = make()
    for seed in (1, 2):
        manager.save(7, small_state(seed), force=True)
        assert manager.all_steps() == [7]
        assert same(restored(manager, 7), small_state(seed))
    assert (tmp_path / "7" / "data").read_text() == "mine"


def test_leftovers_are_ignored_and_removed_by_the_next_manager(make, tmp_path):
    manager = make()
    manager.save(10, small_state(1))
    shutil.copytree(tmp_path / "10", tmp_path / ".saving-20-0123abcd")
    shutil.copytree(tmp_path / "10", tmp_path / ".removing-5-0123abcd")
    assert manager.all_steps() == [10]
    assert make().all_steps() == [10]
    assert [path.name for path in tmp_path.iterdir()] == ["10"]


def test_a_save_under_way_is_no_leftover(make, tmp_path):
    steps = Steps(LocalStorage(str(tmp_path)))
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

    monkeypatch.setattr(LocalStorage, "remove_folder", refuse)
    with pytest.warns(UserWarning, match="left of a save that did not end.*read-only"):
        manager = make()
    assert manager.all_steps() == []


def test_a_renamed_step_is_noticed(make, tmp_path):
    manager = make()
    manager.save(10, small_state(1))
    (tmp_path / "10").rename(tmp_path / "20")
    with pytest.raises(CheckpointError, match="holds the checkpoint of step 10"):
        manager.restore(20, empty_state())


def test_a_manifest_of_a_later_format_is_refused(make, tmp_path):
    manager = make()
    manager.save(10, small_state(1))
    path = tmp_path / "10" / ".manifest"
    content = json.loads(path.read_bytes().splitlines()[0])
    line = json.dumps(content | {"format": 9}).encode() + b"\n"
    path.write_bytes(line + f"{zlib.crc32(line):08x}\n".encode())
    with pytest.raises(CheckpointError, match="has format 9, and this version"):
        manager.restore(10, empty_state())


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


def test_works_below_a_path_that_does_not_exist_yet(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with CheckpointManager("a/b", 1, chkpt_on_preemption=False) as manager:
        manager.save(0, small_state(1))
        assert manager.base_path == "a/b/"
    assert (tmp_path / "a" / "b" / "0" / ".metadata").exists()


def test_values_that_cannot_be_saved_leave_nothing(make, tmp_path):
    manager = make()
    with pytest.raises(Exception, match=r"pickle|local object"):
        manager.save(0, {"bad": lambda: None})
    with pytest.raises(Exception, match=r"pickle|local object"):
        manager.save_async(0, {"bad": lambda: None})
    assert manager.all_steps() == list(tmp_path.iterdir()) == []
    assert manager.save_async(0, small_state(1))


def test_a_tensor_that_changes_after_the_save_does_not_change_it(make):
    manager, weight = make(), place(numbers(8, 8), LAYOUTS[2])
    manager.save(0, {"w": weight})
    weight.zero_()
    xs.sync()
    manager.restore(0, {"w": weight})
    assert torch.equal(weight.cpu(), numbers(8, 8))
