"""A script that does what only torch_xla allows in SPMD mode; run by `run-torch-xla`."""

import os
from pathlib import Path
from unittest.mock import patch

import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from raising import raises
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate, Shard, distribute_module
from torch_xla.distributed.spmd import XLAShardedTensor, auto_policy
from torch_xla.distributed.spmd.api import convert_to_xla_mesh

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
