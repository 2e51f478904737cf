"""SPMDSavePlanner and SPMDLoadPlanner, under torch.distributed.checkpoint's own save and load."""

from __future__ import annotations

import itertools
import math

import jax
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType

import isoshard
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.checkpoints import CheckpointError
from isoshard.torch_bridge.checkpoints.arrival import Arrival
from isoshard.torch_bridge.torch_xla.experimental.distributed_checkpoint import (
    SPMDLoadPlanner,
    SPMDSavePlanner,
    prime_optimizer,
)
from tests.torch_bridge.torch_xla.checkpoint_states import LAYOUTS, numbers, place, same

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:`(save|load)_state_dict` is deprecated"),
]


def save(state, path, planner=None):
    dcp.save(
        state,
        storage_writer=dcp.FileSystemWriter(path),
        planner=planner or SPMDSavePlanner(),
    )


def load(state, path, planner=None):
    dcp.load(state, storage_reader=dcp.FileSystemReader(path), planner=planner or SPMDLoadPlanner())


@pytest.mark.parametrize(("before", "after"), [*itertools.product(range(len(LAYOUTS)), repeat=2)])
def test_any_layout_loads_into_any_other(before, after, tmp_path):
    wanted = numbers(16, 8)
    save({"w": place(wanted, LAYOUTS[before])}, tmp_path)
    target = place(torch.zeros(16, 8), LAYOUTS[after])
    layout = target.named_sharding
    load({"w": target}, tmp_path)
    assert torch.equal(target.cpu(), wanted)
    assert target.named_sharding is layout
    assert isoshard.to_jax(target).sharding == layout


def test_the_older_functions(tmp_path):
    wanted = numbers(8, 8)
    dcp.save_state_dict(
        state_dict={"w": place(wanted, LAYOUTS[0])},
        storage_writer=dcp.FileSystemWriter(tmp_path, per_thread_copy_ahead=0),
        planner=SPMDSavePlanner(),
        no_dist=True,
    )
    target = place(torch.zeros(8, 8), LAYOUTS[2])
    dcp.load_state_dict(
        state_dict={"w": target},
        storage_reader=dcp.FileSystemReader(tmp_path),
        planner=SPMDLoadPlanner(),
        no_dist=True,
    )
    assert torch.equal(target.cpu(), wanted)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
        torch.uint16,
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", [LAYOUTS[2], None], ids=["sharded", "unmarked"])
def test_dtypes(dtype, layout, tmp_path):
    wanted = (numbers(8, 8).abs() * 9).to(torch.float32).to(dtype)
    save({"w": place(wanted, layout)}, tmp_path)
    target = place(torch.zeros(8, 8, dtype=dtype), LAYOUTS[4])
    load({"w": target}, tmp_path)
    assert target.dtype == dtype
    got = target.cpu()
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (0, 8), (8,), (2, 3, 8)], ids=str)
def test_shapes(shape, tmp_path):
    wanted = numbers(*shape)
    mesh = xs.Mesh(range(8), (8,), ("x",))
    spec = (None,) * (len(shape) - 1) + ("x",) if shape else ()
    save({"w": xs.mark_sharding(wanted.to("jax"), mesh, spec)}, tmp_path)
    for target in (
        torch.ones(shape).to("jax"),
        xs.mark_sharding(torch.ones(shape).to("jax"), mesh, spec),
    ):
        load({"w": target}, tmp_path)
        assert torch.equal(target.cpu(), wanted)


def test_what_is_recorded_is_executed_and_saved(tmp_path):
    wanted = numbers(8, 8)
    save({"w": place(wanted, LAYOUTS[0]) * 2 + 1}, tmp_path)
    target = torch.zeros(8, 8, device="jax")
    load({"w": target}, tmp_path)
    assert torch.equal(target.cpu(), wanted * 2 + 1)


