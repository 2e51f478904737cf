"""Pieces are snapshots, may be loaded back, and know their filling."""

from __future__ import annotations

import warnings

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as bridge
from isoshard import P
from isoshard.torch_bridge.spmd import UnevenWarning
from isoshard.torch_bridge.torch_xla.distributed import spmd as xs


@pytest.fixture
def mesh():
    return xs.Mesh(range(8), (2, 4), ("x", "y"))


def marked(x: torch.Tensor, mesh: xs.Mesh, spec: tuple) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnevenWarning)
        return xs.mark_sharding(x.to("jax"), mesh, spec)


def test_a_piece_is_four_things():
    shard = xs.XLAShard(torch.arange(4.0), [slice(4, 7, 1)], "CPU:1", 0)
    assert (shard.rank, shard.unpadded_data.tolist()) == (1, [0, 1, 2])
    shard.unpadded_data = torch.ones(3)
    assert shard.data.tolist() == [1, 1, 1, 3]
    whole = xs.XLAShard(torch.arange(2.0), ..., "CPU:0", 0)
    whole.unpadded_data = torch.zeros(2)
    assert whole.unpadded_data.tolist() == [0, 0]


def test_pieces_are_snapshots(mesh):
    t = marked(torch.arange(16.0), mesh, (("x", "y"),))
    before = t.local_shards
    t.mul_(10)
    bridge.sync()
    assert [s.data.tolist() for s in before] == [[2 * n, 2 * n + 1] for n in range(8)]
    for shard in t.local_shards:
        shard.data.zero_()
    assert t.tolist() == [10.0 * n for n in range(16)]


def test_data_have_pieces_at_once_and_values_after_execution(mesh, counted):
    t = marked(torch.arange(8.0), mesh, ("y",))
    assert [s.data.tolist() for s in t.local_shards][:4] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert counted("executions") == 0
    u = t + 1
    assert u.local_shards is None
    bridge.sync()
    assert u.local_shards[1].data.tolist() == [3, 4]
    drawn = torch.randn(16, 3, device="jax")
    made = marked(drawn * 2, mesh, ("y", None))
    assert counted("executions") == 1
    assert [s.data.shape for s in made.local_shards] == [(4, 3)] * 8
    assert counted("executions") == 2
    whole = made.cpu()
    for shard in made.local_shards:
        assert torch.equal(shard.data, whole[tuple(shard.indices)])


def test_a_view_has_pieces(mesh):
    t = marked(torch.arange(64.0).reshape(8, 8), mesh, ("x", "y"))
    bridge.sync()
    for shard in t.t().local_shards:
        where = ... if shard.indices is ... else tuple(shard.indices)
        assert torch.equal(shard.data, torch.arange(64.0).reshape(8, 8).t()[where])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(
    ("shape", "spec"), [((8, 4), ("x", "y")), ((8, 4), (None, "x")), ((7, 3), ("y", "x"))]
)
def test_pieces_keep_the_dtype_and_can_be_loaded(dtype, shape, spec, mesh):
    x = (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    t = marked(x, mesh, spec)
    shards = t.local_shards
    assert {shard.data.dtype for shard in shards} == {dtype}
    for shard in shards:
        shard.unpadded_data = ~shard.unpadded_data if dtype == torch.bool else -shard.unpadded_data
    text = t.sharding_spec
    t.load_local_shards_(shards[::-1])  # in any order
    want = ~x if dtype == torch.bool else -x
    assert torch.equal(t.cpu(), want) and t.sharding_spec == text
    assert iso.to_jax(t).sharding.spec == t.named_sharding.spec
    assert [s.data.tolist() for s in t.local_shards] == [s.data.tolist() for s in shards]


def test_a_parameter_is_loaded_in_place(mesh):
    layer = torch.nn.Linear(4, 8).to("jax")
    xs.mark_sharding(layer.weight, mesh, ("y", None))
    shards = layer.weight.local_shards
    for shard in shards:
        shard.data.fill_(1)
    with torch.no_grad():
        layer.weight.load_local_shards_(shards)
    assert layer.weight.sum() == 32 and isinstance(layer.weight, torch.nn.Parameter)


def test_what_cannot_be_loaded(mesh):
    t = marked(torch.arange(8.0), mesh, (("x", "y"),))
    shards = t.local_shards
    with pytest.raises(RuntimeError, match=r"7 pieces.*8 devices.*one for each"):
        t.load_local_shards_(shards[:-1])
    with pytest.raises(RuntimeError, match="8 pieces"):
        t.load_local_shards_([*shards[:-1], shards[0]])
    wide = [xs.XLAShard(torch.ones(2), s.indices, s.shard_device, 0) for s in shards]
    with pytest.raises(RuntimeError, match=r"has the shape \(1,\).*have \[\(2,\)\]"):
        t.load_local_shards_(wide)
    whole = marked(torch.arange(8.0), mesh, (None,))
    with pytest.raises(RuntimeError, match="whole on every device"):
        whole.load_local_shards_(whole.local_shards)
    with pytest.raises(RuntimeError, match=r"on no mesh.*mark it first"):
        torch.ones(8).to("jax").load_local_shards_(shards)
    assert t.tolist() == list(range(8))


def test_pieces_are_no_constant_of_a_compiled_step(mesh):
    t = marked(torch.arange(8.0), mesh, ("x",))

    @bridge.compile
    def step(t):
        return t + t.local_shards[0].data.sum().item()

    with pytest.raises(bridge.CaptureError, match="value of a tensor"):
        step(t)


def test_a_tensor_on_one_device_has_one_piece():
    t = torch.arange(4.0).to("jax")
    (shard,) = t.local_shards
    assert (shard.indices, shard.shard_device, shard.replica_id) == (..., "CPU:0", 0)
    assert shard.data.tolist() == [0, 1, 2, 3]


def test_a_tensor_from_jax_has_pieces(mesh):
    t = iso.shard(torch.arange(16.0).reshape(8, 2), mesh.get_jax_mesh(), P("y"))
    assert [s.replica_id for s in t.local_shards] == [0] * 4 + [1] * 4
