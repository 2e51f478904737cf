"""Adaptive pooling: output size to windows. Where the sizes divide, windows are plain ones."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.extensions import (
    block_interpolate,
    by_halos,
    cotangent_by_halos,
    resize_operator,
)
from isoshard.core.nn.pooling import adaptive_windows, argmax, window_sum

from .argument_forms import wide
from .block_operators import by_rows, over_space
from .pool import max_pool, max_pool_backward, scattered, windows
from .registry import lower
from .vjp import pull_back


def _gather(x: jax.Array, output_size: Sequence[int]) -> tuple[jax.Array, np.ndarray]:
    """Windows of `x` as (*lead, *counts, *offsets), and which elements belong to them."""
    rank = len(output_size)
    lead = x.ndim - rank
    inside = np.ones((), bool)
    for k, (size, count) in enumerate(zip(x.shape[lead:], output_size, strict=True)):
        indices, belongs = adaptive_windows(np.arange(count), size, count)
        x = jnp.take(x, indices.astype(np.int32), axis=lead + 2 * k)
        inside = np.multiply.outer(inside, belongs)
    counts, offsets = range(0, 2 * rank, 2), range(1, 2 * rank, 2)
    order = (*counts, *offsets)
    front = tuple(range(lead))
    return x.transpose(*front, *(lead + i for i in order)), inside.transpose(order)


def _divides(x: jax.Array, output_size: Sequence[int]) -> bool:
    sizes = x.shape[x.ndim - len(output_size) :]
    return all(n and size % n == 0 for size, n in zip(sizes, output_size, strict=True))


def _of_all(output_size: Sequence[int]) -> bool:
    return all(n == 1 for n in output_size)


def _kernel(x: jax.Array, output_size: Sequence[int]) -> tuple[int, ...]:
    sizes = x.shape[x.ndim - len(output_size) :]
    return tuple(size // n for size, n in zip(sizes, output_size, strict=True))


def _area(shape: Sequence[int], output_size: Sequence[int]):
    rank = len(output_size)
    return resize_operator(tuple(shape[2:]), tuple(output_size), (None,) * rank, "area", False)


def _average(x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    return over_space(
        lambda x: _unsharded_average(x, output_size),
        lambda x: block_interpolate(x, size=tuple(output_size), mode="area"),
        len(output_size),
    )(x)


def _unsharded_average(x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    rank, y = len(output_size), wide(x)
    axes = tuple(range(-rank, 0))
    if _divides(x, output_size):
        return _average_plain(y, output_size).astype(x.dtype)
    if by_rows(x, rank) and 0 not in output_size:
        return by_halos(_area(x.shape, output_size), y).astype(x.dtype)
    windows, inside = _gather(y, output_size)
    total = jnp.sum(jnp.where(inside, windows, jnp.zeros_like(windows)), axis=axes)
    return (total / inside.sum(axes).astype(y.dtype)).astype(x.dtype)


def _average_plain(y: jax.Array, output_size: Sequence[int]) -> jax.Array:
    kernel = _kernel(y, output_size)
    return window_sum(y, windows(y.shape, len(kernel), kernel, kernel)) / int(np.prod(kernel))


@lower("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d")
def _adaptive_avg_pool(x: jax.Array, output_size: Sequence[int]) -> jax.Array:
    return _average(x, output_size)


def _adaptive_avg_pool_backward(rank: int, grad: jax.Array, x: jax.Array) -> jax.Array:
    output_size = grad.shape[-rank:]
    if by_rows(x, rank) and 0 not in output_size and not _of_all(output_size):
        cotangent = cotangent_by_halos(_area(x.shape, output_size), wide(grad), wide(x))
        return cotangent.astype(x.dtype)
    return pull_back(lambda a: _average(a, output_size), grad, x)[0]


for _rank in (2, 3):
    lower(f"aten::_adaptive_avg_pool{_rank}d_backward")(
        functools.partial(_adaptive_avg_pool_backward, _rank)
    )


@lower("aten::adaptive_max_pool2d", "aten::adaptive_max_pool3d")
def _adaptive_max_pool(x: jax.Array, output_size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """The maxima and their positions in the flattened spatial axes."""
    rank = len(output_size)
    sizes = x.shape[-rank:]
    if _divides(x, output_size) and not _of_all(output_size):
        return max_pool(rank, x, _kernel(x, output_size))
    windows, inside = _gather(x, output_size)
    lead = windows.shape[: windows.ndim - rank]
    longest = int(np.prod(inside.shape[-rank:]))
    values = jnp.where(inside, windows, -jnp.inf).reshape(*lead, longest)
    flat = jnp.arange(int(np.prod(sizes)), dtype="int32").reshape(sizes)
    indices = _gather(flat, output_size)[0].reshape(*output_size, longest)
    indices = jnp.broadcast_to(indices, values.shape)
    take = functools.partial(jnp.take_along_axis, indices=argmax(values), axis=-1)
    return take(values)[..., 0], take(indices)[..., 0]


def _adaptive_max_pool_backward(
    rank: int, grad: jax.Array, x: jax.Array, indices: jax.Array
) -> jax.Array:
    output_size = grad.shape[-rank:]
    if _divides(x, output_size) and not _of_all(output_size):
        kernel = _kernel(x, output_size)
        return max_pool_backward(rank, grad, x, kernel, kernel, 0, 1, False, indices)
    return scattered(grad, indices, x.shape, rank)


for _rank in (2, 3):
    lower(f"aten::adaptive_max_pool{_rank}d_backward")(
        functools.partial(_adaptive_max_pool_backward, _rank)
    )
