"""A script of torch_xla's SPMD mode that reads back what it marked; run by `run-torch-xla`."""

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from raising import raises
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch_xla.distributed.spmd import XLAShardedTensor
from torch_xla.distributed.spmd.debugging import construct_v1_sharding_str
from torch_xla.distributed.spmd.xla_sharding import wrap_as_sharded_tensor

xr.use_spmd()
mesh = xs.Mesh(np.arange(8), (2, 4))


# --- Specs as they were written, after redistribute too.
t = xs.mark_sharding(torch.randn(8, 16).to("xla"), mesh, (0, None))
assert t.partition_spec == (0, None)
assert construct_v1_sharding_str(t) == t.sharding_spec
for placements, spec in (
    ([Replicate(), Shard(1)], (None, 1)),
    ([Shard(1), Shard(0)], (1, 0)),
    ([Replicate(), Replicate()], (None, None)),
):
    moved = t.redistribute(mesh, placements)
    assert moved.partition_spec == spec, moved.partition_spec
    torch_xla.sync()
    assert torch.equal(moved.cpu(), t.cpu())

# --- DTensor's spec, kept until the layout is another.
flat = DeviceMesh("xla", torch.arange(8))
d = distribute_tensor(torch.randn(16, 8), flat, [Shard(0)])
assert d._cached_spec is None
spec = d._spec
assert spec is d._spec is d._cached_spec
assert spec.mesh.device_type == "xla" and spec.mesh.shape == flat.shape
assert spec.placements == (Shard(0),) and spec.tensor_meta.shape == (16, 8)
raises(ValueError, lambda: (d + d)._spec)
raises(ValueError, lambda: (d + d).placements)
assert "mesh_shape" in raises(ValueError, lambda: torch.ones(2).to("xla").placements)
w = wrap_as_sharded_tensor(torch.randn(8, 8).to("xla"), mesh_shape=(8,), partition_spec=(0, None))
first = w._spec
w = wrap_as_sharded_tensor(w, mesh_shape=(2, 4), partition_spec=(0, 1))
assert w.mesh_shape == (2, 4) and w.partition_spec == (0, 1)
assert w._spec is not first and w._spec.placements == (Shard(0), Shard(1))
assert isinstance(w, XLAShardedTensor)

# --- What a tensor prints.
assert str(t).startswith("XLAShardedTensor(tensor(") and "device='xla:0'" in str(t)
assert "XLAShardedTensor" in str(t @ t.t())
assert str(torch.ones(2, device="xla")).startswith("tensor([1., 1.], device='xla:0'")

# --- Counters.
met.clear_all()
again = xs.Mesh(np.arange(8), (2, 4))
for spec, layouts in (((0, 1), 1), ((0, 1), 1), ((0, None), 2)):
    xs.mark_sharding(torch.ones(8, 8).to("xla"), again, spec)
    assert met.counter_value("CreateOpSharding") == layouts
assert met.counter_value("VirtualDeviceUsage") == 3
met.clear_all()
t.cpu()
assert met.counter_value("ReplicateShardedData") == 1

# --- Errors by the classes that torch_xla's users catch.
x = torch.ones(8, 8).to("xla")
for wrong in ((0,), (0, 0), (2, None), ((0, (1,)), None)):
    raises(AssertionError, xs.mark_sharding, x, mesh, wrong)
raises(ValueError, xs.mark_sharding, x, mesh, ("q", None))
raises(ValueError, xs.mark_sharding, x, mesh, (1.5, None))
assert ".to('xla')" in raises(RuntimeError, xs.mark_sharding, torch.ones(8, 8), mesh, (0, 1))
raises(RuntimeError, xs.mark_sharding, t, mesh, (1, None))
for ids, shape, names in (
    (range(8), (2, 3), None),
    (range(8), (2, 4), ("x",)),
    (range(8), (2, 4), ("x", "x")),
    ([0] * 8, (2, 4), None),
    (range(1, 9), (2, 4), None),
):
    raises(AssertionError, xs.Mesh, ids, shape, names)

assert xm.is_xla_tensor(x)
print("all is read as it was written")
