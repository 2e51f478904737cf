"""The pieces of a tensor in blocks of unequal sizes: each is as large as what is valid in it.

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


def pieces(u: UnevenArray) -> list[Shard]:
    """The valid part of each piece on this process's devices, in the order of `jax.devices()`."""
    return sorted(core_shards(u), key=lambda shard: marks.ordinal(shard.device))


def put(
    u: UnevenArray,
    given: Mapping[str, torch.Tensor],
    name_of: Callable[[Any], str],
    to_host: Callable[[torch.Tensor], np.ndarray],
) -> UnevenArray:
    """An array of new pieces in the blocks of another.

    Args:
        u: says how the pieces lie.
        given: a tensor for each device, by its name.
        name_of: names a device.
        to_host: a tensor's elements in the dtype of `u`.

    Returns:
        An array of the same layout.

    Raises:
        RuntimeError: pieces are missing, or have other sizes.
    """
    have = pieces(u)
    names = [name_of(shard.device) for shard in have]
    if sorted(given) != sorted(names):
        raise RuntimeError(
            f"{len(given)} pieces for devices {sorted(given)} do not make a tensor on "
            f"{len(names)} devices of this process, {sorted(names)}; give one for each"
        )
    wrong = [
        f"{name} has {tuple(given[name].shape)} for {shard.data.shape}"
        for name, shard in zip(names, have, strict=True)
        if tuple(given[name].shape) != shard.data.shape
    ]
    if wrong:
        raise RuntimeError(
            f"the pieces of a tensor of shape {u.shape} in blocks {u.sizes} are as large as those "
            f"that local_shards gives: {'; '.join(wrong)}"
        )
    layout = BlockLayout.of(u)
    size = layout.sharding.shard_shape(layout.padded)
    arrays = []
    for name, shard in zip(names, have, strict=True):
        data = to_host(given[name])
        filled = [(0, full - part) for full, part in zip(size, data.shape, strict=True)]
        with jax.enable_x64(True):
            arrays.append(jax.device_put(np.pad(data, filled), shard.device))
    with jax.enable_x64(True):
        made = jax.make_array_from_single_device_arrays(
            layout.padded, layout.sharding, arrays, dtype=u.dtype
        )
    return layout.wrap(made)
