"""Inputs and outputs of a module with a parallel style: global tensors, or local ones.

Global inputs give global outputs. Local inputs, of `to_local()`, are taken as DTensor takes the
local tensor of a rank: as shards of a global tensor. Then the outputs are local where the style has
`use_local_output=True`, and otherwise global. A global tensor that a style joined from local ones,
and a view of it, counts as local at the next style, where DTensor has a DTensor.

>>> from isoshard.torch_bridge.distributed import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import DTensor, Replicate, Shard
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]
>>> local = DTensor.from_local(torch.ones(6, 8), mesh, [Replicate()]).to_local()
>>> full = enters(local, mesh, Replicate(), Shard(1))
>>> full.shape, is_local_tensor(full), is_local_tensor(full * 2)
(torch.Size([6, 8]), True, False)
>>> leaves(full, mesh, Replicate(), Shard(1), to_local=True).shape
torch.Size([6, 2])
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common.argument_types import Opaque, PlacementLike
from isoshard.torch_bridge.distributed import local_checks, tensor_placements
from isoshard.torch_bridge.distributed.along import constrain
from isoshard.torch_bridge.distributed.device_mesh import DeviceMesh
from isoshard.torch_bridge.engine.values.value import Storage
from isoshard.torch_bridge.layout.graph_calls import is_traced
from isoshard.torch_bridge.layout.layout_methods import body_of
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

_JOINED: weakref.WeakSet[Storage] = weakref.WeakSet()
"""The storage of global tensors that a style joined from local ones."""


@body_of("_is_local")
def is_local_tensor(value: Opaque) -> bool:
    """Whether a value is local, or a global tensor that a style joined from local ones."""
    if isinstance(value, ManualTensor):
        return True
    if isinstance(value, XLAShardedTensor):
        return value._storage in _JOINED
    return getattr(value, "_is_local", False)  # what torch traces


def any_local_tensor(*values: Opaque) -> bool:
    """Whether a value in some nesting is local, or joined from local ones by a style."""
    return any(map(is_local_tensor, pytree.tree_leaves(values)))


def enters(
    t: torch.Tensor,
    mesh: DeviceMesh,
    present: PlacementLike,
    desired: PlacementLike,
    *,
    from_local: bool = False,
) -> torch.Tensor:
    """An input, global or local, as a global tensor in another layout.

    Args:
        t: on the `jax` device.
        mesh: of one dimension.
        present: the layout in which it arrives.
        desired: the other.
        from_local: whether it counts as local, as local tensors do.

    Raises:
        ShardingError: it is local over other axes than those of `mesh`.
    """
    is_local = from_local or is_local_tensor(t)
    if isinstance(t, ManualTensor):
        t = local_checks.from_local(t, mesh, [present], False, None, None, None)
    else:
        t = constrain(t, mesh, present)
    if desired != present:
        t = constrain(t, mesh, desired)
    return _record_local(t) if is_local else t


def leaves(
    t: torch.Tensor,
    mesh: DeviceMesh,
    present: PlacementLike,
    desired: PlacementLike,
    *,
    to_local: bool,
    from_local: bool = False,
) -> torch.Tensor:
    """An output in another layout; global, or local.

    Args:
        t: on the `jax` device.
        mesh: of one dimension.
        present: the layout in which it is.
        desired: the other.
        to_local: whether an output of local inputs is local.
        from_local: whether it counts as local, as outputs of local inputs do.

    Raises:
        NotImplementedError: it is to be local, and `desired` is `Partial()`.
        UnevenError: it is to be local, in shards of unequal size.
    """
    is_local = from_local or is_local_tensor(t)
    full = enters(t, mesh, present, desired)
    if full is t and is_local:  # nothing to shard, and the storage is the caller's
        full = t.clone()
    if not is_local:
        return full
    if not to_local:
        return _record_local(full)
    if desired.is_partial():
        raise NotImplementedError(
            f"local tensors in the layout {desired} are partial sums, and sums are reduced "
            "as they arise: use Replicate() or Shard(dim), or use_local_output=False"
        )
    mesh_placements = tensor_placements.layout(tuple(full.shape), mesh, [desired])
    return local_checks.local_tensor_of(full, mesh_placements, None)


def _record_local(full: Any) -> Any:
    if is_traced(full):
        full._is_local = True
    else:
        _JOINED.add(full._storage)
    return full
