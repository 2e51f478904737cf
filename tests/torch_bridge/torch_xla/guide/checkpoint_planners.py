"""`torch.distributed.checkpoint` with the SPMD planners; restored on another mesh."""

import tempfile

import numpy as np
import torch
import torch.distributed.checkpoint as dist_cp
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.experimental.distributed_checkpoint as xc
import torch_xla.runtime as xr

xr.use_spmd()
device_ids = np.arange(xr.global_runtime_device_count())


def make(seed, mesh_shape):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8))
    model = model.to(xm.xla_device())
    mesh = xs.Mesh(device_ids, mesh_shape, ("x", "y"))
    for layer in model:
        xs.mark_sharding(layer.weight, mesh, ("x", "y"))
    optim = torch.optim.AdamW(model.parameters())
    return model, optim


model, optim = make(0, (2, 4))
model(torch.randn(4, 16).to(xm.xla_device())).sum().backward()
optim.step()
torch_xla.sync()
with tempfile.TemporaryDirectory() as CHECKPOINT_DIR:
    state_dict = {"model": model.state_dict(), "optim": optim.state_dict()}
    dist_cp.save(
        state_dict=state_dict,
        storage_writer=dist_cp.FileSystemWriter(CHECKPOINT_DIR),
        planner=xc.SPMDSavePlanner(),
    )
    other, _ = make(1, (4, 2))
    state_dict = {"model": other.state_dict()}
    dist_cp.load(
        state_dict=state_dict,
        storage_reader=dist_cp.FileSystemReader(CHECKPOINT_DIR),
        planner=xc.SPMDLoadPlanner(),
    )
    other.load_state_dict(state_dict["model"])

for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
    assert torch.equal(ours.cpu(), theirs.cpu())
assert other[0].weight.sharding_spec == "{devices=[4,2]0,1,2,3,4,5,6,7}"
assert other[0].weight.local_shards[0].data.shape == (8, 8)
