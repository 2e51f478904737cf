"""`from_local` and `to_local`, their gradients too, beside torch's own DTensor."""

import inspect

import pytest
import torch
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard.core.errors import ShardingError, UnevenError
from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import DTensor, distribute_tensor
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from tests.torch_bridge.distributed import oracle

SHAPE, NAMES = (2, 2), ("dp", "tp")


@pytest.fixture
def mesh():
    return init_device_mesh("jax", SHAPE, mesh_dim_names=NAMES)


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(shape):
    """The same numbers in every rank of the oracle, whose random ones differ."""
    return torch.arange(shape.numel()).remainder(7).reshape(shape) + 0.5


def own(mesh, parts):
    """What each device would hold, if it had made it itself, as a leaf."""
    stacked = torch.stack(parts)
    flat = mesh._flatten("all")
    whole = distribute_tensor(stacked, flat, [Shard(0)])
    return whole.to_local().squeeze(0).detach().requires_grad_()


def pieces(tensor):
    return [shard.data for shard in tensor.local_shards]


WAYS = [
    ([Shard(0), Replicate()], None),
    ([Shard(1), Shard(0)], None),
    ([Shard(0), Shard(0)], None),
    ([Replicate(), Replicate()], None),
    ([Partial(), Shard(0)], None),
    ([Partial("avg"), Replicate()], None),
    ([Shard(0), Partial("max")], None),
    ([Shard(1), Replicate()], [Shard(1), Partial()]),
    ([Replicate(), Replicate()], [Partial(), Partial()]),
    ([Replicate(), Shard(0)], [Partial("avg"), Shard(0)]),
    ([Partial(), Shard(-1)], [Partial(), Shard(1)]),
]
_TAKES_GRADS = "grad_placements" in inspect.signature(TorchDTensor.from_local).parameters


def copies(parts, placements):
    """Parts of 2 x 2 ranks, equal where they are to be copies."""
    grid = [parts[:2], parts[2:]]
    first = lambda dim: placements[dim].is_replicate()  # noqa: E731
    return [
        grid[0 if first(0) else i][0 if first(1) else j].clone() for i in range(2) for j in range(2)
    ]


def test_from_local_is_dtensors(mesh):
    ways = [way for way in WAYS if _TAKES_GRADS or way[1] is None]
    found = []
    for placements, grads in ways:
        parts = copies([data(2, 4, seed=seed) for seed in range(4)], placements)
        with oracle.ranks(SHAPE, NAMES) as torch_mesh:
            theirs = oracle.local(parts).requires_grad_()
            options = {"grad_placements": grads} if grads else {}
            there = TorchDTensor.from_local(theirs, torch_mesh, placements, **options)
            full = there.full_tensor()
            (full * weights(full.shape)).sum().backward()
            want, want_grads = oracle.one(full), oracle.parts_of(theirs.grad)
        mine = own(mesh, parts)
        whole = DTensor.from_local(mine, mesh, placements, grad_placements=grads)
        (whole.full_tensor() * weights(want.shape).to("jax")).sum().backward()
        found.append((placements, whole, mine, want, want_grads))
    xs.sync()
    for placements, whole, mine, want, want_grads in found:
        assert whole.placements == tuple(
            Replicate() if p.is_partial() else Shard(p.dim % 2) if p.is_shard() else p
            for p in placements
        )
        torch.testing.assert_close(whole.detach().cpu(), want, msg=str(placements))
        for got, wanted in zip(pieces(mine.grad), want_grads, strict=True):
            torch.testing.assert_close(got, wanted, msg=str(placements))


TO_LOCAL = [
    ([Shard(0), Replicate()], None),
    ([Shard(1), Shard(0)], None),
    ([Replicate(), Replicate()], None),
    ([Shard(0), Replicate()], [Shard(0), Partial()]),
    ([Replicate(), Replicate()], [Partial(), Partial()]),
    ([Replicate(), Shard(1)], [Partial(), Shard(1)]),
]


