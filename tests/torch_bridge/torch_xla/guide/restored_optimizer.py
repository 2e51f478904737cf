"""A run that stops and goes on: the optimizer is primed, and restored with the model."""

import tempfile

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla.experimental.distributed_checkpoint import CheckpointManager, prime_optimizer

xr.use_spmd()
mesh = xs.Mesh(np.arange(8), (4, 2), ("fsdp", "model"))


def run(folder, until, save_every=5):
    torch.manual_seed(3)
    model = torch.nn.Linear(16, 8).to(xm.xla_device())
    xs.mark_sharding(model.weight, mesh, ("model", "fsdp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def state():
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager, first = CheckpointManager(folder, save_every), 0
    steps = manager.all_steps()
    if steps:
        prime_optimizer(optimizer)
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
    return first, model, optimizer


with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as stopped:
    _, want, _ = run(whole, 9)
    run(stopped, 7)
    first, got, optimizer = run(stopped, 9)
assert first == 6
assert torch.equal(got.weight.cpu(), want.weight.cpu())
assert [piece.data.shape for piece in got.weight.local_shards] == [(4, 4)] * 8
moment = optimizer.state[got.weight]["exp_avg"]
assert [piece.data.shape for piece in moment.local_shards] == [(4, 4)] * 8
