"""A global tensor from the shards of this process's devices, by torch_xla's rules.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (8,), ("x",))
>>> shards = [torch.tensor([float(n)]) for n in range(8)]
>>> tensor_from_shards(shards, mesh.get_op_sharding(("x",)))
tensor([0., 1., 2., 3., 4., 5., 6., 7.], device='jax:0', sharding=P('0',))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.errors import ShardingError
from isoshard.core.layout.op_sharding import digits
from isoshard.torch_bridge.layout.shard_snapshots import XLAShard, name_of
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .mark_errors import UnmarkableError
from .marking import mark_sharding
from .mesh import Mesh
from .op_sharding import OpSharding


def tensor_from_shards(
    shards: Sequence[torch.Tensor], sharding: OpSharding, shape: Sequence[int] | None = None
) -> XLAShardedTensor:
    """The global tensor of shards, marked with their sharding.

    Args:
        shards: CPU tensors of one shape and dtype, one for each device of this process in the order
            of `jax.local_devices()`.
        sharding: of the global tensor.
        shape: of the global tensor. Where it is less than that of the shards together, the end of
            the last ones is padding; by default there is none.

    Raises:
        ShardingError: a `RuntimeError` as well; there are too few or too many shards, they differ
            in shape or dtype, or their shape does not fit that of the tensor.
    """
    devices = jax.local_devices()
    kinds = {(tuple(shard.shape), shard.dtype) for shard in shards}
    if len(shards) != len(devices) or len(kinds) != 1:
        raise UnmarkableError(
            f"{len(shards)} shards of {len(kinds)} kinds (shape, dtype) make no tensor over the "
            f"{len(devices)} devices of this process; pass one for each, all of one shape and dtype"
        )
    ((size, dtype),) = kinds
    try:
        mesh, spec = mesh_and_spec(sharding, len(size))
    except ShardingError as error:
        raise UnmarkableError(str(error)) from None
    blocks = sharding.grid(len(size)).shape[:-1]
    full = tuple(step * count for step, count in zip(size, blocks, strict=True))
    shape = full if shape is None else tuple(shape)
    _check(shape, blocks, size, sharding)
    if math.prod(blocks) == 1:
        moved: Any = shards[0].to("jax")
        return mark_sharding(moved, mesh, spec)
    zeros = torch.zeros(shape, dtype=dtype, device="jax")
    tensor = mark_sharding(zeros, mesh, spec)
    on_devices = zip(devices, shards, strict=True)
    tensor.load_local_shards_(
        [XLAShard(data, ..., name_of(device), 0) for device, data in on_devices]
    )
    return tensor


def mesh_and_spec(sharding: OpSharding, ndim: int) -> tuple[Mesh, tuple[Any, ...]]:
    """A mesh and a spec over it, for a sharding without a mesh.

    The mesh has the devices in order where it can, so that it fits other meshes of a program.

    Args:
        sharding: without a mesh.
        ndim: rank of the tensor.

    Raises:
        UnrepresentableError: it is neither replicated nor tiled, or for another rank.

    >>> mesh_and_spec(OpSharding([[0, 2], [1, 3]], [], [], 3), 2)
    (Mesh([0, 1, 2, 3], (2, 2), None), (1, 0))
    """
    grid = sharding.grid(ndim)
    splits = []  # the mesh axes that split each axis of the grid: (stride, size, axis)
    for axis in range(grid.ndim):
        line = grid[(0,) * axis + (slice(None),) + (0,) * (grid.ndim - axis - 1)]
        splits += [(stride, size, axis) for size, stride in digits(line) if size > 1]
    ordered = sorted(splits, reverse=True)
    order, sizes = [ordered.index(split) for split in splits], [size for _, size, _ in ordered]
    if math.prod(sizes) == grid.size:
        counted = np.arange(grid.size).reshape(sizes).transpose(order).reshape(grid.shape)
        if np.array_equal(counted, grid):
            axes_by_dim = [
                [index for index, split in zip(order, splits, strict=True) if split[2] == axis]
                for axis in range(ndim)
            ]
            spec = tuple(tuple(axes) if len(axes) > 1 else (*axes, None)[0] for axes in axes_by_dim)
            return Mesh(range(grid.size), tuple(sizes) or (1,)), spec
    return Mesh(grid.ravel(), grid.shape), tuple(range(ndim))


def _check(
    shape: tuple[int, ...], blocks: tuple[int, ...], size: tuple[int, ...], sharding: OpSharding
) -> None:
    fits = len(shape) == len(size) and all(
        -(-extent // count) == step for extent, count, step in zip(shape, blocks, size, strict=True)
    )
    if not fits:
        most = tuple(step * count for step, count in zip(size, blocks, strict=True))
        raise UnmarkableError(
            f"a tensor of shape {shape} has no shards of shape {size} when sharded as {sharding}; "
            f"these make one of shape {most}, or a smaller one whose last shards are padded"
        )
