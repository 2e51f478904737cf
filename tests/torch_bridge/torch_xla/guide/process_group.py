"""A CPU process group beside SPMD."""

import torch.distributed as dist
import torch_xla.distributed.xla_backend  # noqa: F401  (registers the xla:// init_method)
import torch_xla.runtime as xr

xr.use_spmd()
dist.init_process_group("gloo", init_method="xla://")
assert dist.get_world_size() == 1
dist.destroy_process_group()
