"""GPT-2 small: a decoder of 12 layers and 12 heads, AdamW, gradients clipped to norm 1.

Pre-LayerNorm, learned positions, GELU in its tanh form, the head tied to the embedding, no dropout
(its random numbers differ between frameworks).

The output of `qkv` is ordered head by head (q, k and v of head 0, then of head 1, ..), so that
splitting it over devices gives each device whole heads.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

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


class Block(nn.Module):
    """Attention and a two-layer MLP, each behind a LayerNorm and a residual connection."""

    def __init__(self, size: Size):
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length, width)` to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, self.heads, 3, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """A decoder-only language model."""

    def __init__(self, size: Size):
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(0.02 * torch.randn(size.length, size.width))
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.ln = nn.LayerNorm(size.width)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length)` token numbers to `(batch, length, vocabulary)` logits."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.ln(x), self.token.weight)


def loss(module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())


def batch(size: Size, number: int) -> tuple[np.ndarray, ...]:
    """Sequences that count upwards in random strides: learnable within a few steps."""
    rng = np.random.default_rng(number)
    start, stride = rng.integers(0, size.vocabulary, (2, size.batch, 1))
    tokens = (start + (1 + stride % 3) * np.arange(size.length + 1)) % size.vocabulary
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


def problem(size: Size) -> Problem:
    return Problem(
        name="gpt2",
        size=size,
        build=lambda: GPT2(size),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
        max_norm=MAX_NORM,
        specs=(
            ("token.weight", ("model", None)),  # vocabulary split
            ("*.qkv.weight", ("model", None)),  # outputs split: whole heads
            ("*.qkv.bias", ("model",)),
            ("*.proj.weight", (None, "model")),  # inputs split
            ("*.fc1.weight", ("model", None)),
            ("*.fc1.bias", ("model",)),
            ("*.fc2.weight", (None, "model")),
        ),
        batch_spec=("data",),
        batch=functools.partial(batch, size),
    )
