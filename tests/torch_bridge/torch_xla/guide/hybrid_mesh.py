"""A mesh over two slices; here, over one, since a host's virtual CPU devices are one."""

import collections

import torch
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla.distributed.spmd import HybridMesh

ici_mesh_shape, dcn_mesh_shape = (2, 4, 1), (1, 1, 1)
mesh = HybridMesh(ici_mesh_shape, dcn_mesh_shape, ("data", "fsdp", "tensor"))
assert mesh.shape() == collections.OrderedDict([("data", 2), ("fsdp", 4), ("tensor", 1)])
assert sorted(mesh.device_ids.tolist()) == list(range(8))
assert HybridMesh(ici_mesh_shape=ici_mesh_shape).shape() == {0: 2, 1: 4, 2: 1}

t = xs.mark_sharding(torch.randn(8, 4).to(xm.xla_device()), mesh, ("data", "fsdp"))
xm.mark_step()
assert [shard.data.shape for shard in t.local_shards] == [(4, 1)] * 8
