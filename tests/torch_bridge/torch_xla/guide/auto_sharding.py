"""Auto-sharding by `distribute_module` and `auto_policy`."""

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch.distributed import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch_xla.distributed.spmd import auto_policy

device_count = xr.global_runtime_device_count()
device_mesh = DeviceMesh("xla", list(range(device_count)))

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
want = model(torch.ones(4, 32))
sharded_model = distribute_module(model, device_mesh, auto_policy)
assert sharded_model[0].weight.device == xm.xla_device()
got = sharded_model(torch.ones(4, 32).to(xm.xla_device()))
torch_xla.sync()
assert torch.allclose(got.cpu(), want, atol=1e-5)
assert "devices=" in torch_xla._XLAC._get_xla_sharding_spec(sharded_model[0].weight)
