"""Models that the tests of FSDP wrap."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from isoshard.torch_bridge.torch_xla.distributed.fsdp.wrap import (
    transformer_auto_wrap_policy,
)
from tests.torch_bridge.loops.decoder_layers import WIDTH, Block

VOCABULARY, LENGTH, BATCH, STEPS = 32, 6, 8, 3


class Decoder(nn.Module):
    """Embedding, blocks, and a head tied to the embedding."""

    def __init__(self, layers: int = 2):
        super().__init__()
        torch.manual_seed(0)
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Identity(nn.Module):
    """Returns what it is told to."""

    def __init__(self, weight: torch.Tensor | None = None, output: Any = None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8) if weight is None else weight)
        self.output = output

    def forward(self, x: torch.Tensor) -> Any:
        y = x * 1
        return y if self.output is None else self.output(y)


LAYERS = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
