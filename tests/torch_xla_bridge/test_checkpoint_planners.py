"""The planners for torch.distributed.checkpoint, prime_optimizer, and the package's other names."""

from __future__ import annotations

import importlib
import inspect
import math

import jax
import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.default_planner import (
    flatten_state_dict as torch_s_flatten,
)
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType

import isoshard
import isoshard.torch_bridge as xs
from isoshard.torch_bridge.checkpoints import CheckpointError
from isoshard.torch_xla_bridge.torch_xla.experimental import distributed_checkpoint as package
from isoshard.torch_xla_bridge.torch_xla.experimental.distributed_checkpoint import (
    SPMDLoadPlanner,
    SPMDSavePlanner,
    _helpers,
)
from tests.torch_xla_bridge.checkpoint_states import LAYOUTS, numbers, place, same

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


@pytest.mark.parametrize("step", [1, 3])
def test_any_layout_loads_into_another(step, tmp_path):
    """Every layout before and after; one checkpoint of all."""
    wanted = {f"w{n}": numbers(16, 8, seed=n) for n in range(len(LAYOUTS))}
    others = [LAYOUTS[(n + step) % len(LAYOUTS)] for n in range(len(LAYOUTS))]
    save(dict(zip(wanted, map(place, wanted.values(), LAYOUTS), strict=True)), tmp_path)
    target = {
        name: place(torch.zeros(16, 8), other) for name, other in zip(wanted, others, strict=True)
    }
    layouts = {name: t.named_sharding for name, t in target.items()}
    load(target, tmp_path)
    for name, t in target.items():
        assert torch.equal(t.cpu(), wanted[name]), name
        assert t.named_sharding is layouts[name]
        assert isoshard.to_jax(t).sharding == layouts[name]


DTYPES = "bfloat16 float16 int64 int32 uint8 bool complex64 float8_e4m3fn uint16".split()


@pytest.mark.parametrize("layout", [LAYOUTS[2], None], ids=["sharded", "unmarked"])
def test_dtypes(layout, tmp_path):
    dtypes = [getattr(torch, name) for name in DTYPES]
    wanted = {str(d): (numbers(8, 8).abs() * 9).to(torch.float32).to(d) for d in dtypes}
    wanted["wide"] = torch.arange(64).reshape(8, 8) + 2**40
    save({name: place(t, layout) for name, t in wanted.items()}, tmp_path)
    target = {n: place(torch.zeros(8, 8, dtype=t.dtype), LAYOUTS[4]) for n, t in wanted.items()}
    load(target, tmp_path)
    for name, t in target.items():
        assert t.dtype == wanted[name].dtype
        assert torch.equal(t.cpu().view(torch.uint8), wanted[name].view(torch.uint8)), name
    assert isoshard.to_jax(target["wide"], dtype="int64").dtype == "int64"
    half = {"torch.bfloat16": place(torch.zeros(8, 8), LAYOUTS[2])}  # converted, as copy_ does
    load(half, tmp_path)
    assert torch.equal(half["torch.bfloat16"].cpu(), wanted["torch.bfloat16"].float())


def test_shapes_and_what_is_recorded(tmp_path):
    mesh = xs.Mesh(range(8), (8,), ("x",))
    wanted = {str(shape): numbers(*shape) for shape in ((), (0, 8), (8,), (2, 3, 8))}

    def marked(t):
        spec = (None,) * (t.dim() - 1) + ("x",) if t.dim() else ()
        return xs.mark_sharding(t.to("jax"), mesh, spec)

    planner = SPMDSavePlanner()
    save({name: marked(t) * 2 + 1 for name, t in wanted.items()}, tmp_path, planner)
    assert planner._reading == {}, "a buffer is kept"
    for lay in (lambda t: t.to("jax"), marked):
        target = {name: lay(torch.ones(t.shape)) for name, t in wanted.items()}
        load(target, tmp_path)
        assert all(torch.equal(t.cpu(), wanted[name] * 2 + 1) for name, t in target.items())


