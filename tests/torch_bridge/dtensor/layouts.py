"""Meshes that need no processes, and every placement on them."""

import itertools
import math

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

MESHES = [
    *((1,), (2,), (5,), (8,)),
    *((1, 4), (2, 2), (2, 4), (3, 2), (4, 2), (8, 1)),
    *((1, 2, 3), (2, 1, 4), (2, 2, 2)),
]
"""Of one to eight devices, with axes of one at every place, and equal and unequal axes."""


def torch_mesh(shape, rank=0, names=None, ranks=None):
    """A DeviceMesh that needs no process group, as process `rank` sees it."""
    ranks = torch.arange(math.prod(shape)) if ranks is None else torch.tensor(ranks)
    names = names or tuple("abc"[: len(shape)])
    grid = ranks.reshape(shape)
    return DeviceMesh("cpu", grid, mesh_dim_names=names, _init_backend=False, _rank=rank)


def orders(ndim, axes):
    """Every way to split tensor axes by mesh axes: per tensor axis some of them, in order."""
    for owner in itertools.product(range(-1, ndim), repeat=axes):
        split = [[a for a in range(axes) if owner[a] == dim] for dim in range(ndim)]
        yield from itertools.product(*map(itertools.permutations, split))


def in_words(order, shape):
    """The placements of such a way, by the rule FSDP2 and tensor parallelism follow."""
    found = [Replicate() for _ in shape]
    for dim, axes in enumerate(order):
        for at, axis in enumerate(axes):
            factor = math.prod(shape[other] for other in axes[:at] if other > axis)
            found[axis] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
    return tuple(found)


def all_placements(shape, ndim):
    return dict.fromkeys(in_words(order, shape) for order in orders(ndim, len(shape)))
