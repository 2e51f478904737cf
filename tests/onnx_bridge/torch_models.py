"""Small torch models that the exporter's and the executor's tests share, with their plans."""

import torch
from torch import nn
from torch.nn import functional as F

from isoshard import P
from isoshard.core.plan import Conv, Linear, Plan


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


class CNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.second = nn.Conv2d(8, 16, 3, stride=2, bias=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.first(x))))
        return self.head(torch.relu(self.second(x)).mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.norm1(x)
        q, k, v = (
            part(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Blocks; the head is tied to the embedding."""

    def __init__(self, blocks=2, vocabulary=64, width=16, heads=2, length=16):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(length, width) * 0.1)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        x = self.tokens(ids) + self.positions[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


MLP_PLAN = Plan(
    {"up.*": Linear(out="tp"), "down.*": Linear(into="tp")}, inputs={"x": P("dp")}, default=P()
)
CNN_PLAN = Plan(
    {
        "first.*": Conv(out="tp"),
        "re:norm[.](weight|bias|running_.*)": P("tp"),
        "second.*": Conv(into="tp"),
    },
    inputs={"x": P("dp")},
    default=P(),
)
GPT_PLAN = Plan(
    {"re:.*[.](q|k|v|up)[.].*": Linear(out="tp"), "re:.*[.](out|down)[.].*": Linear(into="tp")},
    inputs={"ids": P("dp")},
    activations={"re:blocks[.][0-9]+": P("dp")},
    default=P(),
)


def seeded(kind):
    """A model with random weights, the norms' not all alike in their own right."""
    torch.manual_seed(0)
    return kind().eval()
