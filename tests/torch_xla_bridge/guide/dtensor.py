"""torch's own `distribute_tensor` and `distribute_module` on an xla device mesh."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch_xla.distributed.spmd import XLAShardedTensor, auto_policy

xr.use_spmd()
world_size = xr.global_runtime_device_count()
mesh = DeviceMesh("xla", list(range(world_size)))
big_tensor = torch.randn(1000, 88)
my_dtensor = distribute_tensor(big_tensor, mesh, [Shard(0)])
assert isinstance(my_dtensor, XLAShardedTensor) and my_dtensor.device == xm.xla_device()
assert my_dtensor.placements == (Shard(0),)
assert my_dtensor.sharding_spec == "{devices=[8,1]0,1,2,3,4,5,6,7}"
xm.mark_step()
assert torch.equal(my_dtensor.local_shards[1].data, big_tensor[125:250])
two = DeviceMesh("xla", torch.arange(world_size).reshape(2, 4))
for placements, text in (
    ([Replicate(), Shard(1)], "{devices=[1,4,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"),
    ([Shard(0), Shard(0)], "{devices=[8,1]0,1,2,3,4,5,6,7}"),
):
    assert distribute_tensor(big_tensor, two, placements).sharding_spec == text


def shard_params(name, module, mesh):
    if isinstance(module, nn.Linear):
        for parameter in module.parameters():
            distribute_tensor(parameter, mesh, [Shard(0)])


model = distribute_module(nn.Linear(8, 16).to("xla"), mesh, shard_params)
assert model.weight.sharding_spec == "{devices=[8,1]0,1,2,3,4,5,6,7}"

torch.manual_seed(0)  # and by the policy, which moves the module
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
want = model(torch.ones(4, 32))
sharded_model = distribute_module(model, mesh, auto_policy)
assert sharded_model[0].weight.device == xm.xla_device()
got = sharded_model(torch.ones(4, 32).to(xm.xla_device()))
torch_xla.sync()
assert torch.allclose(got.cpu(), want, atol=1e-5)
assert "devices=" in torch_xla._XLAC._get_xla_sharding_spec(sharded_model[0].weight)
