"""An MLP with two hidden layers, mean squared error, SGD.

Small, so what a framework adds to each step shows.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.problem import Problem

LEARNING_RATE = 0.05


@dataclasses.dataclass(frozen=True)
class Size:
    """Features in and out, features between, and rows of a batch."""

    width: int = 512
    hidden: int = 2048
    batch: int = 128


class MLP(nn.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self, size: Size):
        """Make the modules."""
        super().__init__()
        self.fc1 = nn.Linear(size.width, size.hidden)
        self.fc2 = nn.Linear(size.hidden, size.hidden)
        self.fc3 = nn.Linear(size.hidden, size.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, width)` to the same shape."""
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


def loss(module: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Mean squared error."""
    return F.mse_loss(module(x), y)


def batch(size: Size, number: int) -> tuple[np.ndarray, ...]:
    """Random rows; the targets are the rows, shifted by one."""
    x = np.random.default_rng(number).standard_normal((size.batch, size.width), np.float32)
    return x, np.roll(x, 1, axis=1)


def problem(size: Size) -> Problem:
    """The training problem at this size."""
    return Problem(
        name="mlp",
        size=size,
        build=lambda: MLP(size),
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=LEARNING_RATE),
        max_norm=None,
        specs=(
            ("fc[13].weight", ("model", None)),  # outputs split
            ("fc[13].bias", ("model",)),
            ("fc2.weight", (None, "model")),  # inputs split
        ),
        batch_spec=("data",),
        batch=functools.partial(batch, size),
    )
