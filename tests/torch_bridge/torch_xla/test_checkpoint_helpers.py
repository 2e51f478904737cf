"""prime_optimizer, and what scripts import from the checkpoint package by torch_xla's names."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import (
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.default_planner import (
    flatten_state_dict as torch_s_flatten,
)
from torch.distributed.checkpoint.planner import SavePlan

import isoshard.torch_bridge as xs
from isoshard.torch_bridge.torch_xla.experimental import distributed_checkpoint as package
from isoshard.torch_bridge.torch_xla.experimental.distributed_checkpoint import _helpers
from tests.torch_bridge.torch_xla.checkpoint_states import LAYOUTS, numbers, place, same

PACKAGE = package.__name__


def test_the_names_and_signatures_of_torch_xla():
    assert package.__all__ == [
        "CheckpointManager",
        "SPMDLoadPlanner",
        "SPMDSavePlanner",
        "prime_optimizer",
    ]
    parameters = inspect.signature(package.CheckpointManager).parameters
    assert [(name, p.default) for name, p in parameters.items()] == [
        ("path", inspect.Parameter.empty),
        ("save_interval", inspect.Parameter.empty),
        ("max_to_keep", 0),
        ("max_pending_async", 1),
        ("num_of_threads", 1),
        ("process_group", None),
        ("chkpt_on_preemption", True),
    ]
    for name in ("save", "save_async"):
        method = getattr(package.CheckpointManager, name)
        assert list(inspect.signature(method).parameters)[1:] == ["step", "state_dict", "force"]
    for planner in (package.SPMDLoadPlanner, package.SPMDSavePlanner):
        assert not inspect.signature(planner).parameters


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("manager", ["CheckpointManager"]),
        ("planners", ["SPMDLoadPlanner", "SPMDSavePlanner"]),
        ("util", ["prime_optimizer"]),
    ],
)
def test_modules(module, names):
    found = importlib.import_module(f"{PACKAGE}.{module}")
    assert all(getattr(found, name) is getattr(package, name) for name in names)


STATES = [
    {},
    {"a": 1, "b": [1, 2], "c": (1, torch.ones(1)), "d": None},
    {"a": {"b": {"c": torch.ones(2)}, 3: "x"}, "empty": {}, "none": []},
    {"l": [torch.ones(1), [torch.ones(2), {"k": 1}], [1, 2], []]},
    {"groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}]},
    {"nested": [[1, [torch.ones(1)]], [[2]]]},
]


@pytest.mark.parametrize("state", STATES)
def test_flat_names_are_torch_s(state):
    flat, paths = _helpers.flatten_state_dict(state)
    wanted, wanted_paths = torch_s_flatten(state)
    assert list(flat) == list(wanted)
    assert paths == wanted_paths
    assert all(flat[name] is wanted[name] for name in flat)


def test_flat_names_of_an_optimizer_are_torch_s():
    model = nn.Linear(2, 2)
    optimizer = package.prime_optimizer(torch.optim.AdamW(model.parameters()))
    state = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    assert _helpers.flatten_state_dict(state)[1] == torch_s_flatten(state)[1]


def test_set_element():
    root = {"a": [1]}
    _helpers.set_element(root, ("a", 2), "x")
    _helpers.set_element(root, ("b", 1, "c", 0), 5)
    _helpers.set_element(root, ("b", 1, "d"), 6)
    assert root == {"a": [1, None, "x"], "b": [None, {"c": [5], "d": 6}]}


def test_dedup_tensors_leaves_everything_to_the_first():
    first = create_default_local_save_plan({"a": torch.ones(1), "b": 1}, True)
    second = create_default_local_save_plan({"a": torch.ones(1), "c": 1}, True)
    first.items.append(first.items[0])  # as replicas are, which torch_xla then loses
    plans = _helpers.dedup_tensors([first, second, SavePlan([])])
    names = [[item.index.fqn for item in plan.items] for plan in plans]
    assert names == [["a", "b"], ["c"], []]


def test_narrow_tensor_by_index():
    whole = torch.arange(24).reshape(4, 6)
    part = _helpers.narrow_tensor_by_index(whole, (1, 2), (2, 3))
    assert torch.equal(part, whole[1:3, 2:5])
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert _helpers.narrow_tensor_by_index(whole, (0, 0), (4, 6)) is whole


def test_is_sharded_tensor():
    assert _helpers._is_sharded_tensor(place(numbers(8, 8), LAYOUTS[5]))
    assert not _helpers._is_sharded_tensor(place(numbers(8, 8), LAYOUTS[7]))
    assert not _helpers._is_sharded_tensor(numbers(8, 8).to("jax"))
    assert not _helpers._is_sharded_tensor(numbers(8, 8))
    assert not _helpers._is_sharded_tensor("text")


def test_sharded_cpu_state_dict_serves_the_save_planner():
    state = {"m": {"w": place(numbers(8, 8), LAYOUTS[0]), "b": numbers(3).to("jax"), "n": 4}}
    copied = _helpers._sharded_cpu_state_dict(state)
    assert isinstance(copied["m"]["w"], _helpers._CpuShards)
    assert copied["m"]["w"].global_shape == (8, 8)
    assert copied["m"]["b"].device.type == "cpu" and copied["m"]["n"] == 4
    state["m"]["w"].zero_()
    planner = package.SPMDSavePlanner()
    planner.set_up_planner(copied, None, True)
    assert isinstance(planner.sharded_state_dict["m.w"], _helpers._CpuShards)
    items = [item for item in planner.create_local_plan().items if item.index.fqn == "m.w"]
    rows = [planner.resolve_data(item) for item in items]
    assert torch.equal(torch.cat(rows), numbers(8, 8))


OPTIMIZERS = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.5),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.5),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_priming_makes_state_and_leaves_the_rest(make):
    weight = nn.Parameter(place(numbers(8, 8), LAYOUTS[2]))
    bias, frozen = nn.Parameter(numbers(8)), nn.Parameter(numbers(8), requires_grad=False)
    bias.grad = torch.ones(8)
    kept = bias.grad
    optimizer = make([weight, bias, frozen])
    assert package.prime_optimizer(optimizer) is optimizer
    assert torch.equal(weight.detach().cpu(), numbers(8, 8)) and torch.equal(bias, numbers(8))
    assert weight.grad is None and bias.grad is kept and bool((kept == 1).all())
    assert {weight, bias} <= set(optimizer.state)
    tensors = [s for s in optimizer.state[weight].values() if isinstance(s, xs.XLAShardedTensor)]
    assert tensors
    for state in tensors:
        assert state.dim() == 0 or state.partition_spec == weight.partition_spec


def test_a_primed_optimizer_that_is_restored_goes_on_as_the_saved_one(tmp_path):
    def train(weight, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (weight - 1).square().sum().backward()
            optimizer.step()

    saved = nn.Parameter(place(numbers(8, 8), LAYOUTS[0]))
    optimizer = torch.optim.SGD([saved], lr=0.1, momentum=0.9)
    train(saved, optimizer, 2)
    with package.CheckpointManager(tmp_path, 1, chkpt_on_preemption=False) as manager:
        manager.save(0, {"w": saved, "optim": optimizer.state_dict()})
        loaded = nn.Parameter(place(torch.zeros(8, 8), LAYOUTS[1]))
        other = package.prime_optimizer(torch.optim.SGD([loaded], lr=7.0, momentum=0.9))
        state = {"w": loaded, "optim": other.state_dict()}
        manager.restore(0, state)
        other.load_state_dict(state["optim"])
    train(saved, optimizer, 2)
    train(loaded, other, 2)
    torch.testing.assert_close(loaded.detach().cpu(), saved.detach().cpu())


def test_a_failed_priming_leaves_the_parameters():
    weight = nn.Parameter(numbers(4).to("jax"))
    optimizer = torch.optim.LBFGS([weight])
    with pytest.raises(TypeError, match="closure"):
        package.prime_optimizer(optimizer)
    assert weight.grad is None and same(weight, numbers(4))
