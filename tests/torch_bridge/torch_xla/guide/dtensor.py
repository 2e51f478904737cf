"""`torch.distributed.tensor.distribute_tensor` on an xla device mesh."""

import torch
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

xr.use_spmd()
world_size = xr.global_runtime_device_count()
mesh = DeviceMesh("xla", list(range(world_size)))
big_tensor = torch.randn(1000, 88)
my_dtensor = distribute_tensor(big_tensor, mesh, [Shard(0)])
assert my_dtensor.device == xm.xla_device()
assert my_dtensor.placements == (Shard(0),)
assert my_dtensor.sharding_spec == "{devices=[8,1]0,1,2,3,4,5,6,7}"
xm.mark_step()
assert torch.equal(my_dtensor.local_shards[1].data, big_tensor[125:250])

two = DeviceMesh("xla", torch.arange(world_size).reshape(2, 4))
other = distribute_tensor(big_tensor, two, [Replicate(), Shard(1)])
assert other.sharding_spec == "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
