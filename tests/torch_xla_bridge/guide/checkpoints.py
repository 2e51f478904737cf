"""The SPMD planners, and a run that the CheckpointManager saves, which stops and goes on."""

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
    model = torch.nn.Linear(16, 8).to(xm.xla_device())
    xs.mark_sharding(model.weight, xs.Mesh(device_ids, mesh_shape, ("x", "y")), ("x", "y"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def run(folder, until):
    model, optimizer = make(3, (2, 4))

    def state():
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager, first = xc.CheckpointManager(folder, 2), 0
    steps = manager.all_steps()
    if steps:
        xc.prime_optimizer(optimizer)
        held = state()
        manager.restore(max(steps), held)
        model.load_state_dict(held["model"])
        optimizer.load_state_dict(held["optim"])
        first = max(steps) + 1
    for number in range(first, until):
        batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(number)).to("xla")
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        manager.save_async(number, state())
    manager.join()
    assert manager.all_steps() == [0, 2]
    return first, model, optimizer


with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as stopped:
    _, want, _ = run(whole, 4)
    run(stopped, 3)
    first, got, optimizer = run(stopped, 4)
assert first == 3
assert torch.equal(got.weight.cpu(), want.weight.cpu())
for tensor in (got.weight, optimizer.state[got.weight]["exp_avg"]):
    assert [piece.data.shape for piece in tensor.local_shards] == [(4, 4)] * 8

with tempfile.TemporaryDirectory() as CHECKPOINT_DIR:
    state_dict = {"model": got.state_dict(), "optim": optimizer.state_dict()}
    dist_cp.save(
        state_dict=state_dict,
        storage_writer=dist_cp.FileSystemWriter(CHECKPOINT_DIR),
        planner=xc.SPMDSavePlanner(),
    )
    other, _ = make(1, (4, 2))  # on another mesh
    state_dict = {"model": other.state_dict()}
    dist_cp.load(
        state_dict=state_dict,
        storage_reader=dist_cp.FileSystemReader(CHECKPOINT_DIR),
        planner=xc.SPMDLoadPlanner(),
    )
    other.load_state_dict(state_dict["model"])
assert torch.equal(got.weight.cpu(), other.weight.cpu())
assert torch.equal(got.bias.cpu(), other.bias.cpu())
assert other.weight.sharding_spec == "{devices=[4,2]0,1,2,3,4,5,6,7}"