def test_each_distinct_piece_is_written_once_from_its_buffer(counted):
    tensor = place(numbers(16, 8), LAYOUTS[5])  # two pieces, each on four devices
    planner = SPMDSavePlanner()
    planner.set_up_planner({"w": tensor})
    items = planner.create_local_plan().items
    assert [item.type for item in items] == [WriteItemType.SHARD] * 2
    assert [tuple(item.tensor_data.chunk.offsets) for item in items] == [(0, 0), (0, 4)]
    shards = isoshard.local_shards(tensor, framework="torch")
    for item in items:
        data = planner.resolve_data(item)
        assert data.data_ptr() == shards[item.index.index].data.data_ptr()
    assert counted("gathers") == 0
    assert counted("transfers.device_to_host") == 0


def test_planner_keeps_no_buffer_once_all_is_written(tmp_path):
    planner = SPMDSavePlanner()
    save({"w": place(numbers(16, 8), LAYOUTS[0])}, tmp_path, planner)
    assert planner._reading == {}


def test_a_piece_can_be_asked_for_twice():
    planner = SPMDSavePlanner()
    planner.set_up_planner({"w": place(numbers(16, 8), LAYOUTS[2])})
    items = planner.create_local_plan().items
    first = [planner.resolve_data(item) for item in items]
    assert all(map(torch.equal, first, [planner.resolve_data(item) for item in items]))


def test_the_values_are_parted_into_sharded_and_others():
    state = {
        "model": {"a": place(numbers(8, 8), LAYOUTS[2]), "b": place(numbers(8, 8), LAYOUTS[7])},
        "lists": [place(numbers(8, 8), LAYOUTS[0]), 3],
    }
    planner = SPMDSavePlanner()
    planner.set_up_planner(state, None, True)
    assert set(planner.sharded_state_dict) == {"model.a", "lists.0"}
    assert set(planner.unsharded_state_dict) == {"model.b", "lists.1"}
    planner = SPMDLoadPlanner()
    planner.set_up_planner(state, None, True)
    assert set(planner.sharded_state_dict) == {"model.a", "lists.0"}
    assert set(planner.unsharded_state_dict) == {"model.b", "lists.1"}


@pytest.mark.parametrize(("before", "after"), [(0, 1), (2, 3), (5, 0), (7, 2), (2, 7)])
def test_a_load_reads_what_the_pieces_need_and_no_more(before, after, tmp_path):
    save({"w": place(numbers(16, 8), LAYOUTS[before])}, tmp_path)
    target = place(torch.zeros(16, 8), LAYOUTS[after])
    planner = SPMDLoadPlanner()
    planner.set_up_planner({"w": target}, dcp.FileSystemReader(tmp_path).read_metadata(), True)
    items = planner.create_local_plan().items
    assert sum(math.prod(item.lengths) for item in items) == 16 * 8
    pieces = {item.dest_index.offset for item in items}
    assert len(pieces) == len({str(shard.indices) for shard in target.local_shards})
    for item in items:
        assert planner.resolve_tensor(item).shape == item.lengths


def test_no_sharded_tensor_is_whole_on_the_host(monkeypatch, tmp_path):
    save({"w": place(numbers(16, 8), LAYOUTS[0])}, tmp_path)
    sizes = []
    buffer = Arrival.buffer
    monkeypatch.setattr(
        Arrival, "buffer", lambda self, at: sizes.append((b := buffer(self, at)).numel()) or b
    )
    load({"w": place(torch.zeros(16, 8), LAYOUTS[2])}, tmp_path)
    assert set(sizes) == {16}


def test_model_and_optimizer(tmp_path):
    def make(seed, layout):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).to("jax")
        shape, names, spec = layout
        mesh = xs.Mesh(range(8), shape, names)
        for layer in (model[0], model[2]):
            xs.mark_sharding(layer.weight, mesh, spec)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
        return model, optimizer

    def train(model, optimizer, steps):
        x = numbers(16, 8).to("jax")
        losses = []
        for _ in range(steps):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = make(1, LAYOUTS[2])
    train(model, optimizer, 3)
    save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}, tmp_path)
    wanted = train(model, optimizer, 3)

    model, optimizer = make(2, LAYOUTS[3])
    prime_optimizer(optimizer)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 0}
    load(state, tmp_path)
    assert state["step"] == 3
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])
    assert optimizer.param_groups[0]["lr"] == 0.1
    torch.testing.assert_close(train(model, optimizer, 3), wanted, rtol=1e-5, atol=1e-6)


