"""The shards of a tensor in blocks of unequal sizes, without their padding.

>>> import isoshard as iso, isoshard.torch_bridge as xs
>>> mesh = iso.make_mesh((4,), ("x",))
>>> t = iso.shard(torch.arange(6.0), mesh, ("x",), uneven="pad", sizes=(1, 2, 0, 3))
>>> [shard.data.tolist() for shard in t.local_shards]
[[0.0], [1.0, 2.0], [], [3.0, 4.0, 5.0]]
>>> t.block_sizes
((1, 2, 0, 3),)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import torch

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.layout.shards import Shard
from isoshard.core.layout.shards import local_shards as core_shards
from isoshard.core.layout.uneven import UnevenArray

from . import marks


def valid_shards(u: UnevenArray) -> list[Shard]:
    """The valid elements of this process's shards, in the order of `jax.devices()`."""
    return sorted(core_shards(u), key=lambda shard: marks.ordinal(shard.device))


def put(
    u: UnevenArray,
    tensors: Mapping[str, torch.Tensor],
    name_of: Callable[[Any], str],
    to_host: Callable[[torch.Tensor], np.ndarray],
) -> UnevenArray:
    """An array of new shards in the blocks of another array.

    Args:
        u: the other array.
        tensors: a shard for each device, by its name.
        name_of: names a device.
        to_host: a tensor's elements in the dtype of `u`.

    Raises:
        RuntimeError: shards are missing, or have other sizes.
    """
    have = valid_shards(u)
    names = [name_of(shard.device) for shard in have]
    if sorted(tensors) != sorted(names):
        raise RuntimeError(
            f"{len(tensors)} shards for devices {sorted(tensors)} do not make a tensor on "
            f"{len(names)} devices of this process, {sorted(names)}; pass one for each"
        )
    wrong = [
        f"{name} has {tuple(tensors[name].shape)} for {shard.data.shape}"
        for name, shard in zip(names, have, strict=True)
        if tuple(tensors[name].shape) != shard.data.shape
    ]
    if wrong:
        raise RuntimeError(
            f"the shards of a tensor of shape {u.shape} in blocks {u.sizes} must have the shapes "
            f"of its local_shards: {'; '.join(wrong)}"
        )
    layout = BlockLayout.of(u)
    size = layout.sharding.shard_shape(layout.padded)
    arrays = []
    for name, shard in zip(names, have, strict=True):
        data = to_host(tensors[name])
        padding = [(0, full - valid) for full, valid in zip(size, data.shape, strict=True)]
        with jax.enable_x64(True):
            arrays.append(jax.device_put(np.pad(data, padding), shard.device))
    with jax.enable_x64(True):
        array = jax.make_array_from_single_device_arrays(
            layout.padded, layout.sharding, arrays, dtype=u.dtype
        )
    return layout.wrap(array)
