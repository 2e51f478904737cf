"""Reading placements: of what kind each is, which tensor axis it splits, and in which order.

>>> from torch.distributed.tensor.placement_types import Shard, _StridedShard
>>> orders_of((_StridedShard(0, split_factor=4), Shard(0)), 1, (2, 4))      # the right one first
[[1, 0]]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from isoshard.core.errors import ShardingError, SpecError, UnrepresentableError
from isoshard.torch_bridge.common.argument_types import PlacementLike


def kind_of(axis: int, placement: PlacementLike) -> str:
    """Tell what a placement is.

    Returns:
        `"Shard"`, `"_StridedShard"`, `"Replicate"`, or `"Partial"` for that and all made from it.

    Raises:
        SpecError: it is none of torch's, or several.
    """
    kind = type(placement).__name__
    if kind in ("Shard", "_StridedShard", "Replicate"):
        return kind
    if getattr(placement, "is_partial", None) and placement.is_partial():
        return "Partial"
    if isinstance(placement, tuple | list):
        raise SpecError(
            f"mesh axis {axis} has {len(placement)} placements, {placement!r}: it splits one "
            "tensor axis, or has terms of a sum (Partial), or neither. Pass one placement per mesh "
            "axis."
        )
    raise SpecError(f"{placement!r} is no placement; pass Shard(dim) or Replicate()")


def reduction_of(placements: Mapping[str, PlacementLike]) -> str:
    """The reduction of partial placements: "sum", or from JAX 0.12 on "max" or "min".

    Raises:
        UnrepresentableError: JAX has none of the kind, or the axes have several.
    """
    kinds = [kind.name for kind in getattr(jax.sharding, "UnreducedKind", ())] or ["sum"]
    by = "sum"
    for name, placement in placements.items():
        by = getattr(placement, "reduce_op", "")
        if type(placement).__name__ != "Partial" or by not in kinds:
            raise UnrepresentableError(
                f"mesh axis {name!r} has the placement {placement!r}, and JAX's unreduced axes "
                f"({jax.__version__}) support {' or '.join(kinds)} only. "
                "Reduce it first: t.redistribute(placements=..) with Replicate() there, or "
                "iso.to_jax(t, reduce=True)."
            )
    if len({getattr(placement, "reduce_op", "") for placement in placements.values()}) > 1:
        raise UnrepresentableError(
            f"mesh axes {', '.join(placements)} have the placements {(*placements.values(),)}, and "
            "a JAX array is reduced by one operation along all its unreduced axes. Reduce one "
            "first: t.redistribute(placements=..) with Replicate() there."
        )
    return by


def factor_of(placement: PlacementLike) -> int:
    """The split factor of a placement, 1 for one that has none."""
    return int(getattr(placement, "split_factor", 1))


def split_axes(placements: Sequence[Any], ndim: int) -> list[list[int]]:
    """The mesh axes that split each tensor axis, from the left.

    Args:
        placements: one per mesh axis.
        ndim: rank of the tensor.

    Raises:
        IndexError: a placement names an axis that the tensor does not have.
        SpecError: as `kind_of`.
    """
    split: list[list[int]] = [[] for _ in range(ndim)]
    for axis, placement in enumerate(placements):
        if kind_of(axis, placement) not in ("Shard", "_StridedShard"):
            continue
        if not -ndim <= placement.dim < ndim:
            raise IndexError(
                f"mesh axis {axis} has the placement {placement!r}, and a tensor of rank {ndim} "
                f"has no axis {placement.dim}"
            )
        split[placement.dim % ndim].append(axis)
    return split


def orders_of(
    placements: Sequence[Any], ndim: int, mesh_shape: Sequence[int] | None
) -> list[list[int]]:
    """The mesh axes that split each tensor axis, outermost first.

    Args:
        placements: one per mesh axis.
        ndim: rank of the tensor.
        mesh_shape: devices along each mesh axis; needed if there are split factors.

    Raises:
        UnrepresentableError: a split factor is that of no order.
        ShardingError: `mesh_shape` is required.
        IndexError, SpecError: as `split_axes`.
    """
    split = split_axes(placements, ndim)
    if all(factor_of(placement) == 1 for placement in placements):
        return split
    if mesh_shape is None:
        raise ShardingError(
            f"{tuple(placements)} has split factors, which define an order of mesh axes by their "
            "sizes: pass spec_of(placements, ndim, mesh_shape)"
        )
    return [_order(axes, placements, mesh_shape) for axes in split]


def _order(axes: list[int], placements: Sequence[Any], mesh_shape: Sequence[int]) -> list[int]:
    """Read an order out of split factors.

    From the right, each axis goes where the sizes before it multiply to its factor. Those further
    left come later and do not count, so there is one such position, but for axes of size 1.
    """
    order: list[int] = []
    for axis in reversed(axes):
        products = [math.prod(mesh_shape[a] for a in order[:at]) for at in range(len(order) + 1)]
        factor = factor_of(placements[axis])
        if factor in products:
            order.insert(products.index(factor), axis)
        elif mesh_shape[axis] == 1:
            order.insert(0, axis)  # splits nothing, at any position
        else:
            raise UnrepresentableError(
                f"mesh axis {axis} has the placement {placements[axis]!r}: it splits each of "
                f"{factor} parts of tensor axis {placements[axis].dim}, and the mesh axes to its "
                f"right make {' or '.join(map(str, dict.fromkeys(products)))}, so this is no order "
                "of mesh axes and no PartitionSpec expresses it. View that tensor axis as "
                f"({factor}, -1) and split the second, or redistribute to Shard first."
            )
    return order
