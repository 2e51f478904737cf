"""Marks that hold for gradients, trees laid out alike, barriers, and linear layers by einsum."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import isoshard as iso
import isoshard.torch_bridge as bridge
from isoshard import P, ShardingError, UnrepresentableError, make_mesh
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.spmd import optimization_barrier_
from isoshard.torch_bridge.torch_xla.distributed import spmd as xs
from isoshard.torch_bridge.torch_xla.distributed.spmd import xla_sharding


@pytest.fixture
def mesh():
    return xs.Mesh(range(8), (2, 4), ("x", "y"))


def data(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def real_spec(t: torch.Tensor):
    return iso.to_jax(t.detach()).sharding.spec


# --- mark_sharding_with_gradients ----------------------------------------------------------------


@pytest.mark.parametrize("recorded", [False, True])
def test_a_new_tensor_and_its_gradient_are_laid_out(recorded, mesh):
    x = data(8, 8)
    t = x.to("jax").requires_grad_()
    h = t * 2 if recorded else t
    u = xs.mark_sharding_with_gradients(h, mesh, ("x", "y"))
    assert u.sharding_spec == "{devices=[2,4]0,1,2,3,4,5,6,7}" and h.sharding_spec == ""
    u.pow(3).sum().backward()
    bridge.sync()
    assert real_spec(u) == P("x", "y") == real_spec(t.grad)
    want = x.clone().requires_grad_()
    (want * 2 if recorded else want).pow(3).sum().backward()
    torch.testing.assert_close(t.grad.cpu(), want.grad)


def test_it_is_the_function_of_the_same_name(mesh):
    t = data(8, 8).to("jax")
    u = xs.MarkShardingFunction.apply(t, mesh, ("y", None))
    assert u.partition_spec == P("y") and torch.equal(u.cpu(), data(8, 8))
    assert xla_sharding.MarkShardingFunction is xs.MarkShardingFunction


def test_gradients_of_gradients(mesh):
    t = data(8).to("jax").requires_grad_()
    u = xs.mark_sharding_with_gradients(t, mesh, ("x",))
    (g,) = torch.autograd.grad(u.pow(3).sum(), t, create_graph=True)
    g.sum().backward()
    torch.testing.assert_close(t.grad.cpu(), 6 * data(8))


def test_under_compile(mesh):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    model = copy.deepcopy(plain).to("jax")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]

    def make(m, optimizer, mark):
        def step(x):
            optimizer.zero_grad()
            h = m[0](x)
            if mark:
                h = xs.mark_sharding_with_gradients(h, mesh, ("x", "y"))
            loss = m[2](m[1](h)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    step = bridge.compile(make(model, optimizers[1], True))
    want = make(plain, optimizers[0], False)
    x = data(8, 8)
    for _ in range(4):
        torch.testing.assert_close(step(x.to("jax")).cpu(), want(x))
    for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.detach().cpu(), expected.detach())


# --- redistribute, placements, full_tensor -------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "placements"),
    [
        ((0, 1), (Shard(0), Shard(1))),
        (("x", "y"), (Shard(0), Shard(1))),
        (("y", "x"), (Shard(1), Shard(0))),
        ((("x", "y"), None), (Shard(0), Shard(0))),
        ((None, (0, 1)), (Shard(1), Shard(1))),
        (("y", None), (Replicate(), Shard(0))),
        ((None, None), (Replicate(), Replicate())),
    ],
)
def test_placements_of_every_spelling_and_back(spec, placements, mesh):
    t = xs.mark_sharding(data(8, 8).to("jax"), mesh, spec)
    assert t.placements == placements
    u = data(8, 8).to("jax").redistribute(mesh, placements)
    assert u.sharding_spec == t.sharding_spec and u.placements == placements
    assert torch.equal(u.cpu(), data(8, 8))


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


def test_redistribute_takes_a_device_mesh_or_its_own():
    from torch.distributed.device_mesh import DeviceMesh

    mesh = DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("x", "y"))
    t = data(8, 8).to("jax").redistribute(mesh, [Shard(0), Shard(0)])
    assert t.partition_spec == P(("x", "y"))
    assert t.redistribute(placements=[Shard(1), Replicate()]).partition_spec == P(None, "x")


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        ([Shard(0)], ValueError, r"1 placements .* has 2 dimensions"),
        ([Shard(0)] * 3, ValueError, r"3 placements .* has 2 dimensions"),
        ([Shard(2), Replicate()], IndexError, "a tensor of rank 2 has no axis 2"),
        ([Partial(), Replicate()], NotImplementedError, r"sums over devices are taken already"),
        (None, RuntimeError, "redistribute needs placements"),
    ],
)
def test_no_placements(placements, error, message, mesh):
    with pytest.raises(error, match=message):
        data(8, 8).to("jax").redistribute(mesh, placements)


def test_a_full_tensor_is_whole_everywhere(mesh):
    t = xs.mark_sharding(data(8, 8).to("jax"), mesh, ("x", "y")).requires_grad_()
    whole = t.full_tensor()
    assert whole.sharding_spec == "{replicated}" and t.partition_spec == P("x", "y")
    whole.square().sum().backward()
    torch.testing.assert_close(t.grad.cpu(), 2 * data(8, 8))
    plain = data(3).to("jax")
    assert not hasattr(plain, "full_tensor")  # libraries take it for a DTensor by that
    with pytest.raises(RuntimeError, match="lies on no mesh has no local pieces"):
        plain.to_local()


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


def test_values_inside_a_program_are_laid_out_alike(mesh):
    a = xs.mark_sharding(data(8, 8).to("jax"), mesh, ("x", "y")) + 1
    b = data(8, 8).to("jax") * 2
    left, right = xs.shard_as([a], [b])
    bridge.sync()
    assert real_spec(left[0]) == real_spec(right[0]) == P("x", "y")
    assert torch.equal(right[0].cpu(), data(8, 8) * 2)


@pytest.mark.parametrize("known", [False, True])
def test_both_are_differentiable(known, mesh):
    a, b = data(8, 8).to("jax").requires_grad_(), (data(8, 8) + 1).to("jax").requires_grad_()
    if known:
        xs.mark_sharding(a, mesh, ("x", None))
    left, right = xs.shard_as(a, b)
    (left * right * right).sum().backward()
    torch.testing.assert_close(a.grad.cpu(), (data(8, 8) + 1).square())
    torch.testing.assert_close(b.grad.cpu(), 2 * data(8, 8) * (data(8, 8) + 1))


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1], [1, 2], "two trees of one structure"),
        ([None], [torch.ones(2)], r"None in both places; corresponding are None and a tensor on"),
        ([3], [3], "None in both places; corresponding are 3 and 3"),
    ],
)
def test_no_pair_of_trees(a, b, message):
    with pytest.raises(ShardingError, match=message):
        xs.shard_as(a, b)
    with pytest.raises(ShardingError, match=r"\(2,\) meets \(3,\)"):
        xs.shard_as(data(2).to("jax"), data(3).to("jax"))


# --- Barriers ------------------------------------------------------------------------------------


def test_a_barrier_keeps_values_and_stands_in_the_program():
    tensors = [data(4).to("jax") * n for n in (1, 2, 3)]
    optimization_barrier_([*tensors, data(2)])
    total = sum(tensors).sum()
    recorded = [entry[0] for entry in tapes.recorder().program if isinstance(entry[0], int)]
    names = [tapes.RECIPES[number].name for number in recorded]
    assert names.count("optimization_barrier") == 1
    torch.testing.assert_close(total.cpu(), 6 * data(4).sum())
    optimization_barrier_([])


def test_the_backward_pass_of_a_module_ends_in_a_barrier():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    model = copy.deepcopy(plain).to("jax")
    xs.apply_backward_optimization_barrier(model[1])
    bridge.sync()
    model(data(2, 8).to("jax")).sum().backward()
    entries = [entry[0] for entry in tapes.recorder().program if isinstance(entry[0], int)]
    names = [tapes.RECIPES[number].name for number in entries]
    assert names.count("optimization_barrier") == 1
    plain(data(2, 8)).sum().backward()
    for got, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(got.grad.cpu(), want.grad)


# --- Linear layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6), (2, 1, 3, 6), (0, 6)])
def test_an_einsum_linear_is_a_linear(shape, bias):
    torch.manual_seed(0)
    plain = torch.nn.Linear(6, 5, bias=bias)
    layer = xla_sharding.EinsumLinear(6, 5, bias=bias)
    layer.load_state_dict(plain.state_dict())
    x = data(*shape).requires_grad_()
    torch.testing.assert_close(layer(x), plain(x))  # on the CPU it is an ordinary one
    layer.to("jax")
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


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 6), (5, 4)), r"shape \(2, 6\) and a weight of shape \(5, 4\) have no product"),
        (((2, 6), (5, 6), (4,)), r"a bias of shape \(4,\) does not fit \(5, 6\)"),
    ],
)
def test_no_linear(shapes, message):
    with pytest.raises(RuntimeError, match=message):
        xs.XLAPatchedLinear.apply(*(data(*shape).to("jax") for shape in shapes))
    with pytest.raises(RuntimeError, match="weight is on cpu"):
        xs.XLAPatchedLinear.apply(data(2, 6).to("jax"), data(5, 6))
    with pytest.raises(RuntimeError, match=r"torch.float32 and torch.bfloat16 differ"):
        xs.XLAPatchedLinear.apply(data(2, 6).to("jax"), data(5, 6).bfloat16().to("jax"))