def test_to_local_is_dtensors(mesh):
    whole = data(4, 8)
    scales = [torch.tensor(float(rank + 1)) for rank in range(4)]
    found = []
    for placements, grads in TO_LOCAL:
        with oracle.ranks(SHAPE, NAMES) as torch_mesh:
            there = torch_distribute(whole, torch_mesh, placements).requires_grad_()
            theirs = there.to_local(grad_placements=grads)
            (theirs * oracle.local(scales)).square().sum().backward()
            want = oracle.parts_of(theirs)
            want_grads = oracle.parts_of(there.grad.full_tensor())
        here = distribute_tensor(whole, mesh, placements).requires_grad_()
        mine = here.to_local(grad_placements=grads)
        assert isinstance(mine, ManualTensor) and mine.placements is None
        (mine * own(mesh, scales).detach()).square().sum().backward()
        found.append((here, mine, want, want_grads))
    xs.sync()
    for here, mine, want, want_grads in found:
        for got, wanted in zip(pieces(mine.detach()), want, strict=True):
            assert torch.equal(got, wanted)
        # Where ranks disagree about a gradient that is to be the same, each device keeps its own.
        for got, wanted in zip(here.grad.local_shards, want_grads, strict=True):
            place = got.indices if got.indices is ... else tuple(got.indices)
            torch.testing.assert_close(got.data, wanted[place])


def test_copies_that_differ_become_the_first(mesh):
    parts = [data(3, seed=seed) for seed in range(4)]
    with oracle.ranks(SHAPE, NAMES) as torch_mesh:
        there = TorchDTensor.from_local(
            oracle.local([part.clone() for part in parts]),
            torch_mesh,
            [Replicate(), Shard(0)],
            run_check=True,
        )
        want = oracle.one(there.full_tensor())
    whole = DTensor.from_local(own(mesh, parts), mesh, [Replicate(), Shard(0)], run_check=True)
    assert torch.equal(whole.detach().cpu(), want)
    assert all(torch.equal(a, b) for a, b in zip(pieces(whole)[:2], pieces(whole)[2:], strict=True))


def test_it_is_twice_differentiable(mesh):
    x = distribute_tensor(data(4, 4), mesh, [Shard(0), Shard(1)]).requires_grad_()
    y = DTensor.from_local(x.to_local() ** 3, mesh, [Shard(0), Shard(1)])
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(first.detach().cpu(), 3 * data(4, 4) ** 2)
    torch.testing.assert_close(second.cpu(), 6 * data(4, 4))


PLAIN = [placements for placements, grads in WAYS if grads is None]


def test_one_tensor_per_device(mesh):
    found = []
    for placements in PLAIN[::2]:
        parts = copies([data(2, 4, seed=seed) for seed in range(4)], placements)
        with oracle.ranks(SHAPE, NAMES) as torch_mesh:
            there = TorchDTensor.from_local(oracle.local(parts), torch_mesh, placements)
            want = oracle.one(there.full_tensor())
        for given in (parts, [part.to("jax") for part in parts]):
            found.append((DTensor.from_local(given, mesh, placements), want))
    xs.sync()
    for whole, want in found:
        torch.testing.assert_close(whole.cpu(), want)


def test_one_tensor_for_every_device(mesh):
    part, found = data(2, 4), []
    for number, placements in enumerate(PLAIN[1::2]):
        with oracle.ranks(SHAPE, NAMES) as torch_mesh:
            theirs = oracle.local([part.clone() for _ in range(4)]).requires_grad_()
            there = TorchDTensor.from_local(theirs, torch_mesh, placements).full_tensor()
            (there * 3).sum().backward()
            want, wanted_gradient = oracle.one(there.detach()), oracle.parts_of(theirs.grad)[0]
        given = part.clone() if number % 2 else part.to("jax")
        whole = DTensor.from_local(given.requires_grad_(), mesh, placements)
        (whole * 3).sum().backward()
        found.append((whole, given, want, wanted_gradient))
    xs.sync()
    for whole, given, want, wanted_gradient in found:
        torch.testing.assert_close(whole.detach().cpu(), want)
        torch.testing.assert_close(given.grad.cpu(), wanted_gradient)


