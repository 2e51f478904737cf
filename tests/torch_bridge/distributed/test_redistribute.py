"""`distribute_tensor` and `redistribute`: every placement to every other, beside torch's DTensor.

Shapes divide, or do not, along one mesh dimension or along several that split one axis.
"""

import itertools
import math

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.distributed.tensor.placement_types import _StridedShard

import isoshard.torch_bridge as xs
from isoshard.core.errors import UnevenError
from isoshard.torch_bridge.distributed import init_device_mesh
from isoshard.torch_bridge.distributed.tensor import DTensor, distribute_tensor
from tests.torch_bridge.distributed import oracle

pytestmark = pytest.mark.filterwarnings("ignore::isoshard.torch_bridge.spmd.uneven.UnevenWarning")

SPLITS = [  # meshes and shapes, which divide and do not
    ((8,), (1, 3)),
    ((4,), (10, 5)),
    ((2, 4), (8, 16)),
    ((2, 4), (13, 3)),
    ((2, 2, 2), (10, 5)),
]


def numbers(shape):
    return torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape) + 1


def ways(mesh_shape, ndim=2):
    """Every placement without `Partial`."""
    one = [Replicate(), *map(Shard, range(ndim))]
    return list(itertools.product(one, repeat=len(mesh_shape)))


def pieces(tensor):
    return [shard.unpadded_data for shard in tensor.local_shards]


def chunked(x, mesh_shape, way):
    """The pieces as torch.chunk makes them, one mesh dimension after the other."""
    found = []
    for place in itertools.product(*map(range, mesh_shape)):
        part = x
        for at, count, placement in zip(place, mesh_shape, way, strict=True):
            if placement.is_shard():
                parts = part.chunk(count, placement.dim)
                part = parts[at] if at < len(parts) else part.narrow(placement.dim, 0, 0)
        found.append(part)
    return found


@pytest.mark.parametrize(("mesh_shape", "shape"), SPLITS, ids=str)
def test_pieces_are_dtensors(mesh_shape, shape):
    x, given = numbers(shape), ways(mesh_shape)
    want = [chunked(x, mesh_shape, way) for way in given]
    if len(mesh_shape) < 3:  # in torch 2.13 distribute_tensor fails for some of three dimensions
        with oracle.ranks(mesh_shape) as torch_mesh:
            theirs = [oracle.parts_of(torch_distribute(x, torch_mesh, way)) for way in given]
        assert all(same(a, b) for a, b in zip(want, theirs, strict=True))
    mesh = init_device_mesh("jax", mesh_shape)
    for way, parts in zip(given, want, strict=True):
        here = distribute_tensor(x, mesh, way)
        assert here.placements == way and here.device_mesh == mesh
        assert same(pieces(here), parts), way


def same(some, others):
    return all(
        (a.numel() == b.numel() == 0) or a.equal(b) for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize(
    ("mesh_shape", "shape"), [((4,), (10, 5)), ((4,), (8, 16)), ((2, 2), (13, 3))], ids=str
)
def test_everything_goes_everywhere_and_its_gradient_back(mesh_shape, shape):
    x, mesh = numbers(shape), init_device_mesh("jax", mesh_shape)
    sources = {way: distribute_tensor(x, mesh, way).requires_grad_() for way in ways(mesh_shape)}
    targets = ways(mesh_shape)
    factor, loss, moved = 0, 0, []
    for source, target in itertools.product(sources.values(), targets):
        there = source.redistribute(mesh, target)
        moved.append((there, target))
        factor += 1
        loss = loss + (there * factor).sum()
    loss.backward()
    xs.sync()
    for there, target in moved:
        assert there.placements == target and isinstance(there, DTensor)
        assert torch.equal(there.detach().cpu(), x)
    count = len(targets)
    for number, (way, source) in enumerate(sources.items()):
        wanted = sum(range(number * count + 1, (number + 1) * count + 1))
        assert source.grad.placements == way
        assert torch.equal(source.grad.cpu(), torch.full(shape, float(wanted), dtype=x.dtype))


@pytest.mark.parametrize(
    ("mesh_shape", "reduce_op"),
    [((4,), "avg"), ((4,), "min"), ((2, 4), "sum"), ((2, 4), "max")],
    ids=str,
)
def test_parts_of_a_sum_go_everywhere(mesh_shape, reduce_op):
    mesh, size = init_device_mesh("jax", mesh_shape), math.prod(mesh_shape)
    parts = [numbers((8, 4)) * (-1) ** rank * (rank + 1) for rank in range(size)]
    given = [Partial(reduce_op)] * len(mesh_shape)
    stacked = torch.stack(parts)
    wanted = {
        "sum": stacked.sum(0),
        "avg": stacked.mean(0),
        "min": stacked.amin(0),
        "max": stacked.amax(0),
    }[reduce_op]
    whole = DTensor.from_local(parts, mesh, given)
    moved = {target: whole.redistribute(mesh, target) for target in ways(mesh_shape)}
    xs.sync()
    for target, there in moved.items():
        assert there.placements == target
        torch.testing.assert_close(there.cpu(), wanted)


def test_pieces_of_several_dimensions_are_loaded_back():
    mesh = init_device_mesh("jax", (2, 2))
    here = distribute_tensor(numbers((10, 3)), mesh, [Shard(0), Shard(0)])
    shards = here.local_shards
    assert [tuple(s.unpadded_data.shape) for s in shards] == [(3, 3), (2, 3), (3, 3), (2, 3)]
    for shard in shards:
        shard.unpadded_data = shard.unpadded_data * 2
    here.load_local_shards_(shards)
    assert torch.equal(here.cpu(), numbers((10, 3)) * 2)
    assert here.clone().placements is not None


def test_a_strided_split_that_does_not_divide_is_refused():
    mesh = init_device_mesh("jax", (2, 4))
    with pytest.raises(UnevenError, match=r"axis 0 of 9 elements .*_StridedShard.*pad it"):
        distribute_tensor(numbers((9, 2)), mesh, [_StridedShard(0, split_factor=4), Shard(0)])


def test_each_copy_of_a_full_tensor_may_have_a_gradient():
    """As torch's: `Partial()` is a gradient per rank, `Replicate()` one for all."""
    x, hints = numbers((8, 3)), [None, [Replicate()], [Partial()], [Shard(0)]]
    with oracle.ranks((8,)) as torch_mesh:
        want = []
        for hint in hints[:3]:
            there = torch_distribute(x, torch_mesh, [Shard(0)]).requires_grad_()
            there.full_tensor(grad_placements=hint).square().sum().backward()
            want.append(oracle.one(there.grad.full_tensor()))
    mesh = init_device_mesh("jax", (8,))
    for hint, wanted in zip(hints, [*want, want[0]], strict=True):
        here = distribute_tensor(x, mesh, [Shard(0)]).requires_grad_()
        here.full_tensor(grad_placements=hint).square().sum().backward()
        assert torch.equal(here.grad.cpu(), wanted), hint
