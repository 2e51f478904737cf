"""A ResNet whose batch is split over all chips by the loader; batch norm sees the whole batch."""

import functools
import itertools

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import torch_xla.utils.utils as xu
from _models import image_loss, images, on_cpu, resnet, started

xr.use_spmd()
STEPS = 4
chips = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(chips), (chips,), ("data",))
batch = images(2 * chips)
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
    assert [piece.data.shape for piece in pictures.local_shards] == [(2, 3, 16, 16)] * chips
    losses.append(update(pictures, classes))
losses = [loss.item() for loss in losses]
assert np.allclose(losses, on_cpu(resnet, image_loss, sgd, batch, STEPS), rtol=1e-3)
assert losses[-1] < losses[0]
assert model[0].weight.local_shards[3].data.shape == model[0].weight.shape  # whole on each chip
