"""A ResNet whose batch a loader splits over all chips; then in mixed precision on one."""

import functools
import itertools

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu
from _models import image_loss, images, on_cpu, resnet, started
from torch.nn import functional
from torch_xla.amp import autocast, syncfree

xr.use_spmd()
STEPS = 2
chips = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(chips), (chips,), ("data",))
batch = images(chips)
sgd = functools.partial(torch.optim.SGD, lr=0.1, weight_decay=1e-4)
device = torch_xla.device()
loader = pl.MpDeviceLoader(
    xu.SampleGenerator(data=batch, sample_count=100),
    device,
    input_sharding=xs.ShardingSpec(mesh, ("data", None, None, None)),
)
model = started(resnet, device)
optimizer = sgd(model.parameters())


@torch_xla.compile(full_graph=True)
def update(pictures, classes):
    optimizer.zero_grad()
    loss = image_loss(model, pictures, classes)
    loss.backward()
    optimizer.step()
    return loss


losses = []
for pictures, classes in itertools.islice(loader, STEPS):
    assert [piece.data.shape for piece in pictures.local_shards] == [(1, 3, 8, 8)] * chips
    losses.append(update(pictures, classes))
want = on_cpu(resnet, image_loss, sgd, batch, STEPS)  # batch norm saw the whole batch
assert np.allclose([loss.item() for loss in losses], want, rtol=1e-3)
assert model[0].weight.local_shards[3].data.shape == model[0].weight.shape  # whole on each chip

pictures, classes = (t.to(device) for t in batch)


def train():
    model = started(resnet, device)
    optimizer, losses = syncfree.SGD(model.parameters(), lr=0.1, weight_decay=1e-4), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with autocast(torch_xla.device()):
            scores = model(pictures)
            loss = functional.cross_entropy(scores, classes)
        assert (scores.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        loss.backward()
        assert model[0].weight.grad.dtype == torch.float32
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        losses.append(loss.item())
    return losses


losses = train()
assert np.allclose(losses, want, rtol=0.05) and losses[-1] < losses[0]
