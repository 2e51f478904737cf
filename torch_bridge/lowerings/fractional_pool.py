"""Fractional max pooling: windows of one size at pseudo-random positions (Graham, 2014).

A uniform number per sample, channel and axis fixes where the windows of that plane begin. torch
takes the numbers of the last two axes in the order (width, height) in two dimensions, and in the
order of the axes in three.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from isoshard.core.nn.pooling import argmax

from .argument_forms import lengths
from .pool import scattered
from .registry import lower


def _starts(sample: jax.Array, size: int, count: int, kernel: int) -> jax.Array:
    """Where the `count` windows on an axis of `size` begin, (.., count), for samples (..)."""
    last = size - kernel
    if count == 1:
        return jnp.full((*sample.shape, 1), last, jnp.int32)
    alpha = jnp.asarray(last / (count - 1), sample.dtype)
    steps = jnp.arange(count, dtype=sample.dtype)
    moved = ((sample[..., None] + steps) * alpha).astype(jnp.int32)
    moved = moved - (sample * alpha).astype(jnp.int32)[..., None]
    return jnp.where(jnp.arange(count) == count - 1, last, moved)


def _fractional_max_pool(
    rank: int,
    x: jax.Array,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    random_samples: jax.Array,
) -> tuple[jax.Array, ...]:
    """The maxima, and their indices in the flattened spatial axes."""
    sizes = x.shape[-rank:]
    planes = x if x.ndim == rank + 2 else x[None]
    samples = random_samples[: planes.shape[0]]
    samples = samples[..., ::-1] if rank == 2 else samples
    indices = jnp.zeros((*planes.shape[:2], *(1,) * (2 * rank)), jnp.int32)
    for k, (size, count, kernel) in enumerate(zip(sizes, output_size, kernel_size, strict=True)):
        starts = _starts(samples[..., k], size, count, kernel)
        window = starts[..., None] + jnp.arange(kernel, dtype=jnp.int32)
        shape = [1] * (2 * rank)
        shape[k], shape[rank + k] = count, kernel
        indices = indices * size + window.reshape(*window.shape[:2], *shape)
    width = lengths(kernel_size, range(rank))
    indices = indices.reshape(*planes.shape[:2], lengths(output_size, range(rank)), width)
    flat = planes.reshape(*planes.shape[:2], 1, lengths(sizes, range(rank)))
    values = jnp.take_along_axis(flat, indices, axis=-1)
    best = argmax(values)
    shape = (*x.shape[:-rank], *output_size)
    picked = (jnp.take_along_axis(a, best, axis=-1).reshape(shape) for a in (values, indices))
    return tuple(picked)


def _backward(
    rank: int,
    grad: jax.Array,
    x: jax.Array,
    kernel_size: Sequence[int],
    output_size: Sequence[int],
    indices: jax.Array,
) -> jax.Array:
    return scattered(grad, indices, x.shape, rank)


def _gradient_shape(
    grad: torch.Tensor, x: torch.Tensor, *_: Sequence[int] | torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


for _rank in (2, 3):
    lower(f"aten::fractional_max_pool{_rank}d")(functools.partial(_fractional_max_pool, _rank))
    lower(f"aten::fractional_max_pool{_rank}d_backward", meta=_gradient_shape)(
        functools.partial(_backward, _rank)
    )