def test_the_gradient_of_one_tensor_for_every_device_is_the_mean_of_theirs(mesh):
    x = data(2, 4).requires_grad_()
    weights = data(8, 4, seed=1)
    whole = DTensor.from_local(x, mesh, [Shard(0), Shard(0)])
    (whole * weights.to("jax")).sum().backward()
    torch.testing.assert_close(x.grad, weights.reshape(4, 2, 4).mean(0))


def test_unequal_pieces_as_a_list():
    mesh = init_device_mesh("jax", (4,))
    parts = list(torch.arange(10.0).chunk(4))
    whole = DTensor.from_local(parts, mesh, [Shard(0)], shape=(10,), stride=(1,))
    assert whole.block_sizes == ((3, 3, 3, 1),)
    assert torch.equal(whole.cpu(), torch.arange(10.0)) and whole.placements == (Shard(0),)
    assert [len(shard.unpadded_data) for shard in whole.local_shards] == [3, 3, 3, 1]
    with pytest.raises(UnevenError, match="shards of several shapes"):
        whole.to_local()


def test_a_part_of_a_mesh(mesh):
    part = data(2, 4)
    whole = DTensor.from_local(part, mesh["tp"], [Shard(0)])
    assert whole.placements == (Shard(0),) and whole.device_mesh == mesh["tp"]
    assert whole.partition_spec == iso.P("tp") and torch.equal(whole.cpu(), part.repeat(2, 1))
    assert whole.to_local().shape == (2, 4)
    again = DTensor.from_local(whole.to_local() * 2, mesh["tp"], [Shard(0)])
    assert torch.equal(again.cpu(), part.repeat(2, 1) * 2) and again.device_mesh == mesh["tp"]
    over_all = distribute_tensor(part, mesh).to_local()
    with pytest.raises(ShardingError, match=r"is a submesh.*may differ along other dimensions"):
        DTensor.from_local(over_all, mesh["tp"], [Shard(0)])


def test_refused(mesh):
    t, rows = data(4, 4), [Shard(0), Shard(0)]
    whole = distribute_tensor(t, mesh)
    other = init_device_mesh("jax", (8,))
    of = DTensor.from_local
    for call, error, message in (
        (lambda: of(t, mesh, [Shard(0)]), ValueError, "has 2 dimensions"),
        (lambda: of([t], mesh), ShardingError, "1 local tensors for"),
        (lambda: of(3, mesh), TypeError, "takes tensors, and this is a int"),
        (
            lambda: of(distribute_tensor(t, mesh, rows), mesh),
            RuntimeError,
            "is global and sharded as",
        ),
        (lambda: of(t, mesh, shape=(4, 4)), RuntimeError, "both shape and stride"),
        (
            lambda: of(t, mesh, shape=(5, 4), stride=(4, 1)),
            ShardingError,
            r"a tensor of shape \(4, 4\), and shape=\(5, 4\)",
        ),
        (
            lambda: of(t, mesh, shape=(4, 4), stride=(1, 4)),
            ShardingError,
            r"strides \(4, 1\), and stride=\(1, 4\)",
        ),
        (
            lambda: of(t, mesh, [Partial("product"), Shard(0)]),
            NotImplementedError,
            "the reductions are sum, avg, min, max",
        ),
        (lambda: of(t, mesh, grad_placements=rows), ShardingError, "whose gradients are global"),
        (lambda: t.to("jax").to_local(), RuntimeError, "is on no mesh"),
        (
            lambda: whole.to_local(grad_placements=[Shard(0), Shard(1)]),
            ValueError,
            "the gradient of a local tensor placed",
        ),
        (
            lambda: whole.to_local().redistribute(mesh, rows),
            RuntimeError,
            "a manual tensor has a value per device",
        ),
        (lambda: of(whole.to_local(), other), ShardingError, "these local tensors are on"),
    ):
        with pytest.raises(error, match=message):
            call()


