"""A small residual network on images: data parallel over all devices, wide weights split.

Its functions are smooth. At the kink of a ReLU the last bit of a sum decides about a gradient, and
a few steps later about the third digit of a loss.
"""

import numpy as np
import report
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

STEPS, BATCH, CLASSES = 10, 16, 8


class Block(nn.Module):
    """Two convolutions with batch normalisation, and a way around them."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        self.around = nn.Identity()
        if stride > 1 or inside != outside:
            self.around = nn.Sequential(
                nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)
            )

    def forward(self, x):
        y = F.silu(self.bn1(self.conv1(x)))
        return F.silu(self.bn2(self.conv2(y)) + self.around(x))


class Net(nn.Module):
    """A stem, three blocks and a head."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 1, 1)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        x = F.max_pool2d(F.silu(self.stem(x)), 2)
        x = self.blocks(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


xr.use_spmd()
devices = xr.global_runtime_device_count()
mesh = xs.Mesh(np.arange(devices), (devices // 2, 2), ("data", "model"))
device = torch_xla.device()

torch.manual_seed(0)
model = Net()
labels = torch.randint(CLASSES, (STEPS, BATCH))
images = torch.randn(STEPS, BATCH, 3, 16, 16) + torch.randn(CLASSES, 3, 16, 16)[labels]

model.to(device)
report.mark("stem.weight", model.stem.weight, mesh, (None, None, None, None))
report.mark("head.weight", model.head.weight, mesh, ("model", ("data",)))
for name, parameter in model.blocks.named_parameters(prefix="blocks"):
    if parameter.dim() == 4 and parameter.shape[0] >= 32:
        report.mark(name, parameter, mesh, (1, None, None, None))
    elif "bn2" in name and name.endswith("weight"):
        report.mark(name, parameter, mesh, ("model",))

optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
losses = []
for image, label in zip(images, labels, strict=True):
    x, y = image.to(device), label.to(device)
    report.mark("x", x, mesh, (("data", "model"), None, None, None))
    report.mark("y", y, mesh, ((0, 1),))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    xm.mark_step()
    losses.append(loss.detach())
report.finish(losses, model.named_parameters())
