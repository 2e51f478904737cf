"""OpSharding: XLA's description of a sharding, as torch_xla's scripts get it.

>>> sharding = OpSharding([[0, 1], [2, 3]], [], [], 3)
>>> sharding
OpSharding({devices=[2,2]0,1,2,3})
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from isoshard.core.errors import UnrepresentableError
from isoshard.core.layout.spec import SpecLike, named_sharding
from isoshard.core.layout.tiles import Tiles
from isoshard.torch_bridge.layout.marks import ShardingType, groups, ordinal, sharding_type


@dataclasses.dataclass(frozen=True, repr=False)
class OpSharding:
    """A sharding over all devices, without a mesh.

    Attributes:
        tile_assignment: device ids as nested lists: a grid of blocks for a tiled sharding, with
            the copies of each block along a last axis for a partly replicated one.
        group_assignment: for a partly replicated sharding, the index of each block's group of
            devices, as a grid of blocks; otherwise empty.
        replication_groups: for a partly replicated sharding, the devices of each group.
        sharding_type: how it divides a tensor.
    """

    tile_assignment: Any
    group_assignment: Any
    replication_groups: Any
    sharding_type: ShardingType

    def __post_init__(self) -> None:
        """Convert the type from an int, and nested lists to tuples."""
        object.__setattr__(self, "sharding_type", ShardingType(self.sharding_type))
        for name in ("tile_assignment", "group_assignment", "replication_groups"):
            object.__setattr__(self, name, _frozen(getattr(self, name)))

    @classmethod
    def of(cls, mesh: jax.sharding.Mesh, partition_spec: SpecLike) -> OpSharding:
        """The sharding of a spec over a mesh.

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

    def grid(self, ndim: int) -> np.ndarray:
        """The devices of each block.

        Args:
            ndim: rank of the tensor.

        Returns:
            Integers of shape (blocks along each tensor axis .., copies).

        Raises:
            UnrepresentableError: it is neither replicated nor tiled, or for another rank.

        >>> OpSharding([[0, 1], [2, 3]], [], [], 3).grid(2).shape
        (2, 2, 1)
        """
        kind = self.sharding_type
        if kind == ShardingType.REPLICATED:
            return np.arange(len(jax.devices())).reshape((1,) * ndim + (-1,))
        ids = np.array(self.tile_assignment)
        grid = ids[..., None] if kind == ShardingType.TILED else ids
        tiled = kind in (ShardingType.TILED, ShardingType.PARTIAL)
        if not tiled or grid.ndim != ndim + 1:
            raise UnrepresentableError(
                f"{self!r} does not split a tensor of rank {ndim} into blocks; pass a sharding of "
                "mesh.get_op_sharding(spec) with an entry for each of its axes"
            )
        return grid

    def spec_over(self, mesh: jax.sharding.Mesh, ndim: int) -> jax.sharding.PartitionSpec:
        """The spec of this sharding over a mesh.

        Args:
            mesh: of the same devices.
            ndim: rank of the tensor.

        Raises:
            UnrepresentableError: no spec over the mesh does.

        >>> from isoshard.core.layout.mesh import make_mesh
        >>> mesh = make_mesh((2, 4), ("x", "y"))
        >>> OpSharding.of(mesh, (None, "y")).spec_over(mesh, 2)
        P(None, 'y')
        """
        if self.sharding_type == ShardingType.REPLICATED:
            return jax.sharding.PartitionSpec()
        positions = {ordinal(device): at for at, device in enumerate(mesh.devices.flat)}
        grid = self.grid(ndim)
        if set(grid.flat) != set(positions):
            raise UnrepresentableError(f"{self!r} is over other devices than the mesh {mesh}")
        tiles = np.vectorize(positions.__getitem__, otypes=[int])(grid)
        return Tiles(tiles).to_spec(mesh)

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
