"""Marks that hold for gradients, trees laid out alike, barriers, linear layers, pieces."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import isoshard as iso
import isoshard.torch_bridge as bridge
from isoshard import P, ShardingError, make_mesh
from isoshard.errors import UnrepresentableError
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.spmd import optimization_barrier_
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_xla_bridge.torch_xla import _XLAC
from isoshard.torch_xla_bridge.torch_xla.distributed import spmd as xs
from isoshard.torch_xla_bridge.torch_xla.distributed.spmd import xla_sharding


@pytest.fixture
def mesh():
    return xs.Mesh(range(8), (2, 4), ("x", "y"))


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def real_spec(t: torch.Tensor):
    return iso.to_jax(t.detach()).sharding.spec


# --- mark_sharding_with_gradients ----------------------------------------------------------------


def test_a_new_tensor_and_its_gradient_are_laid_out(mesh):
    for recorded in (False, True):
        x = data(8, 8)
        t = x.to("jax").requires_grad_()
        h = t * 2 if recorded else t
        u = xs.mark_sharding_with_gradients(h, mesh, ("x", "y"))
        assert u.sharding_spec == "{devices=[2,4]0,1,2,3,4,5,6,7}" and h.sharding_spec == ""
        (g,) = torch.autograd.grad(u.pow(3).sum(), t, create_graph=True)
        bridge.sync()
        assert real_spec(u) == P("x", "y") == real_spec(g)
        g.sum().backward()  # gradients of gradients
        want = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(
            (want * 2 if recorded else want).pow(3).sum(), want, create_graph=True
        )
        grad.sum().backward()
        torch.testing.assert_close(g.detach().cpu(), grad.detach())
        torch.testing.assert_close(t.grad.cpu(), want.grad)
    u = xs.MarkShardingFunction.apply(t, mesh, ("y", None))
    assert u.partition_spec == P("y") and torch.equal(u.detach().cpu(), data(8, 8))
    assert xla_sharding.MarkShardingFunction is xs.MarkShardingFunction


# --- redistribute, placements, full_tensor -------------------------------------------------------


def test_the_other_order_is_a_strided_shard_and_back(mesh):
    t = xs.mark_sharding(data(8, 8).to("jax"), mesh, (("y", "x"), None))
    assert t.placements == (_StridedShard(0, split_factor=4), Shard(0))
    u = data(8, 8).to("jax").redistribute(mesh, t.placements)
    assert u.sharding_spec == t.sharding_spec and u.partition_spec == P(("y", "x"))
    assert torch.equal(u.cpu(), data(8, 8))
    moved = xs.xla_distribute_tensor(data(8, 8), mesh, t.placements)
    assert moved.sharding_spec == t.sharding_spec
    with pytest.raises(UnrepresentableError, match="no order of mesh axes"):
        u.redistribute(mesh, (_StridedShard(0, split_factor=3), Shard(0)))
    with pytest.raises(RuntimeError, match="redistribute needs placements"):
        u.redistribute(mesh, None)
    plain = data(3).to("jax")
    assert not hasattr(plain, "full_tensor")  # libraries take it for a DTensor by that
    with pytest.raises(RuntimeError, match="is on no mesh has no local tensors"):
        plain.to_local()


def test_redistribute_is_out_of_place_and_differentiable(mesh):
    t = xs.mark_sharding(data(8, 8).to("jax"), mesh, ("x", None)).requires_grad_()
    for async_op in (False, True):
        u = t.redistribute(mesh, [Replicate(), Shard(-1)], async_op=async_op)
        assert u is not t and u.placements == (Replicate(), Shard(1))
        assert t.placements == (Shard(0), Replicate())
    u.square().sum().backward()
    torch.testing.assert_close(t.grad.cpu(), 2 * data(8, 8))
    bridge.sync()
    assert real_spec(u) == P(None, "y") and real_spec(t) == P("x")
    t.invalidate_spec_cache()
    wide = t.redistribute(make_mesh((4, 2), ("a", "b")), [Shard(0), Shard(1)])
    assert wide.mesh_shape == (4, 2) and torch.equal(wide.detach().cpu(), data(8, 8))
    mesh = DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("x", "y"))
    t = data(8, 8).to("jax").redistribute(mesh, [Shard(0), Shard(0)])
    assert t.partition_spec == P(("x", "y"))
    assert t.redistribute(placements=[Shard(1), Replicate()]).partition_spec == P(None, "x")


# --- shard_as ------------------------------------------------------------------------------------


def test_the_second_tree_gets_the_layouts_of_the_first(mesh):
    a = {"w": xs.mark_sharding(data(8, 8).to("jax"), mesh, ("x", "y")), "n": None}
    b = {"w": (data(8, 8) + 1).to("jax"), "n": None}
    left, right = xs.shard_as(a, b)
    assert right["w"].partition_spec == left["w"].partition_spec == P("x", "y")
    assert right["n"] is left["n"] is None and b["w"].partition_spec is None
    bridge.sync()
    assert real_spec(right["w"]) == P("x", "y")
    assert torch.equal(right["w"].cpu(), data(8, 8) + 1)
    swapped, _ = xs.shard_as(b, a)
    assert swapped["w"].partition_spec == P("x", "y")


def test_both_are_differentiable_and_laid_out_inside_a_program(mesh):
    for known in (False, True):
        a, b = data(8, 8).to("jax").requires_grad_(), (data(8, 8) + 1).to("jax").requires_grad_()
        if known:
            xs.mark_sharding(a, mesh, ("x", None))
        left, right = xs.shard_as([a * 1], [b])
        (left[0] * right[0] * right[0]).sum().backward()
        torch.testing.assert_close(a.grad.cpu(), (data(8, 8) + 1).square())
        torch.testing.assert_close(b.grad.cpu(), 2 * data(8, 8) * (data(8, 8) + 1))
    assert real_spec(left[0]) == real_spec(right[0]) == P("x")


def test_no_pair_of_trees():
    for a, b, message in (
        ([1], [1, 2], "two trees of one structure"),
        (
            [None],
            [torch.ones(2)],
            r"None in both trees; corresponding leaves are None and a tensor on",
        ),
        ([3], [3], "None in both trees; corresponding leaves are 3 and 3"),
        (data(2).to("jax"), data(3).to("jax"), r"one shape, not \(2,\) and \(3,\)"),
    ):
        with pytest.raises(ShardingError, match=message):
            xs.shard_as(a, b)


# --- Barriers ------------------------------------------------------------------------------------


def recorded() -> list[str]:
    entries = [entry[0] for entry in tapes.recorder().program if isinstance(entry[0], int)]
    return [tapes.RECIPES[number].name for number in entries]


def test_a_barrier_keeps_values_and_stands_in_the_program():
    tensors = [data(4).to("jax") * n for n in (1, 2, 3)]
    optimization_barrier_([*tensors, data(2)])
    total = sum(tensors).sum()
    assert recorded().count("optimization_barrier") == 1
    torch.testing.assert_close(total.cpu(), 6 * data(4).sum())
    optimization_barrier_([])


def test_the_backward_pass_of_a_module_ends_in_a_barrier():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    model = copy.deepcopy(plain).to("jax")
    xs.apply_backward_optimization_barrier(model[1])
    bridge.sync()
    model(data(2, 8).to("jax")).sum().backward()
    assert recorded().count("optimization_barrier") == 1
    plain(data(2, 8)).sum().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad)


# --- Linear layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
def test_an_einsum_linear_is_a_linear(bias):
    torch.manual_seed(0)
    plain = torch.nn.Linear(6, 5, bias=bias)
    layer = xla_sharding.EinsumLinear(6, 5, bias=bias)
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer(data(3, 6)), plain(data(3, 6)))  # on the CPU an ordinary one
    layer.to("jax")
    for shape in ((0, 6), (3, 6), (2, 1, 3, 6)) if bias else ((6,), (2, 3, 6)):
        x = data(*shape).requires_grad_()
        t = data(*shape).to("jax").requires_grad_()
        got, want = layer(t), plain(x)
        torch.testing.assert_close(got.detach().cpu(), want.detach())
        got.square().sum().backward()
        want.square().sum().backward()
        torch.testing.assert_close(t.grad.cpu(), x.grad)
        for ours, theirs in zip(layer.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


def test_an_einsum_linear_in_autocast_and_half_precision():
    layer = xla_sharding.EinsumLinear(6, 5).to("jax")
    x = data(2, 3, 6).to("jax").requires_grad_()
    with torch.autocast("jax", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == layer.weight.grad.dtype == layer.bias.grad.dtype == torch.float32
    torch.testing.assert_close(layer.bias.grad.cpu(), torch.full((5,), 6.0))
    half = xla_sharding.EinsumLinear(6, 5).to("jax", torch.bfloat16)
    want = half(x.detach().bfloat16())
    plain = torch.nn.functional.linear(
        data(2, 3, 6).bfloat16(), half.weight.detach().cpu(), half.bias.detach().cpu()
    )
    torch.testing.assert_close(want.detach().cpu(), plain, rtol=1e-2, atol=1e-2)


def test_batch_and_sequence_stay_split_apart(mesh):
    layer = xla_sharding.EinsumLinear(16, 16, bias=False).to("jax")
    x = xs.mark_sharding(data(2, 4, 16).to("jax"), mesh, ("x", "y", None)).requires_grad_()
    y = xs.xla_patched_nn_linear_forward(layer, x)
    y.square().sum().backward()
    bridge.sync()
    assert real_spec(y) == P("x", "y") == real_spec(x.grad)


def test_patching_keeps_parameters_hooks_and_subclasses():
    class Special(torch.nn.Linear):
        pass

    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), Special(4, 4))
    ).to("jax")
    before = dict(model.named_parameters())
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append(1))
    assert xla_sharding.apply_xla_patch_to_nn_linear(model) is model
    assert type(model[0]) is type(model[1][0]) is xla_sharding.EinsumLinear
    assert type(model[1][1]) is Special
    assert all(before[name] is p for name, p in model.named_parameters())
    model(data(2, 4).to("jax"))
    assert seen == [1]
    lone = torch.nn.Linear(2, 2)
    assert type(xla_sharding.apply_xla_patch_to_nn_linear(lone)) is torch.nn.Linear


def test_no_linear():
    x, weight = data(2, 6).to("jax"), data(5, 6).to("jax")
    for arguments, message in (
        ((x, data(5, 4).to("jax")), r"shape \(2, 6\) and a weight of shape \(5, 4\) have no prod"),
        ((x, weight, data(4).to("jax")), r"a bias of shape \(4,\) does not fit \(5, 6\)"),
        ((x, data(5, 6)), "weight is on cpu"),
        ((x, weight.bfloat16()), r"torch.float32 and torch.bfloat16 differ"),
    ):
        with pytest.raises(RuntimeError, match=message):
            xs.XLAPatchedLinear.apply(*arguments)


# --- Tensors made of pieces, and more of torch_xla's extension -----------------------------------


MESH = xs.Mesh(range(8), (2, 4), ("x", "y"))
ROW = xs.Mesh(range(8), (8,))
made_of = _XLAC._global_tensor_from_cpu_shards


def test_pieces_make_the_tensor_they_were_cut_from():
    whole = torch.arange(16 * 8, dtype=torch.int64).reshape(16, 8) << 33
    for spec in (("x", "y"), ("y", "x"), (None, "x"), (("x", "y"), None)):
        laid = xs.mark_sharding(whole.to("jax"), MESH, spec)
        pieces = [shard.data for shard in laid.local_shards]
        made = made_of(pieces, MESH.get_op_sharding(spec))
        assert torch.equal(made.cpu(), whole) and made.dtype == torch.int64
        assert made.sharding_spec == laid.sharding_spec
    mesh = xs.Mesh(np.arange(8)[::-1], (8,), ("x",))  # in an order of one's own
    pieces = [torch.tensor([float(n)]) for n in range(8)]
    made = made_of(pieces, mesh.get_op_sharding(("x",)))
    assert made.tolist() == [7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    for shape in (None, (4,)):  # copies
        made = made_of([torch.arange(4)] * 8, ROW.get_op_sharding((None,)), shape)
        assert made.tolist() == [0, 1, 2, 3] and made.sharding_spec == "{replicated}"


@pytest.mark.filterwarnings("ignore:.*Its buffers are replicated along such axes:UserWarning")
def test_filling_at_the_end_is_left_out_and_what_pieces_do_not_make_is_refused():
    pieces, row = list(torch.arange(64).split(8)), ROW.get_op_sharding((0,))
    for size in (64, 63, 57):
        made = made_of(pieces, row, torch.Size((size,)))
        assert torch.equal(made.cpu(), torch.arange(size))
        assert made.sharding_spec == "{devices=[8]0,1,2,3,4,5,6,7}"
    for size in ((65,), (56,), (1,), (8, 8)):
        with pytest.raises(RuntimeError, match=r"has no shards of shape \(8,\)") as caught:
            made_of(pieces, row, torch.Size(size))
        assert isinstance(caught.value, ShardingError)
        assert "one of shape (64,)" in str(caught.value)
    seven = [torch.arange(8)] * 7
    for wrong in (seven, [*seven, torch.arange(7)], [*seven, torch.arange(8.0)]):
        with pytest.raises(RuntimeError, match="pass one for each, all of one shape and dtype"):
            made_of(wrong, row)
    with pytest.raises(RuntimeError, match="an entry for each of its axes"):
        made_of([torch.ones(1, 1)] * 8, row)


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


def test_from_the_whole_to_pieces_and_back():
    for spec in (("x", "y"), (None, "y"), (None, None)):
        whole = torch.randn(8, 8)
        laid = xs.mark_sharding(whole.to("jax"), MESH, spec).requires_grad_()
        piece = _XLAC._spmd_full_to_shard_shape(laid)
        assert isinstance(piece, ManualTensor)
        assert _XLAC._get_xla_sharding_spec(piece) == "{manual}"
        sharding = MESH.get_op_sharding(spec)
        joined = _XLAC._spmd_shard_to_full_shape(piece * 2, sharding, whole.shape, torch.float32)
        assert torch.equal(joined.cpu(), whole * 2) and joined.sharding_spec == sharding.text
        joined.sum().backward()
        assert torch.equal(laid.grad.cpu(), torch.full((8, 8), 2.0))


def test_what_is_no_piece_and_no_marked_tensor():
    t = torch.zeros(8, 8).to("jax")
    sharding = MESH.get_op_sharding((None, None))
    for unmarked in (t, torch.zeros(8, 8)):
        with pytest.raises(RuntimeError, match="mark it first"):
            _XLAC._spmd_full_to_shard_shape(unmarked)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="in no manual region"):
            _XLAC._spmd_shard_to_full_shape(t, sharding, t.shape, t.dtype)
        xs.mark_sharding(t, MESH, ("x", None))


def test_what_is_behind_a_tensor():
    x = xs.mark_sharding(torch.ones(1, 8).to("jax"), MESH, (None, "y"))
    bridge.sync()
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
    bridge.sync()
    assert "aten::div" not in _XLAC._get_xla_tensor_debug_info(y)
    with pytest.raises(RuntimeError, match="has no recorded operations and no buffers"):
        _XLAC._get_xla_tensor_debug_info(torch.ones(2))


def test_numbers_of_programs():
    x = xs.mark_sharding(torch.ones(8).to("jax"), ROW, (0,))
    y = torch.ones(8).to("jax")
    bridge.sync()
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
