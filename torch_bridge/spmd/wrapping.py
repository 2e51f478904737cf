"""torch_xla's wrapping functions: every tensor on the device is an XLAShardedTensor already."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from isoshard.core.layout.spec import SpecLike
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import Leaf, MeshLike
from isoshard.torch_bridge.layout.layout_methods import body_of
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .distribute import xla_distribute_tensor
from .mark_errors import UnmarkableError
from .marking import clear_sharding, layout_for, mark_sharding
from .mesh import Mesh


def wrap_if_sharded(x: Leaf) -> Any:
    """`x` unchanged: a tensor on the device is an XLAShardedTensor already."""
    return x


def wrap_as_sharded_tensor(
    t: torch.Tensor, mesh_shape: Sequence[int] | None = None, partition_spec: SpecLike = None
) -> XLAShardedTensor:
    """A tensor on the device unchanged; marked anew, if a mesh shape and a spec are passed.

    Args:
        t: on the `jax` device.
        mesh_shape: devices along each axis of a mesh of the first devices.
        partition_spec: as for `mark_sharding`.

    Returns:
        `t` itself.

    Raises:
        ShardingError: `t` is on another device.
        SpecError: the spec does not fit.
    """
    if not isinstance(t, XLAShardedTensor):
        name = naming.current().type
        raise UnmarkableError(
            f"a tensor of shape {tuple(t.shape)} on {t.device} cannot be an XLAShardedTensor; move "
            f"it with t.to({name!r}) first"
        )
    if mesh_shape is None or partition_spec is None:
        return t
    shape = tuple(mesh_shape)
    mesh = Mesh(range(math.prod(shape)), shape)
    layout_for(tuple(t.shape), mesh, partition_spec)  # raises before anything changes
    return mark_sharding(clear_sharding(t), mesh, partition_spec)


@body_of("__new__")
def wrapped_for_script(
    t: torch.Tensor, mesh: MeshLike = None, partition_spec: SpecLike = None
) -> XLAShardedTensor:
    """`XLAShardedTensor(t, ..)`: as `wrap_as_sharded_tensor`; scripts of torch_xla may pass more.

    Args:
        t: on the `jax` device; in a script of torch_xla also on the CPU, and then it is copied to a
            leaf of its own, which requires a gradient if `t` does.
        mesh: the shape of a mesh; or a mesh, in any form.
        partition_spec: as for `mark_sharding`; placements, where `mesh` is a mesh.

    Raises:
        ShardingError, SpecError: as `wrap_as_sharded_tensor`.
    """
    if not isinstance(t, XLAShardedTensor) and naming.is_torch_xla():
        t = t.detach().to("jax").requires_grad_(t.requires_grad)
    if mesh is None or isinstance(mesh, Sequence):
        return wrap_as_sharded_tensor(t, mesh, partition_spec)
    return xla_distribute_tensor(wrap_as_sharded_tensor(t), mesh, partition_spec)


def unwrap_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """`t` unchanged."""
    return t
