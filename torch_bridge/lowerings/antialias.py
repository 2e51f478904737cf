"""Resizing of images with anti-aliasing: `interpolate(.., antialias=True)`.

An output element is the weighted mean of all input elements under a filter that is as wide as the
output's spacing. The weights of one axis form a matrix that depends on the sizes only, so an image
is resized by two products.

>>> print(_weights(4, 2, 2.0, *_FILTERS["bilinear"]).round(3).tolist())
[[0.429, 0.429, 0.143, 0.0], [0.0, 0.143, 0.429, 0.429]]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from . import byte_images
from .argument_forms import wide
from .registry import lower
from .upsample import _ratio

_CUBIC = -0.5  # the free parameter of cubic convolution, as Pillow chooses it


def _linear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    x = np.abs(x)
    near = ((_CUBIC + 2) * x - (_CUBIC + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * _CUBIC
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)


# The filter, and half of the width on which it is not 0.
_FILTERS = {"bilinear": (_linear, 1), "bicubic": (_cubic, 2), "lanczos": (_lanczos, 3)}


def _weights(
    size: int, count: int, ratio: float, kernel: Callable[[np.ndarray], np.ndarray], reach: int
) -> np.ndarray:
    """The weight of each of `size` input elements in each of `count` output elements.

    Args:
        size: input elements.
        count: output elements.
        ratio: input elements per output element.
        kernel: the filter.
        reach: where it ends.
    """
    spread = max(ratio, 1.0)
    center = ratio * (np.arange(count)[:, None] + 0.5)
    first = np.maximum((center - reach * spread + 0.5).astype(int), 0)
    stop = np.minimum((center + reach * spread + 0.5).astype(int), size)
    place = np.arange(size)[None]
    weights = kernel((place - center + 0.5) / spread)
    weights = np.where((place >= first) & (place < stop), weights, 0.0)
    return weights / weights.sum(1, keepdims=True)


def _matrices(
    name: str,
    input_size: Sequence[int],
    output_size: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
) -> list[np.ndarray]:
    return [
        _weights(size, count, float(_ratio(size, count, align_corners, scale)), *_FILTERS[name])
        for size, count, scale in zip(input_size, output_size, scales, strict=True)
    ]


def _apply(equation: str, x: jax.Array, rows: np.ndarray, columns: np.ndarray) -> jax.Array:
    y = wide(x)
    down, across = (jnp.asarray(matrix, y.dtype) for matrix in (rows, columns))
    return jnp.einsum(equation, down, y, across, precision="highest").astype(x.dtype)


def _forward(
    name: str,
    x: jax.Array,
    output_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> jax.Array:
    scales = (scales_h, scales_w)
    pair = _matrices(name, x.shape[-2:], output_size, align_corners, scales)
    if x.dtype == jnp.uint8:
        sizes = zip(pair, x.shape[-2:], output_size, strict=True)
        return byte_images.resize(x, [None if n == m else matrix for matrix, n, m in sizes])
    return _apply("hi,...ij,wj->...hw", x, *pair)


def _backward(
    name: str,
    grad: jax.Array,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> jax.Array:
    scales = (scales_h, scales_w)
    pair = _matrices(name, input_size[-2:], output_size, align_corners, scales)
    return _apply("hi,...hw,wj->...ij", grad, *pair)


for _name in _FILTERS:
    lower(f"aten::_upsample_{_name}2d_aa")(functools.partial(_forward, _name))
    lower(f"aten::_upsample_{_name}2d_aa_backward")(functools.partial(_backward, _name))
