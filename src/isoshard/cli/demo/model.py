"""The model: a decoder-only transformer in plain `torch.nn`, and the one plan that shards it.

Nothing in the model knows of devices. `PLAN` says, by parameter name, how a ("data", "model") mesh
holds it: layers that widen split their outputs over "model", layers that narrow split their inputs,
so that a block talks twice. Whatever has no rule is small and replicated.

>>> sum(parameter.numel() for parameter in Transformer(Config()).parameters())
3323392
>>> mesh = iso.make_mesh((2, 4), ("data", "model"))
>>> PLAN.spec_for("blocks.0.fc1.weight", (1024, 256), mesh)
P('model',)
>>> PLAN.spec_for("blocks.0.fc2.weight", (256, 1024), mesh)
P(None, 'model')
"""

from __future__ import annotations

import dataclasses

import torch
from torch import nn
from torch.nn import functional as F

import isoshard as iso
from isoshard import P, Plan
from isoshard.rules import Linear

PLAN = Plan(
    {
        "token.*": P(
            "model", None
        ),  # rows of the embedding: each device has some of the vocabulary
        "*.qkv.*": Linear(out="model"),  # by head
        "*.proj.*": Linear(into="model"),
        "*.fc1.*": Linear(out="model"),
        "*.fc2.*": Linear(into="model"),
        "head.*": Linear(out="model"),
    }
)
BATCH = P("data")  # tokens: split by sequence


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model.

    Attributes:
        layers: blocks.
        width: of the residual stream.
        heads: of attention, which divide the width.
        length: most tokens in a sequence.
        vocabulary: different tokens; text is bytes.
    """

    layers: int = 4
    width: int = 256
    heads: int = 8
    length: int = 128
    vocabulary: int = 256


class Block(nn.Module):
    """Attention and a two-layer MLP, each after a LayerNorm and around a residual connection."""

    def __init__(self, config: Config):
        """Make a block with torch's default initial values."""
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.ln1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)  # ordered by head, so that no head is split
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length, width)` to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, self.heads, 3, width // self.heads)
        q, k, v = (head.transpose(1, 2) for head in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Transformer(nn.Module):
    """A language model over bytes."""

    def __init__(self, config: Config):
        """The initialized model: small embeddings, otherwise torch's defaults."""
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Parameter(0.02 * torch.randn(config.length, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map tokens `(batch, length)` to logits `(batch, length, vocabulary)`."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def loss_of(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def to_mesh(model: nn.Module, mesh: iso.Mesh) -> nn.Module:
    """Lay the model out over a mesh with axes "data" and "model"."""
    return iso.shard(model, mesh, PLAN)
