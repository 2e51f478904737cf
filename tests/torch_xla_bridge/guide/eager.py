"""Eager mode: every operation runs at once, but for a step that is compiled."""

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

xr.use_spmd()
device = torch_xla.device()
mesh = xs.Mesh(np.arange(8), (8,), ("data",))


def train(device, wrap=lambda step: step):
    torch.manual_seed(0)
    layer, batch = torch.nn.Linear(4, 4).to(device), torch.randn(8, 4).to(device)
    optimizer, losses, counts = torch.optim.SGD(layer.parameters(), lr=0.1), [], []
    if device != "cpu":
        xs.mark_sharding(batch, mesh, ("data", None))
    torch_xla.sync()

    def update(batch):
        optimizer.zero_grad()
        loss = layer(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = wrap(update)
    for _ in range(2):
        met.clear_all()
        losses.append(step(batch))
        counts.append(met.counter_value("ExecuteReplicated") or 0)
    return [loss.item() for loss in losses], counts[-1]


want, _ = train("cpu")
torch_xla.experimental.eager_mode(True)
assert torch_xla.experimental.is_eager_mode()
losses, count = train(device)
assert np.allclose(losses, want, rtol=1e-4) and count > 5, count
for wrap in (torch_xla.compile, torch_xla.experimental.compile):
    losses, count = train(device, wrap)
    assert np.allclose(losses, want, rtol=1e-4) and count == 1, count
with torch_xla.experimental.eager_mode_context(False):
    assert not torch_xla.experimental.is_eager_mode()
