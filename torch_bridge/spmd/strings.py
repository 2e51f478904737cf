"""What torch_xla's internal functions tell of any tensor's layout."""

from __future__ import annotations

import torch

from isoshard.torch_bridge.layout.marks import ShardingType
from isoshard.torch_bridge.tensor import XLAShardedTensor


def sharding_spec_of(t: torch.Tensor) -> str:
    """The layout as torch_xla writes it; empty if the tensor is not marked, or not on the device.

    >>> import isoshard.torch_bridge as xs
    >>> mesh = xs.Mesh(range(8), (8,), ("x",))
    >>> sharding_spec_of(xs.mark_sharding(torch.ones(8).to("jax"), mesh, ("x",)))
    '{devices=[8]0,1,2,3,4,5,6,7}'
    >>> sharding_spec_of(torch.ones(8))
    ''
    """
    return t.sharding_spec if isinstance(t, XLAShardedTensor) else ""


def sharding_type_of(t: torch.Tensor) -> ShardingType | None:
    """How the layout divides the tensor; None if it is not marked, or not on the device."""
    return t.sharding_type if isinstance(t, XLAShardedTensor) else None
