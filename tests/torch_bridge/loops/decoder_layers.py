"""Layers of a small decoder, for the tests of `scan_layers`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS = 8, 2


class Block(nn.Module):
    """A decoder layer: views, unbind, attention with a mask, LayerNorm, dropout, a buffer."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)
        self.narrow = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("gain", torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, mask: Any = None, *, scale: float = 1.0) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, HEADS, width // HEADS)
        q, k, v = parts.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        wide = self.wide(x * self.gain)
        wide.clamp_(min=-0.5)
        return x + self.dropout(self.narrow(F.gelu(wide))) * scale


def stack(count: int = 4, **options: Any) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(Block(**options) for _ in range(count))


def batch(seed: int = 1) -> torch.Tensor:
    return torch.from_numpy(
        np.random.default_rng(seed).standard_normal((2, 6, WIDTH)).astype(np.float32)
    )


def one_by_one(layers: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


def close(got: torch.Tensor, want: torch.Tensor, **options: Any) -> None:
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5, **options)


class Model(nn.Module):
    """Layers inside something larger."""

    def __init__(self, layers: Any):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if not isinstance(self.blocks, nn.ModuleList):
            return self.blocks(x)
        return one_by_one(self.blocks, x)


class Odd(nn.Module):
    """Tied weights, an absent bias, a buffer that is not saved, and a number of steps."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight
        self.register_buffer("mask", torch.randn(WIDTH), persistent=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps.add_(1)
        return self.down(self.up(x) * self.mask)


def odd(count: int = 3, seed: int = 0) -> nn.ModuleList:
    torch.manual_seed(seed)
    return nn.ModuleList(Odd() for _ in range(count))


def same_state(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert torch.equal(got[name].cpu(), tensor.cpu()), name
        assert got[name].dtype == tensor.dtype
