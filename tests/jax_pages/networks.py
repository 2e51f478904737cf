"""The small network of the pages, as arrays and as tensors, and its numbers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tests.jax_pages.blocks import Words

SIZES = (16, 8, 8, 8)
BATCH = 32

Layer = tuple[jax.Array, jax.Array]


def affine(by: Words) -> Any:
    """One layer, before its activation."""
    return by.function(lambda x, w, b: x @ w + b, lambda x, w, b: x @ w + b)


def bent(by: Words) -> Any:
    return by.function(jax.nn.relu, torch.relu)


def predict(by: Words, params: list[Layer], x: jax.Array) -> jax.Array:
    layer, activation = affine(by), bent(by)
    for w, b in params[:-1]:
        x = activation(layer(x, w, b))
    return layer(x, *params[-1])


def miss(by: Words) -> Any:
    """The mean over the batch of squared errors."""
    return by.function(
        lambda got, want: jnp.square(got - want).sum(-1).mean(),
        lambda got, want: (got - want).square().sum(-1).mean(),
    )


def loss(by: Words, params: list[Layer], batch: Any) -> jax.Array:
    x, want = batch
    return miss(by)(predict(by, params, x), want)


def numbers(sizes: tuple[int, ...] = SIZES) -> tuple[list[Layer], Any]:
    """Parameters and a batch, on no mesh."""
    rng = np.random.default_rng(7)

    def normal(*shape: int, scale: float = 1.0) -> jax.Array:
        return jnp.asarray(rng.normal(scale=scale, size=shape).astype(np.float32))

    params = [
        (normal(*shape, scale=shape[0] ** -0.5), normal(shape[1])) for shape in pairwise(sizes)
    ]
    return params, (normal(BATCH, sizes[0]), normal(BATCH, sizes[-1]))
