"""ViT-B: 12 encoder layers of 12 heads over patches of an image, AdamW."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import nn

from benchmarks.models import images
from benchmarks.models.block import SPECS, Block
from benchmarks.models.problem import Problem

LEARNING_RATE = 3e-4
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Size:
    """Extents of the model and of a batch; the defaults are ViT-B/16's at 224."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    image: int = 224
    patch: int = 16
    classes: int = 1000
    batch: int = 32


class ViT(nn.Module):
    """A classifier of images by the class token."""

    def __init__(self, size: Size):
        """Make the modules."""
        super().__init__()
        length = (size.image // size.patch) ** 2 + 1
        self.patches = nn.Conv2d(3, size.width, size.patch, size.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, size.width))
        self.position = nn.Parameter(0.02 * torch.randn(1, length, size.width))
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, causal=False, epsilon=EPSILON) for _ in range(size.layers)
        )
        self.ln = nn.LayerNorm(size.width, EPSILON)
        self.head = nn.Linear(size.width, size.classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map `(batch, 3, side, side)` images to `(batch, classes)` logits."""
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x)[:, 0])


def problem(size: Size) -> Problem:
    """The training problem at this size."""
    return Problem(
        name="vit",
        size=size,
        build=lambda: ViT(size),
        loss=images.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        max_norm=None,
        specs=SPECS,
        batch_spec=("data",),
        batch=functools.partial(images.batch, size),
    )