def test_each_distinct_piece_is_written_once_from_its_buffer(counted):
    tensor = place(numbers(16, 8), LAYOUTS[5])  # two pieces, each on four devices
    planner = SPMDSavePlanner()
    planner.set_up_planner({"w": tensor})
    items = planner.create_local_plan().items
    assert [item.type for item in items] == [WriteItemType.SHARD] * 2
    assert [tuple(item.tensor_data.chunk.offsets) for item in items] == [(0, 0), (0, 4)]
    shards = isoshard.local_shards(tensor, framework="torch")
    for item in [*items, *items]:  # each may be asked for again
        data = planner.resolve_data(item)
        assert data.data_ptr() == shards[item.index.index].data.data_ptr()
    assert counted("gathers") == 0
    assert counted("transfers.device_to_host") == 0


def test_the_values_are_parted_into_sharded_and_others():
    state = {
        "model": {"a": place(numbers(8, 8), LAYOUTS[2]), "b": place(numbers(8, 8), LAYOUTS[7])},
        "lists": [place(numbers(8, 8), LAYOUTS[0]), 3],
    }
    for planner in (SPMDSavePlanner(), SPMDLoadPlanner()):
        planner.set_up_planner(state, None, True)
        assert set(planner.sharded_state_dict) == {"model.a", "lists.0"}
        assert set(planner.unsharded_state_dict) == {"model.b", "lists.1"}


def test_a_load_reads_what_the_pieces_need_and_no_more(tmp_path):
    pairs = [(0, 1), (5, 0), (7, 2), (2, 7)]
    save({f"w{n}": place(numbers(16, 8), LAYOUTS[n]) for n, _ in pairs}, tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    for before, after in pairs:
        target = place(torch.zeros(16, 8), LAYOUTS[after])
        planner = SPMDLoadPlanner()
        planner.set_up_planner({f"w{before}": target}, metadata, True)
        items = planner.create_local_plan().items
        assert sum(math.prod(item.lengths) for item in items) == 16 * 8
        pieces = {item.dest_index.offset for item in items}
        assert len(pieces) == len({str(shard.indices) for shard in target.local_shards})
        for item in items:
            part = planner.resolve_tensor(item)
            assert part.shape == item.lengths
            assert after == 7 or part.untyped_storage().nbytes() == 4 * 16  # no whole on the host


def test_objects_bytes_and_cpu_tensors(tmp_path):
    class_free = {"bytes": b"\x00\xff", "tuple": (1, "a"), "none": None, "list": [1, [2.5]]}
    state = {"cpu": numbers(3), "deep": {"a": [{"t": place(numbers(8, 8), LAYOUTS[0])}]}}
    save({**state, **class_free}, tmp_path)
    target = {"cpu": torch.zeros(3), "deep": {"a": [{"t": torch.zeros(8, 8, device="jax")}]}}
    target |= dict.fromkeys(class_free)
    load(target, tmp_path)
    assert same(target, {**state, **class_free})


def test_torch_s_own_planners_read_and_write_the_same_checkpoints(tmp_path):
    wanted = {"a": numbers(16, 8), "b": {"c": torch.arange(4), "d": "text"}}
    on_mesh = {"a": place(wanted["a"], LAYOUTS[2]), "b": {**wanted["b"]}}
    save(on_mesh, tmp_path / "ours")
    plain = {"a": torch.zeros(16, 8), "b": {"c": torch.zeros(4, dtype=torch.int64), "d": ""}}
    load(plain, tmp_path / "ours", dcp.DefaultLoadPlanner())
    assert same(plain, wanted)
    save({"a": on_mesh["a"]}, tmp_path / "by torch's", dcp.DefaultSavePlanner())
    plain = {"a": torch.zeros(16, 8)}
    load(plain, tmp_path / "by torch's", dcp.DefaultLoadPlanner())
    assert torch.equal(plain["a"], wanted["a"])

    save(wanted, tmp_path / "torch's", dcp.DefaultSavePlanner())
    target = {
        "a": place(torch.zeros(16, 8), LAYOUTS[3]),
        "b": {"c": torch.zeros(4).long(), "d": ""},
    }
    load(target, tmp_path / "torch's")
    assert same(target, wanted)


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
    for count in range(1, 4):
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
    with pytest.raises(
        CheckpointError, match="w: the checkpoint has only some elements of this tensor"
    ):
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


def test_not_with_equal_names_and_not_while_a_step_is_captured():
    tensor = place(numbers(8, 8), LAYOUTS[0])

    with pytest.raises(ValueError, match=r"two values of the state dict have the name 'a\.b'"):
        SPMDSavePlanner().set_up_planner({"a": {"b": 1}, "a.b": 2})

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


# --- Helpers and names ---------------------------------------------------------------------------


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
    for module, names in (
        ("manager", ["CheckpointManager"]),
        ("planners", ["SPMDLoadPlanner", "SPMDSavePlanner"]),
        ("util", ["prime_optimizer"]),
    ):
        found = importlib.import_module(f"{PACKAGE}.{module}")
        assert all(getattr(found, name) is getattr(package, name) for name in names)
    for planner in (package.SPMDLoadPlanner, package.SPMDSavePlanner):
        assert not inspect.signature(planner).parameters


STATES = [
    {},
    {"a": 1, "b": [1, 2], "c": (1, torch.ones(1)), "d": None},
    {"a": {"b": {"c": torch.ones(2)}, 3: "x"}, "empty": {}, "none": []},
    {"l": [torch.ones(1), [torch.ones(2), {"k": 1}], [1, 2], []]},
    {"groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": []}]},
    {"nested": [[1, [torch.ones(1)]], [[2]]]},
]


