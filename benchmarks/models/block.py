"""The transformer block of all benchmarks: a decoder's or an encoder's."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

SPECS = (
    ("*.qkv.weight", ("model", None)),  # outputs split: whole heads
    ("*.qkv.bias", ("model",)),
    ("*.proj.weight", (None, "model")),  # inputs split
    ("*.fc1.weight", ("model", None)),
    ("*.fc1.bias", ("model",)),
    ("*.fc2.weight", (None, "model")),
)
"""How its parameters lie over the mesh axis "model"."""


class Block(nn.Module):
    """Attention and a two-layer MLP, each behind a LayerNorm and a residual connection.

    The output of `qkv` is ordered head by head (q, k and v of head 0, then of head 1, ..), so that
    splitting it over devices gives each device whole heads.

    Args:
        width: features of each position.
        heads: of the attention; they divide `width`.
        causal: whether a position sees only those before it.
        gelu: "none" for the exact form, or "tanh".
        epsilon: of the LayerNorms.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool,
        gelu: str = "none",
        epsilon: float = 1e-5,
    ):
        """See the class."""
        super().__init__()
        self.heads, self.causal, self.gelu = heads, causal, gelu
        self.ln1 = nn.LayerNorm(width, epsilon)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.ln2 = nn.LayerNorm(width, epsilon)
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length, width)` to the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, self.heads, 3, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x)), approximate=self.gelu))
