"""Tensors made of pieces, shapes of pieces and wholes, and more of torch_xla's extension."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import isoshard.torch_bridge as xs
from isoshard import P, ShardingError, UnrepresentableError
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.torch_xla import _XLAC

MESH = xs.Mesh(range(8), (2, 4), ("x", "y"))
ROW = xs.Mesh(range(8), (8,))
made_of = _XLAC._global_tensor_from_cpu_shards


@pytest.mark.parametrize(
    "spec", [("x", "y"), ("y", "x"), (None, "x"), ("y", None), (("x", "y"), None)]
)
def test_pieces_make_the_tensor_they_were_cut_from(spec):
    whole = torch.arange(16 * 8, dtype=torch.int64).reshape(16, 8) << 33
    laid = xs.mark_sharding(whole.to("jax"), MESH, spec)
    pieces = [shard.data for shard in laid.local_shards]
    made = made_of(pieces, MESH.get_op_sharding(spec))
    assert torch.equal(made.cpu(), whole) and made.dtype == torch.int64
    assert made.sharding_spec == laid.sharding_spec


def test_a_device_order_of_ones_own():
    mesh = xs.Mesh(np.arange(8)[::-1], (8,), ("x",))
    pieces = [torch.tensor([float(n)]) for n in range(8)]
    made = made_of(pieces, mesh.get_op_sharding(("x",)))
    assert made.tolist() == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]


@pytest.mark.parametrize("shape", [None, (4,)])
def test_copies(shape):
    made = made_of([torch.arange(4)] * 8, ROW.get_op_sharding((None,)), shape)
    assert made.tolist() == [0, 1, 2, 3] and made.sharding_spec == "{replicated}"


@pytest.mark.filterwarnings("ignore:.*Its buffers stay whole:UserWarning")
@pytest.mark.parametrize("size", [64, 63, 57])
def test_filling_at_the_end_is_left_out(size):
    pieces = list(torch.arange(64).split(8))
    made = made_of(pieces, ROW.get_op_sharding((0,)), torch.Size((size,)))
    assert torch.equal(made.cpu(), torch.arange(size))
    assert made.sharding_spec == "{devices=[8]0,1,2,3,4,5,6,7}"


@pytest.mark.parametrize("size", [(65,), (56,), (1,), (8, 8)])
def test_a_shape_that_pieces_do_not_make(size):
    pieces = list(torch.arange(64).split(8))
    with pytest.raises(RuntimeError, match=r"does not lie in pieces of shape \(8,\)") as caught:
        made_of(pieces, ROW.get_op_sharding((0,)), torch.Size(size))
    assert isinstance(caught.value, ShardingError) and "one of shape (64,)" in str(caught.value)


@pytest.mark.parametrize(
    "pieces",
    [
        [torch.arange(8)] * 7,
        [torch.arange(8)] * 7 + [torch.arange(7)],
        [torch.arange(8)] * 7 + [torch.arange(8.0)],
    ],
)
def test_pieces_that_are_not_alike(pieces):
    with pytest.raises(RuntimeError, match="give one for each, all alike"):
        made_of(pieces, ROW.get_op_sharding((0,)))


def test_a_layout_of_another_rank():
    with pytest.raises(RuntimeError, match="an entry for each of its axes"):
        made_of([torch.ones(1, 1)] * 8, ROW.get_op_sharding((0,)))


def test_marks_without_a_mesh():
    t = torch.ones(8, 8).to("jax")
    _XLAC._xla_mark_sharding(t, MESH.get_op_sharding((None, "y")))
    assert t.sharding_spec == MESH.get_op_sharding((None, "y")).text
    _XLAC._xla_annotate_custom_sharding(t, MESH.get_op_sharding(("x", None)))
    assert t.sharding_spec == MESH.get_op_sharding(("x", None)).text
    _XLAC._xla_clear_sharding(t)
    assert t.sharding_spec == "" and torch.equal(t.cpu(), torch.ones(8, 8))


def test_a_spec_is_found_over_another_mesh():
    sharding = MESH.get_op_sharding(("y", "x"))
    flat = xs.Mesh(range(8), (8,)).get_jax_mesh()
    with pytest.raises(UnrepresentableError):
        sharding.spec_over(flat, 2)
    assert sharding.spec_over(MESH.get_jax_mesh(), 2) == P("y", "x")
    half = xs.Mesh(range(4), (2, 2), ("x", "y")).get_jax_mesh()
    with pytest.raises(UnrepresentableError, match="other devices"):
        sharding.spec_over(half, 2)


@pytest.mark.parametrize("spec", [("x", "y"), (None, "y"), ("x", None), (None, None)])
def test_from_the_whole_to_pieces_and_back(spec):
    whole = torch.randn(8, 8)
    laid = xs.mark_sharding(whole.to("jax"), MESH, spec).requires_grad_()
    piece = _XLAC._spmd_full_to_shard_shape(laid)
    assert isinstance(piece, ManualTensor) and _XLAC._get_xla_sharding_spec(piece) == "{manual}"
    sharding = MESH.get_op_sharding(spec)
    joined = _XLAC._spmd_shard_to_full_shape(piece * 2, sharding, whole.shape, torch.float32)
    assert torch.equal(joined.cpu(), whole * 2) and joined.sharding_spec == sharding.text
    joined.sum().backward()
    assert torch.equal(laid.grad.cpu(), torch.full((8, 8), 2.0))


def test_what_is_no_piece_and_no_marked_tensor():
    t = torch.zeros(8, 8).to("jax")
    sharding = MESH.get_op_sharding((None, None))
    with pytest.raises(RuntimeError, match="mark it first"):
        _XLAC._spmd_full_to_shard_shape(t)
    with pytest.raises(RuntimeError, match="mark it first"):
        _XLAC._spmd_full_to_shard_shape(torch.zeros(8, 8))
    with pytest.raises(RuntimeError, match="in no manual region"):
        _XLAC._spmd_shard_to_full_shape(t, sharding, t.shape, t.dtype)
    xs.mark_sharding(t, MESH, ("x", None))
    with pytest.raises(RuntimeError, match="in no manual region"):
        _XLAC._spmd_shard_to_full_shape(t, sharding, t.shape, t.dtype)


def test_what_is_behind_a_tensor():
    x = xs.mark_sharding(torch.ones(1, 8).to("jax"), MESH, (None, "y"))
    xs.sync()
    info = _XLAC._get_xla_tensor_debug_info(x)
    for part in (
        "Device: SPMD:0",
        "IR: xla::device_data",
        "XLAShardedData",
        "OpSharding: {devices=[",
    ):
        assert part in info
    assert "NumShards: 8" in info and "Data Shape: f32[1,8]" in info
    y = x / 2
    assert "aten::div" in _XLAC._get_xla_tensor_debug_info(y)
    assert "XLAData: None" in _XLAC._get_xla_tensor_debug_info(y)
    xs.sync()
    assert "aten::div" not in _XLAC._get_xla_tensor_debug_info(y)
    with pytest.raises(RuntimeError, match="has no operations and no buffers"):
        _XLAC._get_xla_tensor_debug_info(torch.ones(2))


def test_numbers_of_programs():
    x = xs.mark_sharding(torch.ones(8).to("jax"), ROW, (0,))
    y = torch.ones(8).to("jax")
    xs.sync()
    hashes = [_XLAC._get_graph_hash([one]) for one in (x + 1, y + 1, y * 1, y + 1)]
    assert hashes[1] == hashes[3] and len(set(hashes)) == 3


def test_small_questions(monkeypatch):
    monkeypatch.delenv("XLA_AUTO_SPMD", raising=False)
    assert _XLAC._xla_get_auto_sharding() is False
    monkeypatch.setenv("XLA_AUTO_SPMD", "1")
    assert _XLAC._xla_get_auto_sharding() is True
    assert _XLAC._xla_num_runtime_devices() == 8
    _XLAC._init_computation_client()
    _XLAC._ensure_xla_coordinator_initialized(0, 1, "localhost")
    with pytest.raises(RuntimeError, match="init_distributed"):
        _XLAC._ensure_xla_coordinator_initialized(0, 2, "localhost")
    _XLAC._xla_set_enable_alias_with_buffer_donor_config(False)
    assert _XLAC._xla_get_enable_alias_with_buffer_donor_config() is True
    a = torch.ones(4, device="jax")
    assert _XLAC._xla_get_tensor_id(a) == _XLAC._xla_get_tensor_id(a[:2])
    assert _XLAC._xla_get_tensor_id(a) != _XLAC._xla_get_tensor_id(a + 1)
    spec = xs.ShardingSpec(ROW, (0,)).xla_spec(torch.ones(8))
    marked, plain = _XLAC._xla_tensors_from_aten([torch.ones(8)] * 2, ["jax", "jax"], [spec, None])
    assert marked.sharding_spec and not plain.sharding_spec