def test_flat_names_are_torch_s():
    optimizer = package.prime_optimizer(torch.optim.AdamW(nn.Linear(2, 2).parameters()))
    for state in (*STATES, {"optim": optimizer.state_dict()}):
        flat, paths = _helpers.flatten_state_dict(state)
        wanted, wanted_paths = torch_s_flatten(state)
        assert list(flat) == list(wanted)
        assert paths == wanted_paths
        assert all(flat[name] is wanted[name] or name.startswith("optim") for name in flat)


def test_small_helpers():
    root = {"a": [1]}
    _helpers.set_element(root, ("a", 2), "x")
    _helpers.set_element(root, ("b", 1, "c", 0), 5)
    _helpers.set_element(root, ("b", 1, "d"), 6)
    assert root == {"a": [1, None, "x"], "b": [None, {"c": [5], "d": 6}]}
    whole = torch.arange(24).reshape(4, 6)
    part = _helpers.narrow_tensor_by_index(whole, (1, 2), (2, 3))
    assert torch.equal(part, whole[1:3, 2:5])
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert _helpers.narrow_tensor_by_index(whole, (0, 0), (4, 6)) is whole
    assert _helpers._is_sharded_tensor(place(numbers(8, 8), LAYOUTS[5]))
    others = (place(numbers(8, 8), LAYOUTS[7]), numbers(8, 8).to("jax"), numbers(8, 8), "text")
    assert not any(map(_helpers._is_sharded_tensor, others))


def test_dedup_tensors_leaves_everything_to_the_first():
    first = create_default_local_save_plan({"a": torch.ones(1), "b": 1}, True)
    second = create_default_local_save_plan({"a": torch.ones(1), "c": 1}, True)
    first.items.append(first.items[0])  # as replicas are, which torch_xla then loses
    plans = _helpers.dedup_tensors([first, second, SavePlan([])])
    names = [[item.index.fqn for item in plan.items] for plan in plans]
    assert names == [["a", "b"], ["c"], []]


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


def test_priming_makes_state_and_leaves_the_rest():
    for make in OPTIMIZERS.values():
        weight = nn.Parameter(place(numbers(8, 8), LAYOUTS[2]))
        bias, frozen = nn.Parameter(numbers(8)), nn.Parameter(numbers(8), requires_grad=False)
        bias.grad = torch.ones(8)
        kept = bias.grad
        optimizer = make([weight, bias, frozen])
        assert package.prime_optimizer(optimizer) is optimizer
        assert torch.equal(weight.detach().cpu(), numbers(8, 8)) and torch.equal(bias, numbers(8))
        assert weight.grad is None and bias.grad is kept and bool((kept == 1).all())
        assert {weight, bias} <= set(optimizer.state)
        states = optimizer.state[weight].values()
        tensors = [s for s in states if isinstance(s, xs.XLAShardedTensor)]
        assert tensors
        for state in tensors:
            assert state.dim() == 0 or state.partition_spec == weight.partition_spec


def test_a_failed_priming_leaves_the_parameters():
    weight = nn.Parameter(numbers(4).to("jax"))
    optimizer = torch.optim.LBFGS([weight])
    with pytest.raises(TypeError, match="closure"):
        package.prime_optimizer(optimizer)
    assert weight.grad is None and same(weight, numbers(4))
