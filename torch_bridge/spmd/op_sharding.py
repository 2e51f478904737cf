"""OpSharding: XLA's description of a layout, as torch_xla hands it out.

>>> sharding = OpSharding([[0, 1], [2, 3]], [], [], 3)
>>> sharding
OpSharding({devices=[2,2]0,1,2,3})
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from isoshard.core.spec import named_sharding
from isoshard.torch_bridge.layout.marks import ShardingType, groups, sharding_type


@dataclasses.dataclass(frozen=True, repr=False)
class OpSharding:
    """A layout over all devices, without a mesh.

    Attributes:
        tile_assignment: device numbers as nested lists: a grid of blocks for a tiled layout, with
            the copies of each block along a last axis for a partly replicated one.
        group_assignment: for a partly replicated layout, the number of each block's group of
            devices, as a grid of blocks; otherwise empty.
        replication_groups: for a partly replicated layout, the devices of each group.
        sharding_type: how it divides a tensor.
    """

    tile_assignment: Any
    group_assignment: Any
    replication_groups: Any
    sharding_type: ShardingType

    def __post_init__(self) -> None:
        """Take numbers for types, and lists of any depth."""
        object.__setattr__(self, "sharding_type", ShardingType(self.sharding_type))
        for name in ("tile_assignment", "group_assignment", "replication_groups"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh, partition_spec: Any) -> OpSharding:
        """The layout of a spec over a mesh.

        Args:
            mesh: of any axis types.
            partition_spec: one entry per tensor axis.

        Raises:
            SpecError: an entry is no axis of the mesh, or an axis is used twice.
        """
        ndim = len(partition_spec)
        sharding = named_sharding(partition_spec, mesh, ndim)
        kind, grid = sharding_type(sharding, ndim), groups(sharding, ndim)
        if kind == ShardingType.REPLICATED:
            return cls([], [], [], kind)
        if kind == ShardingType.TILED:
            return cls(grid[..., 0].tolist(), [], [], kind)
        blocks = grid.shape[:-1]
        members = grid.reshape(-1, grid.shape[-1]).tolist()
        return cls(grid.tolist(), np.arange(len(members)).reshape(blocks).tolist(), members, kind)

    @property
    def text(self) -> str:
        """As XLA prints it."""
        if self.sharding_type not in (ShardingType.TILED, ShardingType.PARTIAL):
            return f"{{{self.sharding_type.name.lower()}}}"
        grid = np.array(self.tile_assignment)
        shape = ",".join(map(str, grid.shape))
        partial = self.sharding_type == ShardingType.PARTIAL
        tail = " last_tile_dim_replicate" if partial else ""
        return f"{{devices=[{shape}]{','.join(map(str, grid.ravel()))}{tail}}}"

    def __str__(self) -> str:
        """As XLA prints it."""
        return self.text

    def __repr__(self) -> str:
        """With its class, as XLA prints it."""
        return f"OpSharding({self.text})"


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
