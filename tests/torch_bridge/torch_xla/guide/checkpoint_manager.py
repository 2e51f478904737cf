"""The CheckpointManager: every tenth step, asynchronously, and on again from the last."""

import tempfile

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.experimental.distributed_checkpoint import CheckpointManager

xr.use_spmd()
mesh = xs.Mesh(np.arange(xr.global_runtime_device_count()), (8,), ("x",))


def make():
    model = torch.nn.Linear(16, 8).to(xm.xla_device())
    xs.mark_sharding(model.weight, mesh, ("x", None))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


with tempfile.TemporaryDirectory() as path:
    model, optim = make()
    chkpt_mgr = CheckpointManager(path, 10)
    taken = []
    for step in range(31):
        model(torch.randn(4, 16).to(xm.xla_device())).square().sum().backward()
        optim.step()
        optim.zero_grad()
        torch_xla.sync()
        state_dict = {"model": model.state_dict(), "optim": optim.state_dict()}
        if chkpt_mgr.save_async(step, state_dict):
            taken.append((step, model.weight.cpu().clone()))
    chkpt_mgr.join()
    assert [step for step, _ in taken] == [0, 10, 20, 30]

    model, optim = make()
    chkpt_mgr = CheckpointManager(path, 10)
    tracked_steps = chkpt_mgr.all_steps()
    assert sorted(tracked_steps) == [0, 10, 20, 30]
    for step, weight in taken:
        state_dict = {"model": model.state_dict()}
        chkpt_mgr.restore(step, state_dict)
        model.load_state_dict(state_dict["model"])
        assert torch.equal(model.weight.cpu(), weight)