@pytest.mark.parametrize(
    ("order", "kind"), [((1, 2, 0), "one"), ((2, 1, 0), "list"), ((0, 2, 1), "pieces")]
)
def test_strides_are_those_of_the_local_tensors(order, kind):
    """As DTensor computes them: from the sharded axis on outwards they grow by its devices."""
    local = data(4, 2, 3).permute(order)
    with oracle.ranks((4,)) as torch_mesh:
        theirs = TorchDTensor.from_local(local, torch_mesh, [Shard(-2)])
        want = theirs.shape, theirs.stride()
    mesh = init_device_mesh("jax", (4,))
    given = [local] * 4 if kind == "list" else local
    if kind == "pieces":
        given = distribute_tensor(data(16, 2, 3), mesh, [Shard(0)]).to_local().permute(order)
        local = given.local_shards[0].data
    here = DTensor.from_local(given, mesh, [Shard(-2)], shape=want[0], stride=want[1])
    assert (here.shape, here.stride()) == want and here.placements == (Shard(1),)
    parts = [local] * 4 if kind != "pieces" else [s.data for s in given.local_shards]
    assert torch.equal(here.cpu(), torch.cat(parts, 1))


def test_gradients_of_local_tensors_in_another_order(mesh):
    local = data(4, 6).t().requires_grad_()
    line = init_device_mesh("jax", (4,))
    (DTensor.from_local(local, line, [Shard(0)]) ** 2).sum().backward()
    assert torch.equal(local.grad, 2 * local.detach())


def test_pieces_lie_in_memory_as_the_whole(mesh):
    """A transposed whole has transposed pieces, as DTensor's are; gradients come back to it."""
    whole = data(8, 4, 6)
    with oracle.ranks((4,)) as torch_mesh:
        theirs = torch_distribute(whole.clone(), torch_mesh, [Shard(0)]).transpose(0, 2)
        want = oracle.parts_of(theirs)
    here = distribute_tensor(whole, init_device_mesh("jax", (4,)), [Shard(0)]).requires_grad_()
    mine = here.transpose(0, 2).to_local()
    assert mine.stride() == want[0].stride() and not mine.is_contiguous()
    for shard, part in zip(mine.detach().local_shards, want, strict=True):
        assert torch.equal(shard.data, part)
    (mine**2).sum().backward()
    assert torch.equal(here.grad.cpu(), 2 * whole)


def test_meta_tensors_become_empty_ones():
    line = init_device_mesh("jax", (4,))
    for placement in (Shard(0), Replicate(), Partial()):
        local = torch.randn(4, 6, device="meta", requires_grad=True)
        here = DTensor.from_local(local, line, [placement])
        assert here.device.type == "jax" and here.requires_grad and here.dtype == torch.float32
        assert here.shape == ((16, 6) if placement == Shard(0) else (4, 6))
        with torch.no_grad():
            made = torch.empty_like(DTensor.from_local([local] * 4, line, [placement])).fill_(1.5)
        assert made.placements == here.placements and (made.to_local() == 1.5).all()


def test_copies_that_are_written_with_pieces_are_no_longer_alike(mesh):
    """Alike, all devices draw the same numbers for them."""
    parts = [data(3, seed=seed) for seed in range(4)]
    copies = DTensor.from_local(torch.zeros(3, device="jax"), mesh, [Replicate()] * 2).to_local()
    drawn = pieces(torch.rand_like(copies))
    assert all(torch.equal(drawn[0], one) for one in drawn[1:])
    copies.add_(own(mesh, parts).detach())
    drawn = pieces(torch.rand_like(copies))
    assert not any(torch.equal(drawn[0], one) for one in drawn[1:])
