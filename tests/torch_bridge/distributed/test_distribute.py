"""`distribute_tensor`, `distribute_module`, `redistribute` and `full_tensor` on one process."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.placement_types import _StridedShard

import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.core.errors import ShardingError
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import DTensor, distribute_module, distribute_tensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor
from tests.torch_bridge.distributed import oracle


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pieces(tensor):
    xs.sync()
    return [shard.unpadded_data for shard in tensor.local_shards]


# --- distribute_tensor ---------------------------------------------------------------------------

PLACEMENTS = [[Shard(0), Shard(1)], [Shard(-1), Shard(-1)], None]


@pytest.mark.parametrize("placements", PLACEMENTS)  # more of them: test_redistribute.py
def test_every_device_holds_what_dtensors_rank_holds(placements, mesh):
    whole = data(8, 16)
    with oracle.ranks((2, 4)) as torch_mesh:
        there = torch_distribute(whole.clone(), torch_mesh, placements)
        want, want_placements = oracle.parts_of(there), there.placements
    for given in (whole, whole.to("jax")):
        here = distribute_tensor(given, mesh, placements)
        assert here.placements == want_placements and here.device_mesh == mesh
        assert isinstance(here, DTensor) and issubclass(DTensor, XLAShardedTensor)
        for got, wanted in zip(pieces(here), want, strict=True):
            assert torch.equal(got, wanted)


def test_the_right_dimension_outermost(mesh):
    normal = [_StridedShard(1, split_factor=4), Shard(1)]
    with oracle.ranks((2, 4)) as torch_mesh:
        want = oracle.parts_of(torch_distribute(data(2, 16), torch_mesh, normal))
    here = distribute_tensor(data(2, 16), mesh, [_StridedShard(-1, split_factor=4), Shard(-1)])
    assert here.partition_spec == P(None, ("tp", "dp")) and here.placements == tuple(normal)
    for got, wanted in zip(pieces(here), want, strict=True):
        assert torch.equal(got, wanted)


def test_uneven_pieces_are_chunks():
    whole = data(5, 2)
    with oracle.ranks((4,)) as torch_mesh:
        want = oracle.parts_of(torch_distribute(whole.clone(), torch_mesh, [Shard(0)]))
    with pytest.warns(xs.spmd.UnevenWarning, match="axis 0 has size 5"):
        here = distribute_tensor(whole, init_device_mesh("jax", (4,)), [Shard(0)])
    assert here.placements == (Shard(0),) and torch.equal(here.cpu(), whole)
    for got, wanted in zip(pieces(here), want, strict=True):
        assert torch.equal(got, wanted)


def test_a_new_leaf_of_the_same_kind(mesh):
    leaf = data(8, 8).requires_grad_()
    here = distribute_tensor(leaf, mesh, [Shard(0), Replicate()])
    assert here.is_leaf and here.requires_grad and here is not leaf
    (here * 3).sum().backward()
    assert leaf.grad is None and torch.equal(here.grad.cpu(), torch.full((8, 8), 3.0))
    assert here.grad.placements == here.placements
    assert not distribute_tensor(data(8), mesh).requires_grad


def test_distributed_again(mesh):
    here = distribute_tensor(data(8, 8), mesh, [Shard(0), Replicate()])
    assert distribute_tensor(here, mesh, [Shard(0), Replicate()]) is here
    message = r"sharded already.*to a different placements.*use tensor.red"
    with pytest.raises(ValueError, match=message):
        distribute_tensor(here, mesh, [Shard(1), Replicate()])
    with pytest.raises(ValueError, match=r"sharded already.*to a different device mesh"):
        distribute_tensor(here, init_device_mesh("jax", (8,)), [Shard(1)])


def test_a_tensor_of_the_device_stays_as_it_is(mesh):
    """As a plain tensor does in torch: nothing of two layouts of it is shared, nor of its own."""
    source = data(8, 16).to("jax").requires_grad_()
    rows = distribute_tensor(source, mesh, [Replicate(), Shard(0)])
    again = distribute_tensor(source, mesh, [Replicate(), Shard(0)])
    columns = distribute_tensor(source, mesh, [Shard(1), Replicate()])
    whole = distribute_tensor(source.detach().clone(), mesh)
    assert source.placements is None and whole.placements == (Replicate(), Replicate())
    assert rows.placements == again.placements == (Replicate(), Shard(0))
    assert columns.placements == (Shard(1), Replicate())
    (rows * 2 + columns * 5).sum().backward()
    assert source.grad is None and again.grad is None
    assert rows.grad.sum().item() == 2 * 128 and columns.grad.sum().item() == 5 * 128
    with torch.no_grad():
        rows.zero_()
    for other in (source, again, columns, whole):
        torch.testing.assert_close(other.detach().cpu(), data(8, 16))


def test_what_lies_on_a_mesh_is_a_dtensor(mesh):
    plain = data(8, 16).to("jax")
    xs.sync()
    rows = distribute_tensor(plain, mesh, [Replicate(), Shard(0)])
    for one in (rows, rows * 2, rows.t(), rows[:2], (rows + 1).view(2, 4, 16)):
        assert isinstance(one, DTensor)
    assert isinstance(nn.Parameter(rows), DTensor)
    xs.sync()
    for other in (plain, plain.t(), data(2, 2), rows.to_local(), 3, None):
        assert not isinstance(other, DTensor)


def test_views_tell_how_they_lie(mesh):
    """What shows a part of a split axis is gathered along it, as in torch."""
    whole = data(8, 16)
    views = {
        "t": (lambda t: t.t(), [Replicate(), Shard(1)]),
        "unsqueeze": (lambda t: t.unsqueeze(0), [Replicate(), Shard(1)]),
        "expand": (lambda t: t[None].expand(3, 8, 16), [Replicate(), Shard(1)]),
        "columns": (lambda t: t[:, 4:], [Replicate(), Shard(0)]),
        "rows": (lambda t: t[:4], [Replicate(), Replicate()]),
        "a row": (lambda t: t[3], [Replicate(), Replicate()]),
        "some": (lambda t: t[2:6, 1:].t(), [Replicate(), Replicate()]),
        "view": (lambda t: t.view(2, 4, 16), [Replicate(), Replicate()]),
        "flat": (lambda t: t.view(128), [Replicate(), Replicate()]),
        "diagonal": (lambda t: t.diagonal(), [Replicate(), Replicate()]),
    }
    for given in (lambda t: t, lambda t: t * 1):
        t = given(distribute_tensor(whole, mesh, [Replicate(), Shard(0)]))
        assert t.placements == (None if t.named_sharding is None else (Replicate(), Shard(0)))
        xs.sync()
        found = {}
        for name, (of, placements) in views.items():
            view = of(t)
            assert view.placements == tuple(placements), name
            assert view.device_mesh == mesh, name
            local = view.to_local()
            split = [p.dim for p in placements if p.is_shard()]
            want = [n // 4 if axis in split else n for axis, n in enumerate(of(whole).shape)]
            assert list(local.shape) == want, name
            again = DTensor.from_local(local * 2, view.device_mesh, view.placements)
            moved = view.redistribute(view.device_mesh, [Replicate(), Replicate()])
            found[name] = again, moved
        xs.sync()
        for name, (again, moved) in found.items():
            assert torch.equal(again.cpu(), views[name][0](whole) * 2), name
            assert moved.placements == (Replicate(), Replicate()), name
            assert torch.equal(moved.cpu(), views[name][0](whole)), name


def test_a_part_of_a_mesh_is_the_same_along_the_rest(mesh):
    here = distribute_tensor(data(8, 4), mesh["tp"], [Shard(0)])
    assert here.placements == (Shard(0),) and here.device_mesh == mesh["tp"]
    assert here.partition_spec == P("tp") and here.mesh.axis_names == ("dp", "tp")
    moved = here.redistribute(placements=[Replicate()])
    assert moved.placements == (Replicate(),) and moved.partition_spec == P()
    assert here.full_tensor().placements == (Replicate(),)
    flat = distribute_tensor(data(8, 4), mesh._flatten("all"), [Shard(0)])
    assert flat.partition_spec == P(("dp", "tp")) and flat.placements == (Shard(0),)
    assert (here * 1).redistribute(mesh, [Shard(0), Shard(1)]).device_mesh == mesh


def test_who_sends_makes_no_difference(mesh):
    for rank in (None, 3):
        here = distribute_tensor(data(8), mesh, [Shard(0)] * 2, src_data_rank=rank)
        assert torch.equal(here.cpu(), data(8))


def test_what_distribute_tensor_refuses(mesh):
    one, rows = data(8), [Shard(1), Replicate()]
    for tensor, placements, error, message in (
        (one * data(8).requires_grad_(), None, RuntimeError, "used to distribute leaf tensors"),
        (one, [Shard(0)], ValueError, "1 placements .* 2 dimensions, .*must have the same length"),
        (one, rows, IndexError, "rank 1 has no axis 1"),
        (one, [Partial(), Replicate()], NotImplementedError, "not supported: .* already"),
        (3, None, TypeError, "takes a tensor, and this is a int"),
    ):
        with pytest.raises(error, match=message):
            distribute_tensor(tensor, mesh, placements)


def test_tensors_of_other_worlds_are_refused(mesh):
    local = distribute_tensor(data(8), mesh).to_local()
    with pytest.raises(RuntimeError, match=r"each device's local tensor, of to_local"):
        distribute_tensor(local, mesh)
    with oracle.ranks((4,)) as torch_mesh:
        theirs = torch_distribute(data(8), torch_mesh, [Shard(0)])
        assert isinstance(theirs, TorchDTensor)
        with pytest.raises(ShardingError, match=r"one process's part.*full_tensor"):
            distribute_tensor(theirs, mesh)
        with pytest.raises(RuntimeError, match=r"a DTensor of another process mesh"):
            DTensor.from_local(theirs, mesh)


def test_a_cpu_tensor_goes_up_once_in_pieces(mesh, counted):
    xs.sync()  # what other tests left
    metrics.reset()
    here = distribute_tensor(data(64, 64), mesh, [Shard(0), Shard(1)])
    xs.sync()
    assert counted("transfers.host_to_device") == 1
    assert "transfers.between_devices" not in metrics.counters()
    assert {piece.shape for piece in pieces(here)} == {(32, 16)}


# --- redistribute, full_tensor -------------------------------------------------------------------


def test_redistribute_and_its_gradients(mesh):
    here, there = [Shard(0), Shard(1)], [Replicate(), Shard(-1)]
    x = distribute_tensor(data(8, 16), mesh, here).requires_grad_()
    moved = x.redistribute(mesh, there)
    assert torch.equal(moved.detach().cpu(), data(8, 16))
    assert moved.placements == tuple(Shard(p.dim % 2) if p.is_shard() else p for p in there)
    (first,) = torch.autograd.grad((moved**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert first.placements == x.placements
    torch.testing.assert_close(first.detach().cpu(), 3 * data(8, 16) ** 2)
    torch.testing.assert_close(second.cpu(), 6 * data(8, 16))


def test_dtypes_while_moving():
    def moved(x):
        narrow = {"forward_dtype": torch.bfloat16, "backward_dtype": torch.bfloat16}
        there = x.redistribute(placements=[Replicate()], **narrow)
        (there.float() * (there.float() + 0.001)).sum().backward()
        return there

    with oracle.ranks((4,)) as torch_mesh:
        theirs = torch_distribute(data(8), torch_mesh, [Shard(0)]).requires_grad_()
        want = oracle.one(moved(theirs).full_tensor())
        want_grad = oracle.one(theirs.grad.full_tensor())
    ours = distribute_tensor(data(8), init_device_mesh("jax", (4,)), [Shard(0)]).requires_grad_()
    there = moved(ours)
    assert there.dtype == torch.bfloat16 and torch.equal(there.detach().cpu(), want)
    assert ours.grad.dtype == torch.float32 and torch.equal(ours.grad.cpu(), want_grad)


def test_full_tensor_and_the_layout_of_its_gradient(mesh):
    x = distribute_tensor(data(8, 8), mesh, [Shard(0), Shard(1)]).requires_grad_()
    whole = x.full_tensor(grad_placements=[Replicate(), Shard(0)])
    assert whole.placements == (Replicate(), Replicate())
    (gradient,) = torch.autograd.grad((whole**2).sum(), x)
    assert gradient.placements == (Replicate(), Shard(0))
    torch.testing.assert_close(gradient.cpu(), 2 * data(8, 8))
    with pytest.raises(NotImplementedError, match="reduced already"):
        x.full_tensor(grad_placements=[Partial("max"), Replicate()])


def test_what_redistribute_refuses(mesh):
    x = distribute_tensor(data(8, 8), mesh, [Shard(0), Shard(1)])
    with pytest.raises(RuntimeError, match="redistribute needs placements"):
        x.redistribute(mesh)
    with pytest.raises(RuntimeError, match="reduced already"):
        x.redistribute(placements=[Partial(), Shard(1)])
    with pytest.raises(RuntimeError, match="no device mesh is passed"):
        data(8).to("jax").redistribute(placements=[Shard(0)])


# --- distribute_module ---------------------------------------------------------------------------


def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))


def test_what_no_function_lays_out_is_whole(mesh):
    visited = []

    def partition(name, module, given):
        visited.append((name, given))
        if name == "0":
            laid = distribute_tensor(module.weight, given, [Replicate(), Shard(0)])
            module.weight = nn.Parameter(laid)

    module = distribute_module(model(), mesh, partition)
    assert visited == [(name, mesh) for name in ("", "0", "1", "2", "3")]
    placements = {name: t.placements for name, t in module.state_dict(keep_vars=True).items()}
    assert placements.pop("0.weight") == (Replicate(), Shard(0))
    assert set(placements.values()) == {(Replicate(), Replicate())} and len(placements) == 8
    assert all(isinstance(p, nn.Parameter) for p in module.parameters())
    x = data(4, 8)
    torch.testing.assert_close(module(x.to("jax")).detach().cpu(), model()(x).detach())


def test_functions_of_inputs_and_outputs(mesh):
    seen = []

    def before(module, inputs, given):
        seen.append((type(module), given))
        return tuple(distribute_tensor(x, given, [Shard(0), Replicate()]) for x in inputs)

    def after(module, outputs, given):
        seen.append((outputs.shape, given))
        return outputs.redistribute(given, [Replicate(), Shard(0)])

    module = distribute_module(nn.Linear(8, 8), mesh, input_fn=before, output_fn=after)
    assert module(data(4, 8)).placements == (Replicate(), Shard(0))
    assert seen == [(nn.Linear, mesh), (torch.Size([4, 8]), mesh)]


def test_functions_of_two_arguments_are_deprecated(mesh):
    with pytest.warns(FutureWarning, match="Deprecating input_fn with two arguments"):
        distribute_module(nn.Linear(8, 8), mesh, input_fn=lambda inputs, given: inputs)
    with pytest.warns(FutureWarning, match="Deprecating output_fn with two arguments"):
        module = distribute_module(nn.Linear(8, 8), mesh, output_fn=lambda y, given: y * 0)
    assert not module(data(4, 8).to("jax")).any()
    for what in ("input_fn", "output_fn"):
        with pytest.raises(ValueError, match=f"{what} is called with .* takes 1 arguments"):
            distribute_module(nn.Linear(8, 8), mesh, **{what: lambda x: x})


def test_a_module_is_distributed_once(mesh):
    module = distribute_module(nn.Linear(8, 8), mesh)
    message = r"this Linear was distributed before.*should only be called once"
    with pytest.raises(RuntimeError, match=message):
        distribute_module(module, mesh)
    with mesh["tp"]:
        assert distribute_module(nn.Linear(8, 8)).weight.device_mesh == mesh["tp"]
    shared = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shared[1].weight = shared[0].weight
    distribute_module(shared, mesh)
    assert shared[0].weight is shared[1].weight and shared[0].bias is not shared[1].bias


def test_a_meta_module_is_made_in_pieces(mesh):
    with torch.device("meta"):
        module = nn.Linear(8, 16)

    def rows(name, child, given):
        child._apply(lambda t: distribute_tensor(t, given, [Replicate(), Shard(0)]))

    distribute_module(module, mesh, rows)
    torch.manual_seed(3)
    module.reset_parameters()
    assert [piece.shape for piece in pieces(module.weight)] == [(4, 8)] * 8
    torch.manual_seed(3)
    reference = nn.Linear(8, 16, device="jax")
    assert torch.equal(module.weight.detach().cpu(), reference.weight.detach().cpu())
