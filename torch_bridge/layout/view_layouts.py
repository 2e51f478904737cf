"""Shardings of views: those of the memory, where a view has the split axes unsliced.

>>> from isoshard import P, make_mesh, shard
>>> import torch
>>> t = shard(torch.zeros(8, 6), make_mesh((4,), ("x",)), P("x"))
>>> t.t().placements, t[:, 2:].placements, t[:4].placements
((Shard(dim=1),), (Shard(dim=0),), (Replicate(),))

The compiler chooses the sharding of a slice of a split axis, which is not known before; its
placements are those of DTensor, which gathers the axis.
"""

from __future__ import annotations

from jax.sharding import NamedSharding

from isoshard.core.layout.uneven import Sizes
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.view_dims import view_axes, view_spec

from . import marks


def sharding_of_view(
    tensor: lazy_tensor.LazyTensor, *, gathered: bool = False
) -> NamedSharding | None:
    """The sharding of a tensor, or of the view that it is; None where it is not known.

    Args:
        tensor: on the `jax` device.
        gathered: a view of a slice of a split axis counts as replicated along it.
    """
    chain = tensor._chain
    if not chain.ops:
        return marks.requested_sharding(tensor)
    sharding = marks.sharding_of_memory(tensor._storage)
    if sharding is None:
        return None
    spec = view_spec(chain, sharding.spec, gathered=gathered)
    return None if spec is None else NamedSharding(sharding.mesh, spec)


def sizes_of_view(tensor: lazy_tensor.LazyTensor, sizes: Sizes) -> Sizes | None:
    """The block sizes of a view of memory with these block sizes; None if not known."""
    axes = view_axes(tensor._chain)
    split = {axis for axis, blocks in enumerate(sizes) if blocks is not None}
    if axes is None or not split <= {*axes}:
        return None
    return tuple(None if axis is None else sizes[axis] for axis in axes)
