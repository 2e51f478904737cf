"""Specs by name, partial replication, and several mesh axes for one tensor axis."""

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import Mesh

xr.use_spmd()
device_ids = np.arange(xr.global_runtime_device_count())


def spec_of(t):
    return torch_xla._XLAC._get_xla_sharding_spec(t)


mesh = Mesh(device_ids, (4, 2), ("data", "model"))
input_tensor = torch.randn(4, 8, device="xla")
xs.mark_sharding(input_tensor, mesh, ("model", "data"))
assert spec_of(input_tensor) == "{devices=[2,4]0,2,4,6,1,3,5,7}"

mesh = Mesh(device_ids, (2, 2, 2), ("x", "y", "z"))
input_tensor = torch.randn(4, 8, device="xla")
xs.mark_sharding(input_tensor, mesh, ("x", "z"))
assert spec_of(input_tensor) == "{devices=[2,2,2]0,2,1,3,4,6,5,7 last_tile_dim_replicate}"

mesh = Mesh(device_ids, (2, 2, 2), ("replica", "fsdp", "tensor"))
two_d_partially_replicated = torch.randn(64, 64, device="xla")
xs.mark_sharding(two_d_partially_replicated, mesh, ("fsdp", "tensor"))
assert spec_of(two_d_partially_replicated) == (
    "{devices=[2,2,2]0,4,1,5,2,6,3,7 last_tile_dim_replicate}"
)
two_d_fully_sharded = torch.randn(64, 64, device="xla")
xs.mark_sharding(two_d_fully_sharded, mesh, (("replica", "fsdp"), "tensor"))
assert spec_of(two_d_fully_sharded) == "{devices=[4,2]0,1,2,3,4,5,6,7}"
four_d = torch.randn(8, 8, 8, 8, device="xla")
xs.mark_sharding(four_d, mesh, ("replica", "fsdp", None, "tensor"))
assert spec_of(four_d) == "{devices=[2,2,1,2]0,1,2,3,4,5,6,7}"

torch_xla.sync()
assert four_d.local_shards[3].data.shape == (4, 4, 8, 4)