def test_objects_bytes_and_cpu_tensors(tmp_path):
    class_free = {"bytes": b"\x00\xff", "tuple": (1, "a"), "none": None, "list": [1, [2.5]]}
    state = {"cpu": numbers(3), "deep": {"a": [{"t": place(numbers(8, 8), LAYOUTS[0])}]}}
    save({**state, **class_free}, tmp_path)
    target = {"cpu": torch.zeros(3), "deep": {"a": [{"t": torch.zeros(8, 8, device="jax")}]}}
    target |= dict.fromkeys(class_free)
    load(target, tmp_path)
    assert same(target, {**state, **class_free})


def test_layers_of_a_stack_are_saved_and_loaded_as_layers(tmp_path):
    def make():
        return xs.scan_layers(nn.ModuleList(nn.Linear(8, 8) for _ in range(3))).to("jax")

    saved, loaded = make(), make()
    save(saved.state_dict(), tmp_path)
    names = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert {f"{number}.weight" for number in range(3)} <= set(names)
    load(loaded.state_dict(), tmp_path)
    assert same(dict(loaded.state_dict()), dict(saved.state_dict()))


def test_torch_s_own_planners_read_and_write_the_same_checkpoints(tmp_path):
    wanted = {"a": numbers(16, 8), "b": {"c": torch.arange(4), "d": "text"}}
    on_mesh = {"a": place(wanted["a"], LAYOUTS[2]), "b": {**wanted["b"]}}
    save(on_mesh, tmp_path / "ours")
    plain = {"a": torch.zeros(16, 8), "b": {"c": torch.zeros(4, dtype=torch.int64), "d": ""}}
    load(plain, tmp_path / "ours", dcp.DefaultLoadPlanner())
    assert same(plain, wanted)

    save(wanted, tmp_path / "torch's", dcp.DefaultSavePlanner())
    target = {
        "a": place(torch.zeros(16, 8), LAYOUTS[3]),
        "b": {"c": torch.zeros(4).long(), "d": ""},
    }
    load(target, tmp_path / "torch's")
    assert same(target, wanted)


def test_torch_s_own_planner_and_writer_take_tensors_of_the_device(tmp_path):
    wanted = numbers(16, 8)
    save({"w": place(wanted, LAYOUTS[2])}, tmp_path, dcp.DefaultSavePlanner())
    target = torch.zeros(16, 8)
    load({"w": target}, tmp_path, dcp.DefaultLoadPlanner())
    assert torch.equal(target, wanted)


def test_another_dtype_is_converted_as_copy_does(tmp_path):
    wanted = numbers(8, 8)
    save({"w": place(wanted, LAYOUTS[0])}, tmp_path)
    target = place(torch.zeros(8, 8, dtype=torch.bfloat16), LAYOUTS[2])
    load({"w": target}, tmp_path)
    assert target.dtype == torch.bfloat16
    assert torch.equal(target.cpu(), wanted.bfloat16())


def test_wide_integers(tmp_path):
    wanted = torch.arange(8) + 2**40
    save({"n": place(wanted, ((8,), ("x",), ("x",)))}, tmp_path)
    target = place(torch.zeros(8).long(), ((8,), ("x",), (None,)))
    load({"n": target}, tmp_path)
    assert torch.equal(target.cpu(), wanted)
    assert isoshard.to_jax(target, dtype="int64").dtype == "int64"


