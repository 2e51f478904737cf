"""Tensors in blocks of unequal sizes: both formats, modules, optimizers, planners."""

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import ShardingError
from isoshard.core.layout.uneven import UnevenArray
from isoshard.torch_bridge.checkpoints import CheckpointManager, SPMDLoadPlanner, SPMDSavePlanner
from isoshard.torch_bridge.checkpoints.arrival import Arrival
from isoshard.torch_bridge.loops.stacked import StackedLayers

pytestmark = [pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

LINE = iso.make_mesh((4,), ("x",), devices=jax.devices()[:4])
GRID = iso.make_mesh((2, 4), ("x", "y"))
LAYOUTS = {
    "cpu": None,
    "even": (iso.make_mesh((3, 2), ("x", "y"), devices=jax.devices()[:6]), P("x"), None),
    "chunk": (LINE, P("x"), None),
    "empty": (LINE, P("x"), {0: (0, 3, 9, 6)}),
    "both": (GRID, P("y", "x"), {0: (7, 0, 1, 10), 1: (4, 3)}),
    "replicated": (GRID, P("x", None), {0: (13, 5)}),
}


def numbers(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(18, 7, generator=generator).mul(100).to(dtype)


def laid(values, name):
    if LAYOUTS[name] is None:
        return values.clone()
    mesh, spec, sizes = LAYOUTS[name]
    return iso.shard(values, mesh, spec, uneven="pad", sizes=sizes)


def sizes_of(t):
    return t.block_sizes if t.device.type == "jax" else None


def padding(t):
    u = iso.to_jax(t)
    return np.asarray(u.array)[~np.asarray(u.mask())] if isinstance(u, UnevenArray) else np.zeros(0)


@pytest.mark.parametrize("format", ["zarr", "torch"])
def test_from_any_split_to_any_other(tmp_path, format, counted):
    values, names = numbers(), list(LAYOUTS)
    likes = {name: laid(torch.full_like(values, 7), name) for name in names}
    state = {name: laid(values, "empty") for name in names}
    for _ in range(2):
        gathers = counted("gathers")
        iso.save(tmp_path, state, format=format)
        found = iso.restore(tmp_path, likes)
        assert counted("gathers") == gathers
        for name in names:
            assert torch.equal(found[name].cpu(), values), name
            assert sizes_of(found[name]) == sizes_of(likes[name])
            assert not padding(found[name]).any()
        state = dict(zip(names[1:] + names[:1], found.values(), strict=True))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)
def test_logical_dtypes_and_the_other_framework(tmp_path, dtype):
    values = numbers(dtype)
    iso.save(tmp_path, {"t": laid(values, "both")})
    found = iso.restore(tmp_path, {"t": laid(torch.zeros_like(values), "chunk")})["t"]
    assert found.dtype == dtype and torch.equal(found.cpu(), values)
    like = iso.to_jax(laid(torch.zeros_like(values), "replicated"))
    array = iso.restore(tmp_path, {"t": like})["t"]
    assert isinstance(array, UnevenArray) and array.sizes == ((13, 5), None)
    assert torch.equal(iso.to_torch(array).cpu().to(dtype), values)


class Field(torch.nn.Module):
    """A parameter and a buffer over a field, and a layer."""

    def __init__(self):
        super().__init__()
        self.gain = torch.nn.Parameter(numbers())
        self.register_buffer("mean", numbers()[:, 0].clone())
        self.head = torch.nn.Linear(7, 3)

    def forward(self):
        return self.head(self.gain + self.mean[:, None]).square().mean()


def on_mesh(gain, mean):
    torch.manual_seed(0)
    field = Field().to("jax")
    xs.mark_sharding(field.gain, LINE, ("x", None), sizes={0: gain})
    xs.mark_sharding(field.mean, LINE, ("x",), sizes={0: mean})
    return field


def step(field, optimizer):
    optimizer.zero_grad()
    loss = field()
    loss.backward()
    optimizer.step()
    if loss.device.type == "jax":
        xs.sync()
    return loss.item()


def test_a_module_and_its_optimizer(tmp_path, counted):
    field = on_mesh((5, 2, 7, 4), (0, 3, 9, 6))
    optimizer = torch.optim.AdamW(field.named_parameters(), lr=1e-2)
    step(field, optimizer)
    gathers = counted("gathers")
    iso.save(tmp_path, {"model": field, "optimizer": optimizer, "state": field.state_dict()})
    assert counted("gathers") == gathers
    expected = step(field, optimizer)

    same = on_mesh((5, 2, 7, 4), (0, 3, 9, 6))
    gain = same.gain
    fresh = torch.optim.AdamW(same.named_parameters(), lr=1.0)
    iso.restore(tmp_path, {"model": same, "optimizer": fresh}, partial=True)
    assert counted("gathers") == gathers
    assert same.gain is gain and gain.block_sizes == ((5, 2, 7, 4), None)
    assert same.mean.block_sizes == ((0, 3, 9, 6),)
    assert fresh.state[gain]["exp_avg"].block_sizes == gain.block_sizes
    assert not padding(same.mean).any()
    assert step(same, fresh) == expected

    other, alone = on_mesh((1, 1, 15, 1), (18, 0, 0, 0)), Field()
    for model in (other, alone):
        fresh = torch.optim.AdamW(model.named_parameters(), lr=1.0)
        iso.restore(tmp_path, {"model": model, "optimizer": fresh}, partial=True)
        assert step(model, fresh) == pytest.approx(expected, rel=1e-5)
    assert other.gain.block_sizes == ((1, 1, 15, 1), None)

    found = iso.restore(tmp_path, {"state": alone.state_dict()}, partial=True)["state"]
    alone.load_state_dict(found)
    moved = Field()
    plan = iso.Plan({"*gain": P(None, "x")}, default=P())
    two = iso.make_mesh((7,), ("x",), devices=jax.devices()[:7])
    iso.restore(tmp_path, {"model": moved}, mesh=two, plan=plan, partial=True)
    assert moved.gain.partition_spec == P(None, "x")
    assert torch.equal(moved.mean.cpu(), field.mean.cpu())


def test_onto_another_mesh_sizes_stay_where_there_are_as_many_blocks(tmp_path):
    iso.save(tmp_path, {"t": laid(numbers(), "empty")})
    like = {"t": laid(torch.zeros(18, 7), "empty")}
    mesh = iso.make_mesh((4, 2), ("x", "y"))
    found = iso.restore(tmp_path, like, mesh=mesh)["t"]
    assert found.block_sizes == ((0, 3, 9, 6), None) and found.mesh == mesh
    mesh = iso.make_mesh((8,), ("x",))
    found = iso.restore(tmp_path, like, mesh=mesh)["t"]
    assert found.block_sizes == ((3, 3, 3, 3, 3, 3, 0, 0), None)
    found = iso.restore(tmp_path, like, mesh=iso.make_mesh((2, 4), ("x", "y")))["t"]
    assert found.block_sizes is None and found.partition_spec == P("x")
    found = iso.restore(tmp_path, like, mesh=mesh, plan=P(None, "x"))["t"]
    assert found.block_sizes == (None, (1, 1, 1, 1, 1, 1, 1, 0))
    assert torch.equal(found.cpu(), numbers())


@pytest.mark.parametrize("before", ["cpu", "empty", "both"])
def test_planners(tmp_path, before, counted):
    values = numbers()
    gathers = counted("gathers")
    writer = dcp.FileSystemWriter(tmp_path)
    dcp.save({"w": laid(values, before)}, storage_writer=writer, planner=SPMDSavePlanner())
    reader = dcp.FileSystemReader(tmp_path)
    known = reader.read_metadata().state_dict_metadata["w"]
    assert isinstance(known, TensorStorageMetadata) and known.size == values.shape
    assert sum(chunk.sizes.numel() for chunk in known.chunks) == values.numel()
    bytes_written = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    assert bytes_written < values.nbytes + 2500 * len(known.chunks)  # no padding
    targets = {name: laid(torch.full_like(values, 7), name) for name in LAYOUTS}
    for name, target in targets.items():
        dcp.load({"w": target}, storage_reader=reader, planner=SPMDLoadPlanner())
        assert sizes_of(target) == sizes_of(laid(values, name))
    assert counted("gathers") == gathers
    for target in targets.values():
        assert torch.equal(target.cpu(), values) and not padding(target).any()
    plain = {"w": torch.zeros_like(values)}
    dcp.load(plain, storage_reader=reader)  # torch's own planner
    assert torch.equal(plain["w"], values)


def test_the_manager_saves_beside_what_follows(tmp_path):
    t = laid(numbers(), "both")
    with CheckpointManager(tmp_path, 1) as manager:
        manager.save_async(1, {"t": t, "n": 3})
        t.mul_(0)
        xs.sync()
        manager.join()
        state = {"t": laid(torch.zeros(18, 7), "chunk"), "n": 0}
        manager.restore(1, state)
    assert torch.equal(state["t"].cpu(), numbers()) and state["n"] == 3
    iso.save(tmp_path / "iso", {"t": state["t"]}, asynchronous=True).wait()
    like = {"t": laid(torch.zeros(18, 7), "even")}
    assert torch.equal(iso.restore(tmp_path / "iso", like)["t"].cpu(), numbers())


def test_a_module_moves_with_its_gradients(tmp_path):
    field = on_mesh((5, 2, 7, 4), (0, 3, 9, 6))
    optimizer = torch.optim.SGD(field.named_parameters(), lr=1e-2)
    step(field, optimizer)
    iso.save(tmp_path, field)
    gain, gradient = field.gain, field.gain.grad.cpu()
    mesh = iso.make_mesh((8,), ("x",))
    iso.restore(tmp_path, field, mesh=mesh)
    chunks = ((3, 3, 3, 3, 3, 3, 0, 0), None)
    assert field.gain is gain and gain.block_sizes == gain.grad.block_sizes == chunks
    assert torch.equal(gain.grad.cpu(), gradient) and gain.mesh == mesh
    step(field, optimizer)
    assert gain.block_sizes == chunks


def test_stacked_layers(tmp_path):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(7, 18) for _ in range(3)]
    iso.save(tmp_path, torch.nn.ModuleList(layers))
    stacked = StackedLayers([torch.nn.Linear(7, 18) for _ in range(3)]).to("jax")
    xs.mark_sharding(stacked.layers.weight, LINE, (None, "x", None), sizes={1: (5, 2, 7, 4)})
    iso.restore(tmp_path, stacked)
    assert stacked.layers.weight.block_sizes == (None, (5, 2, 7, 4), None)
    for number, layer in enumerate(layers):
        assert torch.equal(stacked.layers.weight[number].cpu(), layer.weight)
    iso.save(tmp_path, stacked, step=1)
    plain = torch.nn.ModuleList([torch.nn.Linear(7, 18) for _ in range(3)])
    iso.restore(tmp_path, plain, step=1)
    assert torch.equal(plain[2].weight, layers[2].weight)
    with pytest.raises(ShardingError, match="has stacked layers, which are sharded together"):
        iso.restore(tmp_path, stacked, mesh=iso.make_mesh((8,), ("x",)), step=1)


def test_where_all_blocks_are_empty_nothing_is_read():
    """As in a process that has none of the rows: no read comes, and the tensor is written."""
    sharding = jax.sharding.NamedSharding(LINE, P("x"))
    padded = jax.device_put(np.full(8, np.nan, np.float32), sharding)
    t = iso.to_torch(UnevenArray(padded, (0,), ((0, 0, 0, 0),)))
    arrival = Arrival("t", t)
    assert arrival.chunks == [] and arrival.done
    arrival.expect([])
    assert t.block_sizes == ((0, 0, 0, 0),) and (padding(t) == 0).all()
