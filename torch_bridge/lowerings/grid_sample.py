"""Sampling of images at points: `torch.nn.functional.grid_sample` in 2 and 3 dimensions.

A point (x, y) in [-1, 1] is scaled to pixel coordinates, brought back inside the image by the
padding mode, and interpolated between the pixels around it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from isoshard.core.nn.resizing import cubic_weights

from .argument_forms import wide_all
from .registry import lower
from .vjp import pull_back

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2


def _to_pixels(point: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """From [-1, 1] to [0, size - 1], or to pixel edges when corners are not aligned."""
    return (point + 1) / 2 * (size - 1) if align_corners else ((point + 1) * size - 1) / 2


def _clip(at: jax.Array, size: int) -> jax.Array:
    """Clip to the image; on its border the gradient is 0, as torch has it."""
    low, high = jnp.zeros_like(at), jnp.full_like(at, size - 1)
    return jnp.where(at > 0, jnp.where(at < size - 1, at, high), low)


def _reflect(at: jax.Array, size: int, align_corners: bool) -> jax.Array:
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    if span == 0:
        return jnp.zeros_like(at)
    away = jnp.abs(at - low)
    extra = away - jnp.floor(away / span) * span
    even = jnp.floor(away / span) % 2 == 0
    return jnp.where(even, extra + low, span - extra + low)


def _bring_inside(at: jax.Array, size: int, padding_mode: int, align_corners: bool) -> jax.Array:
    if padding_mode == _REFLECTION:
        return _clip(_reflect(at, size, align_corners), size)
    return _clip(at, size) if padding_mode == _BORDER else at


def _pick(image: jax.Array, indices: Sequence[jax.Array]) -> jax.Array:
    """The pixels of (C, *spatial) at integer indices, one array per axis; 0 outside."""
    inside = functools.reduce(
        jnp.logical_and,
        [(p >= 0) & (p <= size - 1) for p, size in zip(indices, image.shape[1:], strict=True)],
    )
    safe = [
        jnp.clip(p, 0, size - 1).astype("int32")
        for p, size in zip(indices, image.shape[1:], strict=True)
    ]
    pixels = image[(slice(None), *safe)]
    return jnp.where(inside, pixels, jnp.zeros_like(pixels))


def _linear_taps(at: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    low = jnp.floor(at)
    weight = at - low
    return [(low, 1 - weight), (low + 1, weight)]


def _cubic_taps(at: jax.Array):
    low = jnp.floor(at)
    return [(low + k - 1, w) for k, w in enumerate(cubic_weights(at - low))]


def _sample(
    image: jax.Array, grid: jax.Array, mode: int, padding_mode: int, align_corners: bool
) -> jax.Array:
    """One image (C, *spatial) at the points of one grid (*out, rank); x comes first in a point."""
    sizes = image.shape[1:]
    inside = functools.partial(
        _bring_inside, padding_mode=padding_mode, align_corners=align_corners
    )
    at = [
        _to_pixels(grid[..., len(sizes) - 1 - axis], size, align_corners)
        for axis, size in enumerate(sizes)
    ]
    if mode == _NEAREST:
        return _pick(image, [jnp.round(inside(a, n)) for a, n in zip(at, sizes, strict=True)])
    taps = [
        [(inside(index, n), weight) for index, weight in _cubic_taps(a)]
        if mode == _BICUBIC
        else _linear_taps(inside(a, n))
        for a, n in zip(at, sizes, strict=True)
    ]
    terms = (
        _pick(image, [index for index, _ in corner])
        * functools.reduce(jnp.multiply, [weight for _, weight in corner])
        for corner in itertools.product(*taps)
    )
    return functools.reduce(jnp.add, terms)


@lower("aten::grid_sampler_2d", "aten::grid_sampler_3d", "aten::_grid_sampler_2d_cpu_fallback")
def _grid_sampler(
    image: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
) -> jax.Array:
    image, grid = wide_all(image, grid)
    sample = functools.partial(
        _sample, mode=interpolation_mode, padding_mode=padding_mode, align_corners=align_corners
    )
    return jax.vmap(sample)(image, grid)


@lower("aten::grid_sampler_2d_backward", "aten::grid_sampler_3d_backward")
def _grid_sampler_backward(
    grad: jax.Array,
    image: jax.Array,
    grid: jax.Array,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array]:
    options = (interpolation_mode, padding_mode, align_corners)
    of_image, of_grid = pull_back(lambda a, g: _grid_sampler(a, g, *options), grad, image, grid)
    return of_image if output_mask[0] else None, of_grid
