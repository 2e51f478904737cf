"""A ResNet in mixed precision: bfloat16 where it pays, float32 for norms and losses."""

import functools

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from _models import image_loss, images, on_cpu, resnet, started
from torch.nn import functional
from torch_xla.amp import autocast, syncfree

STEPS = 5
batch = images(8)
device = torch_xla.device()
pictures, classes = (t.to(device) for t in batch)


def train(context):
    model = started(resnet, device)
    optimizer, losses = syncfree.SGD(model.parameters(), lr=0.1), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with context():
            scores = model(pictures)
            loss = functional.cross_entropy(scores, classes)
        assert (scores.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
        loss.backward()
        assert model[0].weight.grad.dtype == torch.float32
        xm.optimizer_step(optimizer)
        torch_xla.sync()
        losses.append(loss.item())
    return losses


want = on_cpu(resnet, image_loss, functools.partial(torch.optim.SGD, lr=0.1), batch, STEPS)
losses = train(lambda: autocast(torch_xla.device()))
assert np.allclose(losses, want, rtol=0.05) and losses[-1] < losses[0]
assert losses == train(lambda: torch.autocast("xla"))

# The rules of the guide's page, one operator of each list.
x = torch.rand(4, 4, device=device)
half = x.bfloat16()
with autocast(device):
    assert {(x @ x).dtype, x.relu().dtype, functional.linear(x, x).dtype} == {torch.bfloat16}
    assert functional.max_pool2d(x[None], 2).dtype == torch.bfloat16
    assert {half.log_softmax(0).dtype, half.prod().dtype, half.trace().dtype} == {torch.float32}
    assert functional.batch_norm(half, None, None, training=True).dtype == torch.float32
    assert functional.binary_cross_entropy(half, half).dtype == torch.float32
    assert torch.linalg.svd(half)[1].dtype == torch.float32
    assert torch.cat([x, half]).dtype == torch.stack([half, x]).dtype == torch.float32
    assert (half + half).dtype == torch.bfloat16 and (x + x).dtype == torch.float32
