"""torch.distributed.tensor's names, for tensors on the `jax` device."""

if __name__ != "isoshard.torch_bridge.distributed.tensor":
    raise ImportError(f"import isoshard.torch_bridge.distributed.tensor, not {__name__}")

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from isoshard.torch_bridge.tensor import XLAShardedTensor as DTensor

from .distributing import distribute_module, distribute_tensor
from .factories import empty, full, ones, rand, randn, zeros

__all__ = [
    "DTensor",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "ones",
    "rand",
    "randn",
    "zeros",
]
