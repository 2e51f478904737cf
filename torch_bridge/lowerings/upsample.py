"""Resizing of images: nearest, linear and cubic, along 1, 2 or 3 spatial axes.

torch computes positions in float32, and in float64 for float64 and for bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core.extensions import (
    block_interpolate,
    by_halos,
    cotangent_by_halos,
    resize_operator,
)
from isoshard.core.nn.resizing import Taps, matrix_of, ratio_of, resample, smooth_taps

from . import byte_images
from .argument_forms import wide
from .block_operators import by_rows, over_space, pulled_over_space
from .registry import lower
from .vjp import pull_back

_FLOAT = np.float32
_CORNERS = ("linear", "cubic")


def positions_dtype(dtype: Any) -> type:
    """What torch computes positions in, for images of a dtype."""
    return np.float64 if dtype in (jnp.float64, jnp.uint8) else _FLOAT


def _taps(
    mode: str,
    size: int,
    count: int,
    align_corners: bool,
    scale: float | None,
    float_type: type,
) -> Taps:
    """How an axis is resized in a mode of `iso.block_interpolate`."""
    if mode in _CORNERS:
        how: dict[str, Any] = {"align_corners": align_corners, "scale": scale, "dtype": float_type}
        return smooth_taps(mode, np.arange(count), size, count, **how)
    index = np.arange(count, dtype=_FLOAT) + _FLOAT(0.5 if mode == "nearest-exact" else 0)
    indices = np.floor(index * ratio_of(size, count, scale=scale, dtype=_FLOAT)).astype(np.int32)
    return Taps(np.minimum(indices, size - 1)[None], None)


def _resize(x: jax.Array, taps: Sequence[Taps]) -> jax.Array:
    y = wide(x) if taps[0].weights is not None else x
    for axis, tap in zip(range(x.ndim - len(taps), x.ndim), taps, strict=True):
        y = resample(y, axis, tap)
    return y.astype(x.dtype)


def _matrices(sizes: Sequence[int], taps: Sequence[Any]) -> list[np.ndarray | None]:
    """Of axes whose size changes: torch lets the others be."""
    return [
        None if size == tap.indices.shape[1] else matrix_of(tap, size)
        for size, tap in zip(sizes, taps, strict=True)
    ]


def _register(name: str, mode: str, rank: int) -> None:
    """Register a resizing operator and its backward.

    Args:
        name: the aten name.
        mode: that of `iso.block_interpolate`.
        rank: number of spatial axes.
    """
    flagged = int(mode in _CORNERS)  # `align_corners` comes before the scales

    def all_taps(
        sizes: Sequence[int],
        output_size: Sequence[int],
        options: Sequence[bool | float | None],
        dtype: Any,
    ) -> list[Taps]:
        corners, float_type = bool(flagged and options[0]), positions_dtype(dtype)
        scales = options[flagged:] or (None,) * rank
        return [
            _taps(mode, size, count, corners, scale, float_type)
            for size, count, scale in zip(sizes, output_size, scales, strict=True)
        ]

    def ratios(
        shape: Sequence[int], output_size: Sequence[int], options: Sequence[bool | float | None]
    ):
        """The ratios, and whether corners are aligned; None where the sizes define other ratios."""
        scales = [scale for scale in options[flagged:] if scale]
        corners = bool(flagged and options[0])
        if corners or not scales:
            return (None,) * rank, corners
        if len(scales) < rank:
            return None
        sizes = zip(shape[-rank:], scales, output_size, strict=True)
        if any(int(size * scale) != count for size, scale, count in sizes):
            return None
        return tuple(map(float, scales)), corners

    def operator(
        shape: Sequence[int], output_size: Sequence[int], options: Sequence[bool | float | None]
    ):
        """The same in `iso.domain`, which takes sizes or ratios; None if both conflict."""
        chosen = ratios(shape, output_size, options)
        if chosen is None:
            return None
        scales, corners = chosen
        either = {"size": tuple(output_size)} if None in scales else {"scale": scales}
        return functools.partial(block_interpolate, **either, mode=mode, align_corners=corners)

    def of_rows(
        x: jax.Array,
        taps: Sequence[Taps],
        shape: Sequence[int],
        output_size: Sequence[int],
        options: Sequence[bool | float | None],
    ):
        """The operator for which devices send each other rows; None where they do not."""
        chosen = ratios(shape, output_size, options)
        if taps[0].weights is None or chosen is None or not by_rows(x, rank):
            return None
        return resize_operator(tuple(shape[2:]), tuple(output_size), chosen[0], mode, chosen[1])

    def forward(
        x: jax.Array, output_size: Sequence[int], *options: bool | float | None
    ) -> jax.Array:
        taps = all_taps(x.shape[-rank:], output_size, options, x.dtype)
        if x.dtype == jnp.uint8 and taps[0].weights is not None:
            return byte_images.resize(x, _matrices(x.shape[-rank:], taps))
        rows = of_rows(x, taps, x.shape, output_size, options)
        if rows is not None:
            return by_halos(rows, wide(x)).astype(x.dtype)
        operated = operator(x.shape, output_size, options)
        resize = functools.partial(_resize, taps=taps)
        return resize(x) if operated is None else over_space(resize, operated, rank)(x)

    def backward(
        grad: jax.Array,
        output_size: Sequence[int],
        input_size: Sequence[int],
        *options: bool | float | None,
    ) -> jax.Array:
        shape = tuple(input_size)
        taps = all_taps(shape[-rank:], output_size, options, grad.dtype)
        rows = of_rows(grad, taps, shape, output_size, options)
        if rows is not None:
            cotangent = wide(grad)
            return cotangent_by_halos(rows, cotangent, jnp.zeros(shape, cotangent.dtype)).astype(
                grad.dtype
            )
        operated = operator(shape, output_size, options)

        def pulled(grad: jax.Array) -> jax.Array:
            return pull_back(lambda x: _resize(x, taps), grad, jnp.zeros(shape, grad.dtype))[0]

        if operated is None:
            return pulled(grad)
        return pulled_over_space(pulled, operated, rank, shape)(grad)

    def shape(
        x: torch.Tensor, output_size: Sequence[int], *options: bool | float | None
    ) -> torch.Tensor:
        """torch's shape function for nearest neighbours does not take a batch of none."""
        none = not x.shape[0] and all(x.shape[1:])
        result = getattr(torch.ops.aten, name).default(
            torch.empty((1, *x.shape[1:]), dtype=x.dtype, device="meta") if none else x,
            output_size,
            *options,
        )
        return result[:0] if none else result

    lower(f"aten::{name}", meta=shape)(forward)
    lower(f"aten::{name}_backward")(backward)


for _rank, _line in {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}.items():
    _register(f"upsample_{_line}", "linear", _rank)
    _register(f"upsample_nearest{_rank}d", "nearest", _rank)
    _register(f"_upsample_nearest_exact{_rank}d", "nearest-exact", _rank)
_register("upsample_bicubic2d", "cubic", 2)
