"""Resizing of images with anti-aliasing: `interpolate(.., antialias=True)`.

An output element is the weighted mean of all input elements under a filter that is as wide as the
output's spacing. The weights of one axis form a matrix that depends on the sizes only, so an image
is resized by two products.

>>> print(_matrices("bilinear", (4,), (2,), False, (None,), np.float32)[0].round(3).tolist())
[[0.429, 0.429, 0.143, 0.0], [0.0, 0.143, 0.429, 0.429]]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.nn.resizing import (
    cubic,
    filter_taps,
    lanczos,
    matrix_of,
    ratio_of,
    triangle,
)

from . import byte_images
from .argument_forms import wide
from .registry import lower
from .upsample import positions_dtype

_CUBIC = -0.5  # the free parameter of cubic convolution, as Pillow chooses it

# The filter, and half of the width on which it is not 0.
_FILTERS = {
    "bilinear": (triangle, 1),
    "bicubic": (functools.partial(cubic, a=_CUBIC), 2),
    "lanczos": (lanczos, 3),
}


def _matrices(
    name: str,
    input_size: Sequence[int],
    output_size: Sequence[int],
    align_corners: bool,
    scales: Sequence[float | None],
    dtype: type,
) -> list[np.ndarray]:
    matrices = []
    for size, count, scale in zip(input_size, output_size, scales, strict=True):
        how = {"align_corners": align_corners, "scale": scale, "dtype": dtype}
        ratio = float(ratio_of(size, count, **how))
        where = ratio * (np.arange(count) + 0.5) - 0.5
        squeezed = 1 / max(ratio, 1.0)
        taps = filter_taps(where, size, *_FILTERS[name], squeezed=squeezed, exclude_outside=True)
        matrices.append(matrix_of(taps, size))
    return matrices


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
    dtype = positions_dtype(x.dtype)
    pair = _matrices(name, x.shape[-2:], output_size, align_corners, scales, dtype)
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
    dtype = positions_dtype(grad.dtype)
    pair = _matrices(name, input_size[-2:], output_size, align_corners, scales, dtype)
    return _apply("hi,...hw,wj->...ij", grad, *pair)


for _name in _FILTERS:
    lower(f"aten::_upsample_{_name}2d_aa")(functools.partial(_forward, _name))
    lower(f"aten::_upsample_{_name}2d_aa_backward")(functools.partial(_backward, _name))
