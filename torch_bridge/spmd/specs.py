"""`ShardingSpec`: a mesh and a spec, to be applied to tensors."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from isoshard.core.layout.mesh import as_mesh
from isoshard.core.layout.spec import normalize_spec
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .marking import mark_sharding
from .op_sharding import OpSharding


@dataclasses.dataclass(frozen=True)
class XlaShardingSpec:
    """The sharding of one tensor, from a `ShardingSpec` that fits its rank.

    Attributes:
        sharding: the sharding.
        shape: of the tensor.
        minibatch: as in the `ShardingSpec`.
    """

    sharding: OpSharding
    shape: torch.Size
    minibatch: bool

    def __str__(self) -> str:
        """The OpSharding string."""
        return str(self.sharding)


@dataclasses.dataclass
class ShardingSpec:
    """A mesh and a spec, to be applied to tensors (those of a data loader, for instance).

    Attributes:
        mesh: an `xs.Mesh`, or a `jax.sharding.Mesh`.
        partition_spec: one entry per tensor axis.
        minibatch: each process loads its own rows of a batch only.

    Raises:
        SpecError: an entry is no axis of the mesh, or an axis is used twice.

    Example:
        >>> from isoshard.torch_bridge.spmd import Mesh
        >>> spec = ShardingSpec(Mesh(range(8), (2, 4), ("data", "model")), ("data", None))
        >>> spec.can_apply(torch.ones(8)), spec.can_apply(torch.ones(8, 8))
        (False, True)
        >>> print(spec.xla_spec(torch.ones(8, 8)))
        {devices=[2,1,4]0,1,2,3,4,5,6,7 last_tile_dim_replicate}
    """

    mesh: Any
    partition_spec: Any
    minibatch: bool | None = False

    def __post_init__(self) -> None:
        """Check that the spec fits the mesh."""
        normalize_spec(self.partition_spec, as_mesh(self.mesh), len(self.partition_spec))

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether the spec has one entry per axis of `t`."""
        return t.dim() == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> XLAShardedTensor:
        """Mark `t`; see `mark_sharding`."""
        return mark_sharding(t, self.mesh, self.partition_spec)

    def xla_spec(self, t: torch.Tensor) -> XlaShardingSpec | None:
        """The sharding for `t`, or None if the spec does not fit its rank."""
        if not self.can_apply(t):
            return None
        sharding = OpSharding.of(as_mesh(self.mesh), self.partition_spec)
        return XlaShardingSpec(sharding, t.shape, bool(self.minibatch))
