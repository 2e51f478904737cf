"""What jobs of DTensors share: a mesh of two axes, data, and comparisons."""

from __future__ import annotations


def mesh_of(world):
    from torch.distributed.device_mesh import init_device_mesh

    if not hasattr(mesh_of, "made"):
        shape = (world.size // 2, 2)
        mesh_of.made = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    return mesh_of.made


def data(*shape, seed=0):
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def spread(tensor, mesh, *placements, grad=True):
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, placements, src_data_rank=None).requires_grad_(grad)


def uneven(mesh):
    from torch.distributed.tensor import Replicate, Shard

    return spread(data(5, 4), mesh, Replicate(), Shard(0))


def same(got, want, **tolerances):
    import torch

    torch.testing.assert_close(
        got.detach().full_tensor().double(), want.detach().double(), **tolerances
    )


def lies(tensor, *placements):
    """Check placements; a mesh axis of size 1 splits nothing, whatever it is said to do."""
    sizes = tensor.device_mesh.shape
    found = zip(tensor.placements, placements, sizes, strict=True)
    assert all(one == two for one, two, size in found if size > 1), tensor.placements


def refused(kind, match, function, *args):
    import re

    try:
        function(*args)
    except kind as error:
        assert re.search(match, str(error), re.S), str(error)
    else:
        raise AssertionError(f"nothing was refused, where {match!r} was expected")


CLOSE = {"rtol": 1e-5, "atol": 1e-5}
