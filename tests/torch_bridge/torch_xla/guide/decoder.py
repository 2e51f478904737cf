"""A decoder on one chip: a loader, a compiled step, closures."""

import functools
import itertools

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.utils.utils as xu
from _models import Decoder, on_cpu, started, token_loss, tokens

STEPS = 3
batch = tokens(4)
adam = functools.partial(torch.optim.Adam, lr=0.01)
device = torch_xla.device()
want = on_cpu(Decoder, token_loss, adam, batch, STEPS)
assert want[-1] < want[0]

loader = pl.MpDeviceLoader(xu.SampleGenerator(data=batch, sample_count=100), device)
model = started(Decoder, device)
optimizer = adam(model.parameters())


def update(ids, wanted):
    optimizer.zero_grad()
    loss = token_loss(model, ids, wanted)
    loss.backward()
    optimizer.step()
    return loss


compiled = torch_xla.compile(update, full_graph=True, name="update")
reported, losses = {}, []
rate = xm.RateTracker()
model.train()
for number, (ids, wanted) in enumerate(itertools.islice(loader, STEPS)):
    assert ids.device == device
    losses.append(compiled(ids, wanted))
    rate.add(len(ids))
    if number % 2 == 0:  # what is added last runs at the next step
        xm.add_step_closure(reported.__setitem__, args=(number, losses[-1]))
torch_xla.sync()
xm.wait_device_ops()
losses = [loss.item() for loss in losses]
assert rate.rate() > 0
assert np.allclose(losses, want, rtol=1e-4)
assert {number: loss.item() for number, loss in reported.items()} == {
    number: losses[number] for number in (0, 2)
}
