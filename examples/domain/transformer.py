"""A transformer for a three-dimensional field, in torch and in JAX, on the same parameters.

Patches of 4 x 4 x 4 points, which overlap by one, are the tokens; every token attends to all. The
tokens of a device's slab of the field stay on it: the sequence is split as the field is.

>>> import isoshard as iso
>>> from .place import gathered
>>> module = Transformer((16, 4, 4), width=8, heads=2, layers=1)
>>> params = {name: jnp.asarray(p.detach().numpy()) for name, p in module.named_parameters()}
>>> x = np.random.default_rng(0).normal(size=(2, 1, 16, 4, 4)).astype(np.float32)
>>> place = Place(iso.make_mesh((2, 4), ("data", "space")))
>>> y = transformer(params, place.put(x), place, heads=2)
>>> bool(np.allclose(gathered(y), module(torch.from_numpy(x)).detach().numpy(), atol=1e-5))
True

Source: Cao, Choose a Transformer: Fourier or Galerkin (https://arxiv.org/abs/2105.14995), with
softmax attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.sharding import NamedSharding
from torch import nn
from torch.nn import functional as F

import isoshard as iso
import isoshard.torch_bridge as xs

from .place import FIELD, TOKENS, Place

PATCH = 4
REACH = {"stride": PATCH, "padding": 1}
"""How kernels of `PATCH + 2` points move: patches overlap by one point on either side."""

Params = Mapping[str, jax.Array]


class Layer(nn.Module):
    """Attention, then two linear layers; each is added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        """Make the layers."""
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.between = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, tokens, width]; the same."""
        parts = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*parts.unbind(0))
        x = x + self.joined(attended.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Transformer(nn.Module):
    """What a field is one interval later.

    Args:
        grid: points along each side of the field, multiples of `PATCH`.
        width: of a token.
        heads: of attention.
        layers: how many.
        mesh: that the tokens are to be marked on; None for one device.
    """

    def __init__(
        self,
        grid: tuple[int, int, int],
        width: int,
        heads: int,
        layers: int,
        mesh: jax.sharding.Mesh | None = None,
    ) -> None:
        """Make the layers."""
        super().__init__()
        self.mesh = mesh
        tokens = math.prod(grid) // PATCH**3
        self.place = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.into = nn.Conv3d(1, width, PATCH + 2, stride=PATCH, padding=1)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.out = nn.ConvTranspose3d(width, 1, PATCH + 2, stride=PATCH, padding=1)
        with torch.no_grad():
            self.out.weight.mul_(0.1)  # it begins near no change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 1, *grid]; the same."""
        patches = self.into(x)
        tokens = patches.flatten(2).transpose(1, 2) + self.place
        if self.mesh is not None:
            tokens = xs.mark_sharding(tokens, self.mesh, TOKENS)
        for layer in self.layers:
            tokens = layer(tokens)
        return x + self.out(self.norm(tokens).transpose(1, 2).view_as(patches))


def transformer(params: Params, x: jax.Array, place: Place, *, heads: int) -> jax.Array:
    """The same in JAX.

    Args:
        params: by the names of the torch module.
        x: [batch, 1, *grid], in equal shards.
        place: how it lies.
        heads: of attention.

    Returns:
        The same shape and layout.
    """
    how = {"mesh": place.mesh, "spec": FIELD}
    patches = iso.domain.conv(x, params["into.weight"], **REACH, **how)
    tokens = patches.reshape(*patches.shape[:2], -1).swapaxes(1, 2)
    tokens = tokens + params["into.bias"] + params["place"]
    tokens = jax.lax.with_sharding_constraint(tokens, NamedSharding(place.mesh, TOKENS))
    for number in range(sum(name.endswith("qkv.weight") for name in params)):
        tokens = _layer(params, f"layers.{number}", tokens, place, heads)
    tokens = _normed(params, "norm", tokens)
    patches = tokens.swapaxes(1, 2).reshape(patches.shape)
    y = iso.domain.conv_transpose(patches, params["out.weight"], **REACH, **how)
    return x + y + params["out.bias"]


def _layer(params: Params, name: str, x: jax.Array, place: Place, heads: int) -> jax.Array:
    q, k, v = (
        part.reshape(*x.shape[:2], heads, -1)
        for part in jnp.split(
            _linear(params, f"{name}.qkv", _normed(params, f"{name}.before", x)), 3, -1
        )
    )
    attended = iso.domain.ring_attention(q, k, v, mesh=place.mesh, axis="space", batch="data")
    x = x + _linear(params, f"{name}.joined", attended.reshape(x.shape))
    wide = _linear(params, f"{name}.wide", _normed(params, f"{name}.between", x))
    return x + _linear(params, f"{name}.narrow", jax.nn.gelu(wide, approximate=False))


def _linear(params: Params, name: str, x: Any) -> jax.Array:
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def _normed(params: Params, name: str, x: jax.Array) -> jax.Array:
    inverse = jax.lax.rsqrt(x.var(-1, keepdims=True) + np.float32(1e-5))
    normal = (x - x.mean(-1, keepdims=True)) * inverse
    return normal * params[f"{name}.weight"] + params[f"{name}.bias"]
