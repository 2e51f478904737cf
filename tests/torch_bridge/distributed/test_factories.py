"""Factories: the numbers of one device, whatever the placements, made in pieces."""

import pytest
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.distributed import tensor as dt

WAYS = [[Shard(0), Replicate()], [Shard(1), Shard(0)], [Shard(0), Shard(0)], None]


def test_the_numbers_of_one_device(mesh):
    found = []
    cases = [*zip(("zeros", "ones", "full", "randn"), WAYS, strict=True)]
    for name, placements in (*cases, ("rand", WAYS[1])):
        fill = (2.5,) if name == "full" else ()
        torch.manual_seed(7)
        made = getattr(dt, name)((8, 16), *fill, device_mesh=mesh, placements=placements)
        torch.manual_seed(7)
        found.append((placements, made, getattr(torch, name)((8, 16), *fill, device="jax")))
    xs.sync()
    for placements, made, want in found:
        assert made.placements == tuple(placements or [Replicate()] * 2)
        assert made.device_mesh == mesh and torch.equal(made.cpu(), want.cpu())


@pytest.mark.parametrize("name", ["zeros", "randn"])
def test_no_device_holds_the_whole(name, mesh):
    """4 MB in eight pieces: a device's share of the program is a few of them, in all."""
    make = getattr(dt, name)
    step = xs.compile(lambda: make(1024, 1024, device_mesh=mesh, placements=[Shard(0), Shard(1)]))
    made = step()
    assert {s.data.shape for s in made.local_shards} == {(512, 256)}
    report = xs.memory_analysis(step)
    piece = 512 * 256 * 4
    assert report.output_size_in_bytes <= piece + 64
    assert report.temp_size_in_bytes <= 4 * piece


VIEWS = {
    "permute": lambda w: w.permute(2, 1, 0),
    "part of a split axis": lambda w: w[:4],
    "view": lambda w: w.view(8, 16, 2, 3),
    "expand": lambda w: w.unsqueeze(0).expand(3, *w.shape),
}
LIKE = {
    "zeros": torch.zeros_like,
    "rand": torch.rand_like,
    "new_ones": lambda x: x.new_ones(x.shape),
}


def test_like_a_view(mesh):
    source = torch.arange(8 * 16 * 6.0).view(8, 16, 6)
    placed = dt.distribute_tensor(source, mesh, [Shard(0), Shard(1)])
    models = {name: view(placed) for name, view in VIEWS.items()}
    found = []
    for view, name in zip(models, [*LIKE, "zeros"], strict=True):
        model, make = models[view], LIKE[name]
        torch.manual_seed(7)
        made = make(model)
        torch.manual_seed(7)
        want = make(VIEWS[view](source).to("jax").clone())
        found.append((f"{name} of {view}", model, made, want))
    xs.sync()
    for name, model, made, want in found:
        assert made.placements == model.placements != (Replicate(), Replicate()), name
        assert made.device_mesh == mesh and made.shape == want.shape
        rows = {shard.data.shape for shard in made.local_shards}
        assert len(rows) == 1 and rows != {tuple(made.shape)}
        assert torch.equal(made.cpu(), want.cpu()), name
    for view, model in models.items():
        assert torch.equal(model.clone().cpu(), VIEWS[view](source))


def test_like_a_view_of_what_lies_nowhere():
    model = torch.ones(8, 16, device="jax").t()
    assert torch.zeros_like(model).placements is None


def test_options(mesh):
    made = dt.ones(4, 8, dtype=torch.bfloat16, requires_grad=True, device_mesh=mesh)
    assert made.dtype == torch.bfloat16 and made.requires_grad and made.is_leaf
    assert dt.full([8], 3, device_mesh=mesh).dtype == torch.full([8], 3, device="jax").dtype
    assert dt.zeros([8, 2], device_mesh=mesh).shape == dt.zeros(8, 2, device_mesh=mesh).shape
    assert dt.rand(device_mesh=mesh).shape == ()
    with mesh["tp"]:
        assert dt.empty(8, placements=[Shard(0)]).partition_spec == P("tp")
    assert dt.randn.__name__ == "randn" and "normal" in dt.randn.__doc__


def test_refused(mesh):
    with pytest.raises(ValueError, match=r"only torch\.strided"):
        dt.zeros(4, layout=torch.sparse_coo, device_mesh=mesh)
    with pytest.raises(ValueError, match="1 placements"):
        dt.zeros(8, device_mesh=mesh, placements=[Shard(0)])
    with pytest.raises(NotImplementedError, match="reduced already"):
        dt.ones(8, device_mesh=mesh, placements=[Partial(), Shard(0)])
    with pytest.raises(RuntimeError, match="no device mesh is passed"):
        dt.ones(8)
