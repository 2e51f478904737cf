"""DTensor's placements and partition specs: the same layout, said per mesh axis or per tensor axis.

>>> from torch.distributed.tensor import Replicate, Shard
>>> spec_of((Shard(0), Replicate()), 2)
(0, None)
>>> spec_of((Shard(0), Shard(0)), 2)             # both mesh axes split the first tensor axis
((0, 1), None)

Placements count mesh axes from the left, so where several split one tensor axis the left one is
outermost. A spec may also put the right one outermost; placements have no word for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from isoshard.core.errors import SpecError, UnrepresentableError
from isoshard.core.mesh import as_mesh
from isoshard.core.spec import axis_names

Entry = int | tuple[int, ...] | None


def spec_of(placements: Sequence[Any], ndim: int) -> tuple[Entry, ...]:
    """The partition spec, by mesh axis indices, of placements.

    Args:
        placements: one `Shard` or `Replicate` per mesh axis.
        ndim: rank of the tensor; a negative `Shard` dimension counts from its end.

    Raises:
        IndexError: a `Shard` dimension is out of range.
        NotImplementedError: a placement is `Partial`: sums that were not taken yet, which a tensor
            seen as a whole never is.
        SpecError: a placement is none of torch's.
    """
    split: list[list[int]] = [[] for _ in range(ndim)]
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        if placement.is_partial():
            raise NotImplementedError(
                f"mesh axis {axis} has the placement {placement!r}: a tensor here is seen as a "
                "whole, so sums over devices are taken already. Use Shard(dim) or Replicate()."
            )
        if type(placement).__name__ != "Shard":
            raise SpecError(f"{placement!r} is no placement; give Shard(dim) or Replicate()")
        if not -ndim <= placement.dim < ndim:
            raise IndexError(
                f"mesh axis {axis} has the placement {placement!r}, and a tensor of rank {ndim} "
                f"has no axis {placement.dim}"
            )
        split[placement.dim % ndim].append(axis)
    return tuple(tuple(a) if len(a) > 1 else a[0] if a else None for a in split)


def placements_of(sharding: jax.sharding.NamedSharding) -> tuple[Any, ...]:
    """The placements of a layout, one per mesh axis.

    Args:
        sharding: the layout, its spec canonical.

    Raises:
        UnrepresentableError: two mesh axes split one tensor axis, the right one outermost.
    """
    from torch.distributed.tensor import Replicate, Shard

    names = sharding.mesh.axis_names
    where: dict[Any, int] = {}
    for dim, entry in enumerate(sharding.spec):
        axes = axis_names(entry)
        numbers = [names.index(axis) for axis in axes if sharding.mesh.shape[axis] > 1]
        if numbers != sorted(numbers):
            raise UnrepresentableError(
                f"{sharding.spec} splits axis {dim} by {axes}, outermost first, and placements "
                f"always take the mesh axes {names} from the left; see tensor.partition_spec"
            )
        where |= dict.fromkeys(axes, dim)
    return tuple(Shard(where[name]) if name in where else Replicate() for name in names)


def check_count(placements: Sequence[Any], mesh: Any) -> None:
    """Raise ValueError unless there is one placement per mesh axis."""
    names = as_mesh(mesh).axis_names
    if len(placements) != len(names):
        raise ValueError(
            f"{len(placements)} placements for a mesh of {len(names)} axes {names}; give one "
            "Shard(dim) or Replicate() per mesh axis"
        )
