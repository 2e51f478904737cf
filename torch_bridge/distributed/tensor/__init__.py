"""torch.distributed.tensor's names, for tensors on the `jax` device.

`DTensor` is the class of those on a mesh, for `isinstance`; all are `XLAShardedTensor`s.
`Placement`, `Shard`, `Replicate` and `Partial` are torch's own.

>>> import torch
>>> from isoshard.torch_bridge.distributed import init_device_mesh
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> t = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0), Replicate()])
>>> isinstance(t, DTensor), t.placements, t.to_local().shape
(True, (Shard(dim=0), Replicate()), torch.Size([4, 6]))
>>> isinstance(torch.ones(2).to("jax"), DTensor)
False
>>> DTensor.from_local(t.to_local(), mesh, [Partial(), Replicate()]).shape    # summed over dp
torch.Size([4, 6])
"""

if __name__ != "isoshard.torch_bridge.distributed.tensor":
    raise ImportError(f"import isoshard.torch_bridge.distributed.tensor, not {__name__}")

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from isoshard.torch_bridge.distributed.device_mesh import DeviceMesh, init_device_mesh

from .distributing import distribute_module, distribute_tensor
from .dtensor_class import DTensor
from .factories import empty, full, ones, rand, randn, zeros

__all__ = [
    "DTensor",
    "DeviceMesh",
    "Partial",
    "Placement",
    "Replicate",
    "Shard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "init_device_mesh",
    "ones",
    "rand",
    "randn",
    "zeros",
]
