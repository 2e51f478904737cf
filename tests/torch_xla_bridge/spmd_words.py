"""A script of torch_xla's SPMD mode: what only it allows, and what it reads of its marks.

Run by `run-torch-xla`.
"""

import os
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch.distributed.tensor import (
    DeviceMesh,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch_xla.distributed.spmd import XLAShardedTensor, auto_policy
from torch_xla.distributed.spmd.api import convert_to_xla_mesh
from torch_xla.distributed.spmd.debugging import construct_v1_sharding_str
from torch_xla.distributed.spmd.xla_sharding import wrap_as_sharded_tensor


def raises(kind, function, *args):
    """The error's words; fails unless it is raised."""
    try:
        function(*args)
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


_XLAC = torch_xla._XLAC
xr.use_spmd()
mesh = xs.get_1d_mesh("x")
flat = DeviceMesh("xla", torch.arange(8))


# --- Classes that are floats.
scores = torch.randn(8, 5)
classes = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2])
pictures, map_of_classes = torch.randn(2, 5, 3, 3), torch.ones(2, 3, 3)
for logits, target in ((scores, classes), (pictures, map_of_classes)):
    here = logits.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy(here, target.long())
    loss.backward()
    there = logits.to("xla").requires_grad_()
    found = torch.nn.functional.cross_entropy(there, target.float().to("xla"))
    found.backward()
    torch.testing.assert_close(found.detach().cpu(), loss.detach())
    torch.testing.assert_close(there.grad.cpu(), here.grad)

# --- Comparisons with a CPU tensor.
ours = scores.to("xla")
assert (ours == scores).all() and (scores <= ours).all() and torch.allclose(ours, scores)

# --- The layout of what devices hold, and what the host holds.
a = torch.randn(8, 4).to("xla")
info = _XLAC._get_xla_tensor_debug_info
assert _XLAC._get_xla_sharding_spec(a) == "" and _XLAC._get_xla_sharding_type(a) is None
assert "Tensor on host: with size [8, 4]" in info(a) and "XLAData: None" in info(a)
b = a + 1
assert _XLAC._get_xla_sharding_spec(b) == ""
torch_xla.sync()
assert _XLAC._get_xla_sharding_spec(b) == _XLAC._get_xla_sharding_specs([b])[0] == "{replicated}"
assert _XLAC._get_xla_sharding_type(b) == xs.ShardingType.REPLICATED
assert b.sharding_spec == "" and "Tensor on host: None" in info(b)
met.clear_all()
c = torch.ones(16, 2).to("xla")
assert met.metric_data("OutboundData") is None
xs.mark_sharding(c, mesh, ("x", None))
assert met.metric_data("OutboundData")[:2] == (1, 16 * 2 * 4)
assert "TransferToDeviceTime" in met.metric_names()
assert "Tensor on host: None" in info(c) and "NumShards: 8" in info(c)
xs.clear_sharding(c)
assert _XLAC._get_xla_sharding_spec(c) == ""

# --- Inputs whose memory a program may give to its results.
met.clear_all()
d = xs.mark_sharding(torch.ones(8, 3).to("xla"), mesh, ("x", None))
d += 1
torch_xla.sync()
assert met.metric_data("InputOutputAliasCount")[:2] == (1, 1)
assert "Metric: InputOutputAliasCount\n  TotalSamples: 1\n  Accumulator: 1.00" in (
    met.metrics_report()
)

# --- Reads of what lies on several devices, in pieces or whole.
met.clear_all()
whole = d.sum()
torch_xla.sync()
assert met.counter_value("ReplicateShardedData") is None
whole.cpu(), d.cpu(), b.cpu()
assert met.counter_value("ReplicateShardedData") == 2

# --- What was read from a mesh has `global_tensor`, other CPU tensors have not.
e = d.requires_grad_()
host = (e * 2).cpu()
assert host.requires_grad and host.global_tensor.numpy().shape == (8, 3)
assert not hasattr(torch.ones(2), "global_tensor") and not hasattr(b.cpu(), "global_tensor")

# --- Tensors of the CPU as XLAShardedTensor; a whole is what a device has of it.
cpu = torch.randn(8, 2, requires_grad=True)
f = XLAShardedTensor(cpu, flat, [Shard(0)])
assert f.placements == (Shard(0),) and f._cached_spec is f._spec
assert f.is_leaf and f.requires_grad and cpu.grad is None
f.sum().backward()
assert f.to_local() is f and torch.equal(f.to_local().grad.cpu(), torch.ones(8, 2))
assert XLAShardedTensor(torch.ones(2)).sharding_spec == ""
for placements in ([Shard(0)], [Replicate()], None):
    g = DTensor.from_local(scores, flat, placements)
    assert g.shape == scores.shape and torch.equal(g.global_tensor.cpu(), scores)
    assert g.placements == tuple(placements or [Replicate()])
plain = torch.randn(8, 2, requires_grad=True)
DTensor.from_local(plain * 2, flat, [Shard(0)]).sum().backward()
assert torch.equal(plain.grad, torch.full((8, 2), 2.0))
pieces = xs.enable_manual_sharding(torch.ones(8, 2).to("xla"), ("x", None), mesh=mesh)
assert DTensor.from_local(pieces, flat, [Shard(0)]).shape == (8, 2)

# --- Meshes.
part = DeviceMesh("xla", list(range(4)))
assert "xs.Mesh(" in raises(AssertionError, convert_to_xla_mesh, part)
assert convert_to_xla_mesh(flat).size() == 8
assert convert_to_xla_mesh(xs.Mesh(range(4), (4,))).size() == 4
chips = [
    {"name": f"TPU:{n}", "coords": [i % 2, i // 2, 0], "core_on_chip": 0, "slice_index": n // 4}
    for n, i in zip((1, 0, 2, 3, 5, 4, 6, 7), (0, 1, 2, 3) * 2, strict=True)
]
with patch("torch_xla.runtime.global_runtime_device_attributes", lambda: chips):
    hybrid = xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(2, 1))
    raises(ValueError, lambda: xs.HybridMesh(ici_mesh_shape=(2, 2), dcn_mesh_shape=(4, 1)))
assert hybrid.get_logical_mesh().tolist() == [[1, 0], [2, 3], [5, 4], [6, 7]]

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

# --- A policy of automatic sharding says so.
assert not _XLAC._xla_get_auto_sharding()
model = distribute_module(torch.nn.Linear(8, 8), flat, auto_policy)
assert _XLAC._xla_get_auto_sharding() and model.weight.sharding_spec.startswith("{devices=[8,1]")

# --- Every program in a file.
text = Path(os.environ["XLA_SAVE_TENSORS_FILE"] + ".0").read_text()
assert text.count("## BEGIN_GRAPH\nHloModule") == text.count("## END_GRAPH\n") > 3
assert "#OUTPUT_SHARDING_BEGIN\nf32[8,3] {devices=[8,1]0,1,2,3,4,5,6,7}\n#OUTPUT_SH" in text
assert "f32[8,4] {replicated}\n" in text and text.endswith("#OUTPUT_SHARDING_END\n\n")
print("all is as torch_xla has it")
