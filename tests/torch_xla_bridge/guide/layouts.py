"""Meshes, specs, which device holds what, pictures, and a CPU process group beside them."""

import collections

import numpy as np
import torch
import torch.distributed as dist
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.distributed.xla_backend  # registers the xla:// init_method
import torch_xla.runtime as xr
from torch_xla.distributed.spmd import HybridMesh, Mesh
from torch_xla.distributed.spmd.debugging import visualize_sharding, visualize_tensor_sharding

xr.use_spmd()
num_devices = xr.global_runtime_device_count()
device_ids = np.array(range(num_devices))

# A mesh with and without names, and over two slices; here over one, since a host is one.
mesh = Mesh(device_ids, (num_devices // 2, 2), ("x", "y"))
assert mesh.get_logical_mesh().tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
assert mesh.shape() == collections.OrderedDict([("x", 4), ("y", 2)])
assert mesh.size() == 8 and mesh.get_axis_name_idx("y") == 1
assert Mesh(device_ids, (4, 2)).shape() == collections.OrderedDict([(0, 4), (1, 2)])
assert Mesh.from_str(str(mesh)).shape() == mesh.shape()
ici_mesh_shape, dcn_mesh_shape = (2, 4, 1), (1, 1, 1)
hybrid = HybridMesh(ici_mesh_shape, dcn_mesh_shape, ("data", "fsdp", "tensor"))
assert hybrid.shape() == collections.OrderedDict([("data", 2), ("fsdp", 4), ("tensor", 1)])
assert sorted(hybrid.device_ids.tolist()) == list(range(8))
assert HybridMesh(ici_mesh_shape=ici_mesh_shape).shape() == {0: 2, 1: 4, 2: 1}

# Specs by name, partial replication, and several mesh axes for one tensor axis.
cube = ((2, 2, 2), ("replica", "fsdp", "tensor"))
for (shape, names), rank, spec, text in (
    (cube, 2, ("replica", "tensor"), "[2,2,2]0,2,1,3,4,6,5,7 last_tile_dim_replicate}"),
    (cube, 2, (("replica", "fsdp"), "tensor"), "[4,2]0,1,2,3,4,5,6,7}"),
    (cube, 4, ("replica", "fsdp", None, "tensor"), "[2,2,1,2]0,1,2,3,4,5,6,7}"),
):
    t = torch.randn(*[8] * rank, device="xla")
    xs.mark_sharding(t, Mesh(device_ids, shape, names), spec)
    assert torch_xla._XLAC._get_xla_sharding_spec(t) == "{devices=" + text
    torch_xla.sync()
assert t.local_shards[3].data.shape == (4, 4, 8, 4)

# Which device holds what: tensors of other ranks than the mesh, and the rule of the guide.
mesh = xs.Mesh(device_ids, (4, 2), ("data", "model"))
assert [chip["name"] for chip in xr.global_runtime_device_attributes()] == [
    f"CPU:{number}" for number in range(8)
]


def pieces(whole, spec):
    marked = xs.mark_sharding(whole.to(torch_xla.device()), mesh, spec)
    xm.mark_step()
    assert torch.equal(marked.cpu(), whole)
    return [piece.data for piece in marked.local_shards]


table = torch.arange(64.0).reshape(8, 8)
for number, piece in enumerate(pieces(table, ("data", "model"))):
    row, column = divmod(number, 2)
    assert torch.equal(piece, table[row * 2 : (row + 1) * 2, column * 4 : (column + 1) * 4])
assert {piece.shape for piece in pieces(torch.randn(8, 8, 16), (None, "data", "model"))} == {
    (8, 2, 8)
}
line = torch.arange(8.0)
assert [p.tolist() for p in pieces(line, ("data",))][::2] == line.reshape(4, 2).tolist()
assert [piece.item() for piece in pieces(line, (("data", "model"),))] == list(range(8))

# Pictures.
t = xs.mark_sharding(torch.randn(8, 4, device="xla"), mesh, ("data", "model"))
drawn = visualize_tensor_sharding(t, use_color=False)
assert len(drawn.rows) == 4 and len(drawn.columns) == 2
drawn = visualize_sharding("{devices=[2,2]0,1,2,3}", use_color=False)
assert len(drawn.rows) == 2 and len(drawn.columns) == 2

dist.init_process_group("gloo", init_method="xla://")
assert dist.get_world_size() == 1
dist.destroy_process_group()
