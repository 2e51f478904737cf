"""`torch.compile` with the backend `openxla`: inference, training, a mark inside the graph."""

import functools

import numpy as np
import torch
import torch_xla
import torch_xla.runtime as xr
from _models import Decoder, on_cpu, started, token_loss, tokens

xr.use_spmd()
STEPS = 4
chips = xr.global_runtime_device_count()
batch = tokens(8)
sgd = functools.partial(torch.optim.SGD, lr=0.1)
device = torch_xla.device()
ids, wanted = (t.to(device) for t in batch)


def moved_inside(a, b):
    return a.to(torch_xla.device()) + b.to(torch_xla.device())


a, b = torch.randn(2, 5)
total = torch.compile(moved_inside, backend="openxla")(a, b)
assert total.device == device and torch.equal(total.cpu(), a + b)

model = started(functools.partial(Decoder, depth=1), device).eval()
compiled = torch.compile(model, backend="openxla")
with torch.no_grad():
    for _ in range(2):
        scores = compiled(ids)
want = started(functools.partial(Decoder, depth=1)).eval()(batch[0])
torch.testing.assert_close(scores.cpu(), want.detach(), rtol=1e-4, atol=1e-5)


def update(model, ids, wanted, optimizer):
    loss = token_loss(model, ids, wanted)
    loss.backward()
    optimizer.step()
    return loss


update, optimizer, losses = torch.compile(update, backend="openxla"), sgd(model.parameters()), []
for _ in range(STEPS):
    optimizer.zero_grad()
    losses.append(update(model, ids, wanted, optimizer).item())
want = on_cpu(functools.partial(Decoder, depth=1), token_loss, sgd, batch, STEPS)
assert np.allclose(losses, want, rtol=1e-4)


def marked(x):
    doubled = x * 2
    grid, names = [chips // 2, 2], "('data', 'model')"
    torch.ops.xla.dynamo_mark_sharding(doubled, list(range(chips)), grid, names, names)
    return doubled


doubled = torch.compile(marked, backend="openxla")(torch.ones(8, 8, device=device))
assert torch.equal(doubled.cpu(), torch.full((8, 8), 2.0))
assert [piece.data.shape for piece in doubled.local_shards] == [(2, 4)] * chips
