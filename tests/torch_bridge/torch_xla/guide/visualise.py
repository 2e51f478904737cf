"""Pictures of shardings."""

import numpy as np
import torch
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.distributed.spmd.debugging import visualize_sharding, visualize_tensor_sharding

xr.use_spmd()
mesh = xs.Mesh(np.arange(8), (4, 2), ("x", "y"))
t = torch.randn(8, 4, device="xla")
xs.mark_sharding(t, mesh, ("x", "y"))
table = visualize_tensor_sharding(t, use_color=False)
assert len(table.rows) == 4 and len(table.columns) == 2

table = visualize_sharding("{devices=[2,2]0,1,2,3}", use_color=False)
assert len(table.rows) == 2 and len(table.columns) == 2
