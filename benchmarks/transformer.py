"""The transformer: 12 decoder layers of width 256, 8 heads, 8 sequences of 64 tokens, AdamW.

Pre-LayerNorm, learned positions, an untied head, gradients clipped to norm 1. The width is chosen
so that a hand-written JAX step takes a few hundred milliseconds on two cores with eight
virtual devices.

>>> sum(p.numel() for p in WORKLOAD.torch_module().parameters())
9756160

The output of `qkv` is ordered head by head (q, k and v of head 0, then of head 1, ..), so that
splitting it over devices gives each device whole heads.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import PartitionSpec as P
from torch import nn
from torch.nn import functional as F

from benchmarks import optimizers
from benchmarks.workload import Params, Workload

LAYERS, WIDTH, HEADS = 12, 256, 8
VOCABULARY, LENGTH, BATCH = 512, 64, 8
LEARNING_RATE, MAX_NORM = 3e-4, 1.0
IGNORED = -100  # the target that torch's cross-entropy leaves out


class Block(nn.Module):
    """Attention and a two-layer MLP, each behind a LayerNorm and a residual connection."""

    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ln2 = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.fc2 = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length, width)` to the same shape."""
        batch, length, _ = x.shape
        qkv = self.qkv(self.ln1(x)).view(batch, length, HEADS, 3, WIDTH // HEADS)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class Transformer(nn.Module):
    """A decoder-only language model."""

    def __init__(self, layers: int = LAYERS):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.ln = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map `(batch, length)` token numbers to `(batch, length, vocabulary)` logits."""
        x = self.token(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x))


def torch_loss(module: nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(module(tokens).flatten(0, 1), targets.flatten())


def jax_loss(params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over targets that count, as `torch.nn.functional.cross_entropy` defines it."""
    logits = jax_forward(params, tokens)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    counts = targets != IGNORED
    return -jnp.where(counts, chosen[..., 0], 0).sum() / counts.sum()


def jax_forward(params: Params, tokens: jax.Array) -> jax.Array:
    x = params["token.weight"][tokens] + params["position"][: tokens.shape[1]]
    for number in range(sum(name.endswith("qkv.weight") for name in params)):
        x = _block(params, f"blocks.{number}", x)
    return _norm(params, "ln", x) @ params["head.weight"].T


def _block(params: Params, name: str, x: jax.Array) -> jax.Array:
    batch, length, _ = x.shape
    qkv = _linear(params, f"{name}.qkv", _norm(params, f"{name}.ln1", x))
    q, k, v = jnp.unstack(qkv.reshape(batch, length, HEADS, 3, WIDTH // HEADS), axis=3)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + _linear(params, f"{name}.proj", y.reshape(batch, length, WIDTH))
    h = _linear(params, f"{name}.fc1", _norm(params, f"{name}.ln2", x))
    return x + _linear(params, f"{name}.fc2", jax.nn.gelu(h, approximate=False))


def _linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    return layer_norm(x, params[f"{name}.weight"], params[f"{name}.bias"])


@jax.custom_vjp
def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift.

    The gradient is the closed formula. Left to automatic differentiation, XLA's CPU compiler
    recomputes the residual stream in every layer, and the whole step takes five times as long.
    """
    return _layer_norm(x, weight, bias)[0]


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array):
    scale = jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    normal = (x - x.mean(-1, keepdims=True)) * scale
    return normal * weight + bias, (normal, scale, weight)


def _layer_norm_gradient(saved: tuple[jax.Array, ...], grad: jax.Array):
    normal, scale, weight = saved
    inner = grad * weight
    along = normal * (normal * inner).mean(-1, keepdims=True)
    x = scale * (inner - inner.mean(-1, keepdims=True) - along)
    return x, (grad * normal).sum((0, 1)), grad.sum((0, 1))


layer_norm.defvjp(_layer_norm, _layer_norm_gradient)


def batch(number: int) -> tuple[np.ndarray, ...]:
    """Sequences that count upwards in random strides: learnable within a few steps."""
    rng = np.random.default_rng(number)
    start, stride = rng.integers(0, VOCABULARY, (2, BATCH, 1))
    tokens = (start + (1 + stride % 3) * np.arange(LENGTH + 1)) % VOCABULARY
    return np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])


_init, _update = optimizers.adamw(LEARNING_RATE, max_norm=MAX_NORM)
WORKLOAD = Workload(
    name="transformer",
    build=Transformer,
    torch_loss=torch_loss,
    torch_optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=LEARNING_RATE),
    max_norm=MAX_NORM,
    jax_loss=jax_loss,
    jax_init=_init,
    jax_update=_update,
    specs=(
        ("*.qkv.weight", P("model", None)),  # outputs split: whole heads
        ("*.qkv.bias", P("model")),
        ("*.proj.weight", P(None, "model")),  # inputs split
        ("*.fc1.weight", P("model", None)),
        ("*.fc1.bias", P("model")),
        ("*.fc2.weight", P(None, "model")),
        ("head.weight", P("model", None)),  # vocabulary split
    ),
    batch=batch,
)
