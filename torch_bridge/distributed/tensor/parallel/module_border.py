"""What goes into and comes out of a module that a style is for: whole tensors, or pieces.

What goes in whole comes out whole. What goes in as pieces, as `to_local()` gives them, is taken as
DTensor takes the local tensor of a rank: it is the whole that these pieces make. Then pieces come
out where the style says `use_local_output=True`, and otherwise the whole. A whole that a style made
of pieces, and a view of it, counts as pieces at the next style: it is what a DTensor is there.

>>> from isoshard.torch_bridge.distributed import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import DTensor, Replicate, Shard
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))["tp"]
>>> mine = DTensor.from_local(torch.ones(6, 8), mesh, [Replicate()]).to_local()
>>> whole = enters(mine, mesh, Replicate(), Shard(1))
>>> whole.shape, is_of_pieces(whole), is_of_pieces(whole * 2)
(torch.Size([6, 8]), True, False)
>>> leaves(whole, mesh, Replicate(), Shard(1), as_pieces=True).shape
torch.Size([6, 2])
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common.argument_types import Opaque, PlacementLike
from isoshard.torch_bridge.distributed import local_checks, tensor_placements
from isoshard.torch_bridge.distributed.along import lay_out
from isoshard.torch_bridge.distributed.device_mesh import DeviceMesh
from isoshard.torch_bridge.engine.values.value import Storage
from isoshard.torch_bridge.layout.graph_calls import is_traced
from isoshard.torch_bridge.layout.method_bodies import body_of
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

_OF_PIECES: weakref.WeakSet[Storage] = weakref.WeakSet()
"""The memory of wholes that a style made of pieces."""


@body_of("_of_pieces")
def is_of_pieces(value: Opaque) -> bool:
    """Whether a value is pieces, or a whole that a style made of pieces.

    Args:
        value: anything.
    """
    if isinstance(value, ManualTensor):
        return True
    if isinstance(value, XLAShardedTensor):
        return value._storage in _OF_PIECES
    return getattr(value, "_of_pieces", False)  # what torch traces


def any_of_pieces(*values: Opaque) -> bool:
    """Whether a value in some nesting is pieces, or a whole that a style made of pieces.

    Args:
        *values: anything, nested in tuples, lists and dictionaries.
    """
    return any(map(is_of_pieces, pytree.tree_leaves(values)))


def enters(
    t: torch.Tensor,
    mesh: DeviceMesh,
    present: PlacementLike,
    desired: PlacementLike,
    *,
    of_pieces: bool = False,
) -> torch.Tensor:
    """A tensor that arrives in one layout, whole or in pieces, as a whole in another.

    Args:
        t: on the `jax` device.
        mesh: of one dimension.
        present: the layout in which it arrives.
        desired: the other.
        of_pieces: whether it counts as pieces, as they themselves do.

    Raises:
        ShardingError: its pieces are over other axes than those of `mesh`.
    """
    is_local = of_pieces or is_of_pieces(t)
    if isinstance(t, ManualTensor):
        t = local_checks.from_local(t, mesh, [present], False, None, None, None)
    else:
        t = lay_out(t, mesh, present)
    if desired != present:
        t = lay_out(t, mesh, desired)
    return _noted(t) if is_local else t


def leaves(
    t: torch.Tensor,
    mesh: DeviceMesh,
    present: PlacementLike,
    desired: PlacementLike,
    *,
    as_pieces: bool,
    of_pieces: bool = False,
) -> torch.Tensor:
    """A tensor that leaves a module in one layout, in another; whole, or in pieces.

    Args:
        t: on the `jax` device.
        mesh: of one dimension.
        present: the layout in which it is.
        desired: the other.
        as_pieces: whether a tensor that is of pieces leaves in pieces.
        of_pieces: whether it counts as one, as what a module makes of pieces does.

    Raises:
        NotImplementedError: it is to be in pieces, and `desired` is `Partial()`.
        UnevenError: it is to be in pieces of unequal size.
    """
    is_local = of_pieces or is_of_pieces(t)
    whole = enters(t, mesh, present, desired)
    if whole is t and is_local:  # nothing to lay out, and the memory is somebody's own
        whole = t.clone()
    if not is_local:
        return whole
    if not as_pieces:
        return _noted(whole)
    if desired.is_partial():
        raise NotImplementedError(
            f"pieces in the layout {desired} are the devices' parts of a sum, and sums are taken "
            "as they arise: use Replicate() or Shard(dim), or use_local_output=False"
        )
    laid = tensor_placements.layout(tuple(whole.shape), mesh, [desired])
    return local_checks.pieces(whole, laid, None)


def _noted(whole: Any) -> Any:
    if is_traced(whole):
        whole._of_pieces = True
    else:
        _OF_PIECES.add(whole._storage)
    return whole
