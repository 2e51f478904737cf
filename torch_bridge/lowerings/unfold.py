"""The unfolding of images into columns, one for each window, and the sum of columns in images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from isoshard.core.nn.window_grid import WindowGrid

from .argument_forms import per_axis
from .registry import lower
from .vjp import pull_back


def _columns(
    x: jax.Array,
    kernel_size: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: tuple[int, ...],
    stride: tuple[int, ...],
) -> jax.Array:
    """Columns (N, C * kernel positions, window positions) of images (N, C, H, W)."""
    pads = tuple((p, p) for p in padding)
    grid = WindowGrid(x.shape[2:], kernel_size, stride, dilation, pads)
    taps = [*grid.elements(jnp.pad(x, [(0, 0), (0, 0), *pads]))]
    n, c = x.shape[:2]
    return jnp.stack(taps, axis=2).reshape(n, c * len(taps), math.prod(grid.counts))


@lower("aten::im2col")
def _im2col(
    x: jax.Array,
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    options = [per_axis(v, 2) for v in (kernel_size, dilation, padding, stride)]
    return _columns(x, *options) if x.ndim == 4 else _columns(x[None], *options)[0]


@lower("aten::col2im")
def _col2im(
    columns: jax.Array,
    output_size: Sequence[int],
    kernel_size: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    """Sum overlapping columns into images: the transpose of `im2col`."""
    lead, kernel = columns.shape[:-2], per_axis(kernel_size, 2)
    channels = columns.shape[-2] // (kernel[0] * kernel[1])
    image = jnp.zeros((*lead, channels, *per_axis(output_size, 2)), columns.dtype)
    unfold = lambda x: _im2col(x, kernel_size, dilation, padding, stride)  # noqa: E731
    return pull_back(unfold, columns, image)[0]
