"""ResNet-50: bottlenecks in stages of 3, 4, 6 and 3, BatchNorm in training mode, SGD with momentum.

Written out in plain `torch.nn` (the stride is on the 3x3 convolution, as in torchvision's). `width`
scales every channel count; at 64 it is ResNet-50.

The batch is split over all devices and the parameters are replicated, as ResNets are trained.
BatchNorm's statistics are those of the whole batch: on a mesh a tensor is one tensor.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models import images
from benchmarks.models.problem import Problem

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.02, 0.9, 1e-4
STAGES = (3, 4, 6, 3)
EXPANSION = 4


@dataclasses.dataclass(frozen=True)
class Size:
    """Channels after the stem, image side, classes, images of a batch; defaults: ResNet-50's."""

    width: int = 64
    image: int = 224
    classes: int = 1000
    batch: int = 64


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm, around a shortcut."""

    def __init__(self, channels: int, width: int, stride: int):
        """Make the modules."""
        super().__init__()
        out = EXPANSION * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        nn.init.zeros_(self.bn3.weight)  # every block starts as its shortcut (Goyal et al., 2017)
        self.shortcut = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, channels, side, side)` to 4 x `width` channels."""
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet50(nn.Module):
    """A classifier of images."""

    def __init__(self, size: Size):
        """Make the modules."""
        super().__init__()
        self.conv = nn.Conv2d(3, size.width, 7, 2, padding=3, bias=False)
        self.bn = nn.BatchNorm2d(size.width)
        stages, channels = [], size.width
        for number, count in enumerate(STAGES):
            width = size.width * 2**number
            blocks = []
            for block in range(count):
                blocks.append(Bottleneck(channels, width, 2 if number and not block else 1))
                channels = EXPANSION * width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, size.classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, 3, side, side)` images to `(batch, classes)` logits."""
        x = F.max_pool2d(F.relu(self.bn(self.conv(x))), 3, 2, padding=1)
        return self.head(F.adaptive_avg_pool2d(self.stages(x), 1).flatten(1))


def optimizer(parameters) -> torch.optim.Optimizer:
    """SGD with momentum and weight decay."""
    return torch.optim.SGD(
        parameters, lr=LEARNING_RATE, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY
    )


def problem(size: Size) -> Problem:
    """The training problem at this size."""
    return Problem(
        name="resnet50",
        size=size,
        build=lambda: ResNet50(size),
        loss=images.loss,
        optimizer=optimizer,
        max_norm=None,
        specs=(),
        batch_spec=(("data", "model"),),
        batch=functools.partial(images.batch, size),
    )
