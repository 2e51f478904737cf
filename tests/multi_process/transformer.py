"""A transformer block twice: in torch, for one device or for a tensor parallel plan, and in JAX."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS = 32, 4
HEAD = WIDTH // HEADS


class Block(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and a residual connection.

    The output of `qkv` is ordered head by head, so that splitting it gives whole heads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape; the heads may be a part of all."""
        qkv = self.qkv(self.ln1(x))
        qkv = qkv.view(*qkv.shape[:2], -1, 3, HEAD)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.proj(y.reshape(*y.shape[:2], -1))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


def made(dtype: torch.dtype = torch.float32) -> Block:
    """The block with the same parameters in every process; none of them is zero or one."""
    generator = torch.Generator().manual_seed(0)
    block = Block()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return block.to(dtype)


def jax_block(params: dict[str, Any], x: Any) -> Any:
    """The same block in JAX; `params` has torch's names."""
    import jax
    import jax.numpy as jnp

    def linear(name: str, h: Any) -> Any:
        return h @ params[f"{name}.weight"].T + params[f"{name}.bias"]

    def norm(name: str, h: Any) -> Any:
        h = h - h.mean(-1, keepdims=True)
        h = h * jax.lax.rsqrt((h * h).mean(-1, keepdims=True) + 1e-5)
        return h * params[f"{name}.weight"] + params[f"{name}.bias"]

    batch, length, width = x.shape
    qkv = linear("qkv", norm("ln1", x)).reshape(batch, length, HEADS, 3, HEAD)
    q, k, v = (qkv[:, :, :, number] for number in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / HEAD**0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    y = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)
    x = x + linear("proj", y)
    return x + linear("fc2", jax.nn.gelu(linear("fc1", norm("ln2", x)), approximate=False))


def parallel(block: Block, mesh: Any) -> Block:
    """Tensor parallel over "tp", with the sequence split between; FSDP2 over "dp"."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    sequence = Shard(1)
    plan = {
        "ln1": SequenceParallel(use_local_output=True),
        "qkv": ColwiseParallel(input_layouts=sequence),
        "proj": RowwiseParallel(output_layouts=sequence),
        "ln2": SequenceParallel(use_local_output=True),
        "fc1": ColwiseParallel(input_layouts=sequence),
        "fc2": RowwiseParallel(output_layouts=sequence),
    }
    parallelize_module(block, mesh["tp"], plan)
    fully_shard(block, mesh=mesh["dp"])
    return block
