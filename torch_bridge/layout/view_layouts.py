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

import math
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from isoshard.core.layout.spec import axis_names
from isoshard.core.layout.uneven import Sizes
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.views import Chain

from . import marks

Origins = tuple[int | None, ...]


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
    count = len(chain.base.meta.size)
    entries = [*found.spec, *[None] * (count - len(found.spec))]
    split = [axis for axis, entry in enumerate(entries) if axis_names(entry)]
    axes = axes_shown(chain)
    if gathered and axes is None:
        axes = (None,) * tensor.dim()
    if axes is None or not (gathered or {*split} <= {*axes}):
        return None
    seen = [None if axis is None else entries[axis] for axis in axes]
    while seen and seen[-1] is None:
        seen.pop()
    return NamedSharding(found.mesh, PartitionSpec(*seen))


def sizes_of_view(tensor: lazy_tensor.LazyTensor, sizes: Sizes) -> Sizes | None:
    """The blocks of a view of memory that lies in blocks of these sizes; None if not known."""
    axes = axes_shown(tensor._chain)
    split = {axis for axis, own in enumerate(sizes) if own is not None}
    if axes is None or not split <= {*axes}:
        return None
    return tuple(None if axis is None else sizes[axis] for axis in axes)


def axes_shown(chain: Chain) -> Origins | None:
    """For each axis of a view the axis of the memory that it is, None if it is none as a whole.

    None for a view of which that cannot be said.
    """
    found = chain.recipes.get("axes shown")
    if found is None:
        found = chain.recipes["axes shown"] = (_followed(chain),)
    return found[0]


def _followed(chain: Chain) -> Origins | None:
    size = tuple(chain.base.meta.size)
    axes: list[int | None] = list(range(len(size)))
    for op in chain.ops:
        kind = op[0]
        if kind == "permute":
            axes, size = [axes[dim] for dim in op[1]], tuple(size[dim] for dim in op[1])
        elif kind == "slice":
            _, dim, start, stop, step = op
            axes[dim] = None
            size = (*size[:dim], max(0, -(-(stop - start) // step)), *size[dim + 1 :])
        elif kind == "index":
            del axes[op[1]]
            size = (*size[: op[1]], *size[op[1] + 1 :])
        elif kind == "expand":
            axes = [None] * (len(op[1]) - len(size)) + axes
            pairs = zip(axes[-len(size) :] if size else [], size, op[1][-len(size) :], strict=False)
            kept = [axis if have == want else None for axis, have, want in pairs]
            axes, size = axes[: len(op[1]) - len(size)] + kept, op[1]
        elif kind == "reshape":
            axes, size = _reshaped(axes, size, op[1]), op[1]
        else:
            return None
    return tuple(axes)


def _reshaped(axes: list[int | None], have: Any, want: Any) -> list[int | None]:
    """Axes with as many elements, and as many before them, are the same."""
    if 0 in (*have, *want):
        return [None] * len(want)
    before = {
        (math.prod(have[:at]), size): axis
        for at, (size, axis) in enumerate(zip(have, axes, strict=True))
        if size != 1
    }
    return [before.get((math.prod(want[:at]), size)) for at, size in enumerate(want)]
