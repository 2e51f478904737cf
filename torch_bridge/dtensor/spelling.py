"""DTensor placements as a spelling of a spec: `iso.shard(x, mesh, [Shard(0), Replicate()])`.

>>> import torch, isoshard as iso
>>> from torch.distributed.tensor import Replicate, Shard
>>> mesh = iso.make_mesh((2, 4), ("data", "x"))
>>> iso.shard(torch.zeros(8, 3), mesh, [Replicate(), Shard(0)]).partition_spec
P('x',)
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import SpecError
from isoshard.core.layout.spec import SpecLike, register_spelling
from isoshard.core.layout.tiles import Tiles

from ..placements.translation import spec_of


def is_placements(spec: SpecLike) -> bool:
    """Whether an object is a sequence of torch's placements; does not import their module."""
    kinds = sys.modules.get("torch.distributed.tensor.placement_types")
    return (
        kinds is not None
        and isinstance(spec, Sequence)
        and len(spec) > 0
        and all(isinstance(placement, kinds.Placement) for placement in spec)
    )


def tiles_of(spec: Sequence[Any], mesh: Mesh, ndim: int) -> Tiles:
    """The tiles of placements, one placement per mesh axis.

    Raises:
        SpecError: they do not fit the mesh or the tensor.
    """
    names = mesh.axis_names
    if len(spec) != len(names):
        raise SpecError(
            f"{len(spec)} placements {tuple(spec)} for a mesh of {len(names)} axes {names}; give "
            "one Shard(dim) or Replicate() per mesh axis"
        )
    try:
        entries = spec_of(spec, ndim, mesh.axis_sizes)
    except (IndexError, NotImplementedError) as error:
        raise SpecError(f"placements {tuple(spec)} do not fit: {error}") from None
    named = [
        None
        if entry is None
        else tuple(names[n] for n in ([entry] if isinstance(entry, int) else entry))
        for entry in entries
    ]
    return Tiles.from_spec(P(*named), mesh, ndim)


def register() -> None:
    """Register placements as a spelling of specs in core."""
    register_spelling(is_placements, tiles_of)
