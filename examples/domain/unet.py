"""A U-Net for a two-dimensional field, in torch and in JAX, on the same parameters.

The torch module is written for one device. The JAX function calls the operators of `iso.domain`,
which exchange the rows at the borders of shards of any sizes, even and uneven.

>>> import isoshard as iso
>>> from .place import Place, gathered
>>> module = UNet(width=4)
>>> params = {name: jnp.asarray(p.detach().numpy()) for name, p in module.named_parameters()}
>>> x = np.random.default_rng(0).normal(size=(2, 1, 32, 8)).astype(np.float32)
>>> place = Place(iso.make_mesh((1, 4), ("data", "space")), (12, 4, 8, 8))
>>> y = jax.jit(lambda params, x: unet(params, x, place))(params, place.put(x))
>>> expected = module(torch.from_numpy(x)).detach().numpy()
>>> y.sizes[2], bool(np.allclose(gathered(y), expected, atol=1e-5))
((12, 4, 8, 8), True)

Source: Ronneberger, Fischer and Brox, U-Net: Convolutional Networks for Biomedical Image
Segmentation (https://arxiv.org/abs/1505.04597).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import isoshard as iso

from .place import FIELD, Place

Params = Mapping[str, jax.Array]


class Block(nn.Module):
    """Two convolutions, the first one normalised."""

    def __init__(self, into: int, out: int) -> None:
        """Make the layers."""
        super().__init__()
        self.first = nn.Conv2d(into, out, 3, padding=1)
        self.norm = nn.GroupNorm(1, out)
        self.second = nn.Conv2d(out, out, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, into, rows, columns] to [batch, out, rows, columns]."""
        return F.gelu(self.second(F.gelu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """What a field is one interval later.

    Args:
        width: channels at full resolution; twice and four times as many below.
    """

    def __init__(self, width: int) -> None:
        """Make the layers."""
        super().__init__()
        self.fine = Block(1, width)
        self.coarse = Block(width, 2 * width)
        self.coarsest = Block(2 * width, 4 * width)
        self.coarse_again = Block(6 * width, 2 * width)
        self.fine_again = Block(3 * width, width)
        self.last = nn.Conv2d(width, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, 1, rows, columns], both multiples of 4; the same."""
        fine = self.fine(x)
        coarse = self.coarse(F.avg_pool2d(fine, 2))
        y = self.coarsest(F.avg_pool2d(coarse, 2))
        y = self.coarse_again(torch.cat([F.interpolate(y, scale_factor=2.0), coarse], 1))
        y = self.fine_again(torch.cat([F.interpolate(y, scale_factor=2.0), fine], 1))
        return x + self.last(y)


def unet(params: Params, x: Any, place: Place) -> Any:
    """The same in JAX.

    Args:
        params: by the names of the torch module.
        x: [batch, 1, rows, columns], a `jax.Array` or an `iso.UnevenArray`.
        place: how it lies.

    Returns:
        The same kind of array, sharded as `x`.
    """
    how = {"mesh": place.mesh, "spec": FIELD}

    def conv(name: str, x: Any, padding: int = 1) -> Any:
        y = iso.domain.conv(x, params[f"{name}.weight"], padding=padding, **how)
        return _biased(y, params[f"{name}.bias"])

    def block(name: str, x: Any) -> Any:
        y = conv(f"{name}.first", x)
        y = _normed(y, params[f"{name}.norm.weight"], params[f"{name}.norm.bias"])
        return _gelu(conv(f"{name}.second", _gelu(y)))

    halved = functools.partial(iso.domain.avg_pool, window=2, **how)
    doubled = functools.partial(iso.domain.interpolate, scale=2.0, **how)
    fine = block("fine", x)
    coarse = block("coarse", halved(fine))
    y = block("coarsest", halved(coarse))
    y = block("coarse_again", _joined(doubled(y), coarse))
    y = block("fine_again", _joined(doubled(y), fine))
    return _added(x, conv("last", y, padding=0))


_gelu = iso.domain.lift(functools.partial(jax.nn.gelu, approximate=False))
_added = iso.domain.lift(jnp.add)


@iso.domain.lift
def _biased(x: jax.Array, bias: jax.Array) -> jax.Array:
    return x + bias[:, None, None]


@iso.domain.lift
def _joined(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.concatenate([x, y], 1)


@iso.domain.lift
def _normed(x: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """`nn.GroupNorm` of one group: the mean and the variance are those of all valid places."""
    mean = x.mean((1, 2, 3), keepdims=True)
    inverse = jax.lax.rsqrt(x.var((1, 2, 3), keepdims=True) + np.float32(1e-5))
    return (x - mean) * inverse * weight[:, None, None] + bias[:, None, None]
