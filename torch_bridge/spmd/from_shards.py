"""A tensor made of the pieces that this process's devices hold, by torch_xla's rules.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (8,), ("x",))
>>> pieces = [torch.tensor([float(n)]) for n in range(8)]
>>> tensor_from_shards(pieces, mesh.get_op_sharding(("x",)))
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
    """The whole that pieces make, laid out as they lie.

    Args:
        shards: CPU tensors of one shape and dtype, one for each device of this process in the order
            of `jax.local_devices()`.
        sharding: how the pieces lie in the whole.
        shape: of the whole. Where it is less than what the pieces hold, the end of the last ones is
            filling; by default it is all they hold.

    Returns:
        A tensor on the device.

    Raises:
        ShardingError: a `RuntimeError` as well; there are too few or too many pieces, they differ
            in shape or dtype, or do not make a tensor of this shape.
    """
    devices = jax.local_devices()
    kinds = {(tuple(piece.shape), piece.dtype) for piece in shards}
    if len(shards) != len(devices) or len(kinds) != 1:
        raise UnmarkableError(
            f"{len(shards)} pieces of {len(kinds)} kinds (shape, dtype) make no tensor over the "
            f"{len(devices)} devices of this process; give one for each, all alike"
        )
    ((size, dtype),) = kinds
    try:
        mesh, spec = mesh_and_spec(sharding, len(size))
    except ShardingError as error:
        raise UnmarkableError(str(error)) from None
    blocks = sharding.grid(len(size)).shape[:-1]
    full = tuple(step * count for step, count in zip(size, blocks, strict=True))
    whole = full if shape is None else tuple(shape)
    _check(whole, blocks, size, sharding)
    if math.prod(blocks) == 1:
        moved: Any = shards[0].to("jax")
        return mark_sharding(moved, mesh, spec)
    made = torch.zeros(whole, dtype=dtype, device="jax")
    laid = mark_sharding(made, mesh, spec)
    pieces = zip(devices, shards, strict=True)
    laid.load_local_shards_([XLAShard(data, ..., name_of(device), 0) for device, data in pieces])
    return laid


def mesh_and_spec(sharding: OpSharding, ndim: int) -> tuple[Mesh, tuple[Any, ...]]:
    """A mesh that a layout is a spec over, and that spec.

    The mesh takes the devices in order where it can, so that it serves beside others of a program.

    Args:
        sharding: a layout without a mesh.
        ndim: rank of the tensor.

    Raises:
        UnrepresentableError: it is no layout of whole blocks, or for another rank.

    >>> mesh_and_spec(OpSharding([[0, 2], [1, 3]], [], [], 3), 2)
    (Mesh([0, 1, 2, 3], (2, 2), None), (1, 0))
    """
    grid = sharding.grid(ndim)
    found = []  # the mesh axes that split each axis of the grid, as stride and size
    for axis in range(grid.ndim):
        line = grid[(0,) * axis + (slice(None),) + (0,) * (grid.ndim - axis - 1)]
        found += [(stride, size, axis) for size, stride in digits(line) if size > 1]
    ordered = sorted(found, reverse=True)
    order, sizes = [ordered.index(one) for one in found], [size for _, size, _ in ordered]
    if math.prod(sizes) == grid.size:
        counted = np.arange(grid.size).reshape(sizes).transpose(order).reshape(grid.shape)
        if np.array_equal(counted, grid):
            splits = [
                [place for place, one in zip(order, found, strict=True) if one[2] == axis]
                for axis in range(ndim)
            ]
            spec = tuple(
                tuple(places) if len(places) > 1 else (*places, None)[0] for places in splits
            )
            return Mesh(range(grid.size), tuple(sizes) or (1,)), spec
    return Mesh(grid.ravel(), grid.shape), tuple(range(ndim))


def _check(
    whole: tuple[int, ...], blocks: tuple[int, ...], size: tuple[int, ...], sharding: OpSharding
) -> None:
    fits = len(whole) == len(size) and all(
        -(-extent // count) == step for extent, count, step in zip(whole, blocks, size, strict=True)
    )
    if not fits:
        most = tuple(step * count for step, count in zip(size, blocks, strict=True))
        raise UnmarkableError(
            f"a tensor of shape {whole} does not lie in pieces of shape {size} by {sharding}; "
            f"these make one of shape {most}, or a smaller one whose last pieces are filled"
        )
