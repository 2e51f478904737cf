"""Wrapping: nothing to do here, since every tensor on the device is an XLAShardedTensor."""

from __future__ import annotations

import math
from typing import Any

import torch

from isoshard.core.errors import ShardingError
from isoshard.torch_bridge import naming
from isoshard.torch_bridge.tensor import XLAShardedTensor

from .marking import mark_sharding
from .mesh import Mesh


def wrap_if_sharded(x: Any) -> Any:
    """Anything, as it is: a tensor on the device is an XLAShardedTensor already."""
    return x


def wrap_as_sharded_tensor(
    t: torch.Tensor, mesh_shape: Any = None, partition_spec: Any = None
) -> XLAShardedTensor:
    """A tensor on the device, as it is; marked, if a mesh shape and a spec are given.

    Args:
        t: on the `jax` device.
        mesh_shape: devices along each axis of a mesh of the first devices.
        partition_spec: as for `mark_sharding`.

    Returns:
        `t` itself.

    Raises:
        ShardingError: `t` is on another device, or is marked differently already.
    """
    if not isinstance(t, XLAShardedTensor):
        name = naming.current().type
        raise ShardingError(
            f"a tensor of shape {tuple(t.shape)} on {t.device} cannot be an XLAShardedTensor; move "
            f"it with t.to({name!r}) first"
        )
    if mesh_shape is None or partition_spec is None:
        return t
    mesh_shape = tuple(mesh_shape)
    return mark_sharding(t, Mesh(range(math.prod(mesh_shape)), mesh_shape), partition_spec)


def unwrap_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """A tensor, as it is."""
    return t