def test_a_parameter_stays_the_same_object_and_backward_notices(tmp_path):
    parameter = nn.Parameter(place(numbers(8, 8), LAYOUTS[2]))
    save({"w": place(numbers(8, 8, seed=1), LAYOUTS[0])}, tmp_path)
    loss = parameter.square().sum()
    load({"w": parameter}, tmp_path)
    assert parameter.requires_grad and parameter.is_leaf
    assert torch.equal(parameter.detach().cpu(), numbers(8, 8, seed=1))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_loaded_tensor_can_be_donated(tmp_path):
    wanted = torch.arange(64.0).reshape(8, 8)
    save({"w": place(wanted, LAYOUTS[0])}, tmp_path)
    target = place(torch.zeros(8, 8), LAYOUTS[7])  # on CPU devices, eight views of one buffer
    load({"w": target}, tmp_path)
    step = xs.compile(lambda: target.add_(1))
    for count in range(1, 5):
        step()
        assert all(torch.equal(shard.data, wanted + count) for shard in target.local_shards)


def test_every_misfit_is_named_and_nothing_is_loaded(tmp_path):
    save({"a": numbers(4), "b": place(numbers(8, 8), LAYOUTS[0]), "c": numbers(2)}, tmp_path)
    state = {"a": torch.zeros(4), "b": torch.zeros(8, 4).to("jax"), "d": numbers(1), "c": "text"}
    with pytest.raises(dcp.CheckpointException) as raised:
        load(state, tmp_path)
    text = str(raised.value)
    assert "b: (8, 8) in the checkpoint, here (8, 4)" in text
    assert "d: not in the checkpoint" in text
    assert "c: a tensor in the checkpoint, here str" in text
    assert not state["a"].any()


def test_a_checkpoint_that_lacks_a_piece_is_refused(tmp_path):
    save({"w": place(numbers(8, 8), LAYOUTS[0])}, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    kept = metadata.state_dict_metadata["w"]
    assert isinstance(kept, TensorStorageMetadata)
    del kept.chunks[3]
    planner = SPMDLoadPlanner()
    planner.set_up_planner({"w": place(torch.zeros(8, 8), LAYOUTS[2])}, metadata, True)
    with pytest.raises(CheckpointError, match="w: the checkpoint holds only a part of this tensor"):
        planner.create_local_plan()


def test_reads_that_were_not_done_are_noticed(tmp_path):
    save({"w": place(numbers(8, 8), LAYOUTS[0])}, tmp_path)
    target = place(torch.zeros(8, 8), LAYOUTS[2])
    planner = SPMDLoadPlanner()
    planner.set_up_planner({"w": target}, dcp.FileSystemReader(tmp_path).read_metadata(), True)
    items = planner.create_local_plan().items
    for item in items[1:]:
        planner.resolve_tensor(item).fill_(1)
        planner.commit_tensor(item, planner.resolve_tensor(item))
    with pytest.raises(CheckpointError, match="not read completely: w"):
        planner.check_complete()
    assert not target.cpu().any()
    planner.resolve_tensor(items[0]).fill_(1)
    planner.commit_tensor(items[0], planner.resolve_tensor(items[0]))
    planner.check_complete()
    assert target.cpu().all()


def test_equal_names_are_refused():
    with pytest.raises(ValueError, match=r"two values of the state dict have the name 'a\.b'"):
        SPMDSavePlanner().set_up_planner({"a": {"b": 1}, "a.b": 2})


def test_not_while_a_step_is_captured():
    tensor = place(numbers(8, 8), LAYOUTS[0])

    @xs.compile
    def step():
        SPMDSavePlanner().set_up_planner({"w": tensor})
        return tensor + 1

    with pytest.raises(xs.CaptureError, match="a checkpoint"):
        step()


def test_a_committed_single_device_tensor_stays_there(tmp_path):
    save({"w": place(numbers(8, 8), LAYOUTS[0])}, tmp_path)
    device = jax.devices()[3]
    target = isoshard.to_torch(jax.device_put(jax.numpy.zeros((8, 8)), device))
    load({"w": target}, tmp_path)
    assert isoshard.to_jax(target).devices() == {device}
    assert torch.equal(target.cpu(), numbers(8, 8))
