"""How views lie: as the memory that they show, where they take the axes that are split as a whole.

>>> from isoshard import P, make_mesh, shard
>>> import torch
>>> t = shard(torch.zeros(8, 6), make_mesh((4,), ("x",)), P("x"))
>>> t.t().placements, t[:, 2:].placements, t[:4].placements
((Shard(dim=1),), (Shard(dim=0),), (Replicate(),))

A slice of an axis that is split lies as the compiler wants it, which is not known before; its
placements are those that DTensor gives it, which gathers the axis.
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
    """The layout of a tensor, or of the view that it is; None where it is not known.

    Args:
        tensor: on the `jax` device.
        gathered: a view that shows only a part of an axis that is split counts as whole along it.
    """
    chain = tensor._chain
    if not chain.ops:
        return marks.asked(tensor)
    found = marks.sharding_of_memory(tensor._storage)
    if found is None:
        return None
    seen = view_spec(chain, found.spec, gathered=gathered)
    return None if seen is None else NamedSharding(found.mesh, seen)


def sizes_of_view(tensor: lazy_tensor.LazyTensor, sizes: Sizes) -> Sizes | None:
    """The blocks of a view of memory that lies in blocks of these sizes; None if not known."""
    axes = view_axes(tensor._chain)
    split = {axis for axis, own in enumerate(sizes) if own is not None}
    if axes is None or not split <= {*axes}:
        return None
    return tuple(None if axis is None else sizes[axis] for axis in axes)
