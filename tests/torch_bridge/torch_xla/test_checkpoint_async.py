"""save_async: what it has seen, what it waits for, and where its errors go."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import isoshard
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.checkpoints import CheckpointError, CheckpointManager
from isoshard.torch_bridge.checkpoints.save_planner import SPMDSavePlanner, snapshot
from tests.torch_bridge.torch_xla.checkpoint_states import (
    LAYOUTS,
    empty_state,
    numbers,
    place,
    same,
    small_state,
)


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


def test_a_save_makes_no_step_copy_or_compile_again(manager, counted):
    weight = place(numbers(8, 8), LAYOUTS[0])
    step = xs.compile(lambda: weight.mul_(2).sum())
    for _ in range(3):
        step()
    before = counted("compilations"), counted("copies")
    for number in range(3):
        manager.save_async(number, {"w": weight})
        manager.save(number + 10, {"w": weight})
        step()
    assert (counted("compilations"), counted("copies")) == before


def test_a_snapshot_is_in_pieces_each_once(counted):
    tensor = place(numbers(16, 8), LAYOUTS[5])
    copied = snapshot({"deep": [{"w": tensor}], "n": 3})
    shards = copied["deep"][0]["w"].shards
    assert [tuple(shard.data.shape) for shard in shards] == [(16, 4), (16, 4)]
    assert torch.equal(torch.cat([shard.data for shard in shards], 1), numbers(16, 8))
    buffers = {s.data.data_ptr() for s in isoshard.local_shards(tensor, framework="torch")}
    assert not buffers & {shard.data.data_ptr() for shard in shards}
    assert counted("gathers") == 0
    planner = SPMDSavePlanner()
    planner.set_up_planner(copied)
    assert set(planner.sharded_state_dict) == {"deep.0.w"}
    assert len(planner.create_local_plan().items) == 3


CALLS = {
    "should_save": lambda manager: manager.should_save(5),
    "save": lambda manager: manager.save(5, {}),
    "save_async": lambda manager: manager.save_async(5, {}),
    "restore": lambda manager: manager.restore(0, {}),
    "all_steps": lambda manager: manager.all_steps(),
    "join": lambda manager: manager.join(),
    "close": lambda manager: manager.close(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_an_error_surfaces_at_the_next_call_once(call, manager, gate):
    gate.error = OSError("no space left")
    manager.save_async(0, small_state(1))
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
    if call is not CALLS["close"]:
        assert manager.save_async(1, small_state(1))
        manager.join()
        assert manager.all_steps() == [1]


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
        manager.save_async(0, small_state(0))
        manager.save_async(1, small_state(1))
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


def test_room_is_given_back_when_a_snapshot_fails(manager):
    for _ in range(3):
        with pytest.raises(Exception, match=r"pickle|local object"):
            manager.save_async(0, {"bad": lambda: None})
    assert manager.save_async(0, small_state(1))
    manager.join()
    assert manager.all_steps() == [0]


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
        for step in range(5):
            manager.save_async(step, small_state(step))
    assert manager.all_steps() == [0, 1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="cannot schedule new futures"):
        manager.save_async(5, {})
