"""Eager mode: every operation runs at once, but for a step that is compiled."""

import functools

import numpy as np
import torch
import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from _models import Decoder, on_cpu, started, token_loss, tokens

xr.use_spmd()
STEPS = 2
batch = tokens(8)
adam = functools.partial(torch.optim.Adam, lr=0.01)
device = torch_xla.device()
mesh = xs.Mesh(np.arange(8), (8,), ("data",))


def executions():
    return met.counter_value("ExecuteReplicated") or 0


def train(wrap=lambda step: step):
    model = started(functools.partial(Decoder, depth=1), device)
    optimizer, losses, counts = adam(model.parameters()), [], []
    ids, wanted = (t.to(device) for t in batch)
    xs.mark_sharding(ids, mesh, ("data", None))
    torch_xla.sync()

    def update(ids, wanted):
        optimizer.zero_grad()
        loss = token_loss(model, ids, wanted)
        loss.backward()
        optimizer.step()
        return loss

    step = wrap(update)
    for _ in range(STEPS):
        met.clear_all()
        losses.append(step(ids, wanted))
        counts.append(executions())
    return [loss.item() for loss in losses], counts[-1]


want = on_cpu(functools.partial(Decoder, depth=1), token_loss, adam, batch, STEPS)
torch_xla.experimental.eager_mode(True)
assert torch_xla.experimental.is_eager_mode()
losses, count = train()
assert np.allclose(losses, want, rtol=1e-4) and count > 50
for wrap in (torch_xla.compile, torch_xla.experimental.compile):
    losses, count = train(wrap)
    assert np.allclose(losses, want, rtol=1e-4) and count == 1, count
with torch_xla.experimental.eager_mode_context(False):
    assert not torch_xla.experimental.is_eager_mode()
