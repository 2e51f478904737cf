"""GPT-2 small: a decoder of 12 layers and 12 heads, AdamW, gradients clipped to norm 1.

Pre-LayerNorm, learned positions, GELU in its tanh form, the head tied to the embedding, no dropout
(its random numbers differ between frameworks).
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.models.block import SPECS, Block
from benchmarks.models.problem import Problem

LEARNING_RATE, MAX_NORM = 3e-4, 1.0


@dataclasses.dataclass(frozen=True)
class Size:
    """Extents of the model and of a batch; the defaults are GPT-2 small's."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    length: int = 1024
    batch: int = 8


class GPT2(nn.Module):
    """A decoder-only language model."""

    def __init__(self, size: Size):
        """Make the modules."""
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.length, size.width))
        self.blocks = nn.ModuleList(
            Block(size.width, size.heads, causal=True, gelu="tanh") for _ in range(size.layers)
        )
        self.ln = nn.LayerNorm(size.width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length)` token numbers to `(batch, length, vocabulary)` logits."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln(x), self.token.weight)


def loss(module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())


def batch(size: Size, number: int) -> tuple[np.ndarray, ...]:
    """Sequences that count upwards in random strides: learnable within a few steps."""
    rng = np.random.default_rng(number)
    start, stride = rng.integers(0, size.vocabulary, (2, size.batch, 1))
    tokens = (start + (1 + stride % 3) * np.arange(size.length + 1)) % size.vocabulary
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def problem(size: Size) -> Problem:
    """The training problem at this size."""
    return Problem(
        name="gpt2",
        size=size,
        build=lambda: GPT2(size),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        max_norm=MAX_NORM,
        specs=(
            ("token.weight", ("model", None)),  # vocabulary split
            *SPECS,
        ),
        batch_spec=("data",),
        batch=functools.partial(batch, size),
    )
