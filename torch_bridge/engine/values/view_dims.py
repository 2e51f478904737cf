"""View dim map: which axes of its memory a view shows, and so how a view is sharded.

>>> import torch, isoshard.torch_bridge
>>> view = torch.ones(4, 6, 2, device="jax")[1].t()[:, 3:]
>>> view_axes(view._chain), view_spec(view._chain, PartitionSpec("y", None, "x"), gathered=True)
((2, None), P('x',))
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

from jax.sharding import PartitionSpec

from isoshard.core.layout.spec import axis_names

from .views import Chain

Origins = tuple[int | None, ...]


@overload
def view_spec(chain: Chain, spec: PartitionSpec, *, gathered: Literal[True]) -> PartitionSpec: ...


@overload
def view_spec(chain: Chain, spec: PartitionSpec, *, gathered: bool) -> PartitionSpec | None: ...


def view_spec(chain: Chain, spec: PartitionSpec, *, gathered: bool) -> PartitionSpec | None:
    """The spec of a view; None where it is not known.

    Args:
        chain: the view.
        spec: of its memory.
        gathered: a view of only a part of a split axis counts as unsharded along it.
    """
    entries = [*spec, *[None] * (len(chain.base.meta.size) - len(spec))]
    split = [axis for axis, entry in enumerate(entries) if axis_names(entry)]
    axes = view_axes(chain)
    if axes is None:
        return PartitionSpec() if gathered else None
    if not (gathered or {*split} <= {*axes}):
        return None
    seen = [None if axis is None else entries[axis] for axis in axes]
    while seen and seen[-1] is None:
        seen.pop()
    return PartitionSpec(*seen)


def view_axes(chain: Chain) -> Origins | None:
    """For each axis of a view the axis of the memory that it is, None if it is not a whole axis.

    None for a view without such a map.
    """
    shown = chain.recipes.get("axes shown")
    if shown is None:
        shown = chain.recipes["axes shown"] = (_followed(chain),)
    return shown[0]


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
            followed = [axis if have == want else None for axis, have, want in pairs]
            axes, size = axes[: len(op[1]) - len(size)] + followed, op[1]
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
