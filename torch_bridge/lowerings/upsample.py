"""Resizing of images: nearest, linear and cubic, along 1, 2 or 3 spatial axes.

Every output element is a weighted sum of a few input elements per axis, at positions that depend on
the sizes only. `Taps` holds these positions and weights for one axis; axes are resized one after
the other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core import domain
from isoshard.core.domain.windows.resize import resize_operator
from isoshard.core.domain.windows.space_split import by_halos, slope_by_halos

from . import byte_images
from .argument_forms import wide
from .block_operators import by_rows, over_space, pulled_over_space
from .registry import lower
from .vjp import pull_back

_CUBIC = -0.75  # the free parameter of cubic convolution, as torch and OpenCV choose it
_FLOAT = np.float32


class Taps(NamedTuple):
    """How one axis is resized.

    Attributes:
        places: input positions, `(taps, output size)`.
        weights: their weights, of the same shape; None for a single tap of weight 1.
    """

    places: np.ndarray
    weights: np.ndarray | None


def _ratio(
    size: int, count: int, align_corners: bool, scale: float | None, float_type: type = _FLOAT
) -> Any:
    """Input elements per output element."""
    if align_corners:
        return float_type((size - 1) / (count - 1)) if count > 1 else float_type(0)
    return float_type(1 / scale) if scale else float_type(size / count)


def _source(
    size: int, count: int, align_corners: bool, scale: float | None, float_type: type
) -> np.ndarray:
    """Where the centre of each output element lies in the input."""
    ratio = _ratio(size, count, align_corners, scale, float_type)
    index, half = np.arange(count, dtype=float_type), float_type(0.5)
    return ratio * index if align_corners else ratio * (index + half) - half


def _nearest(size: int, count: int, scale: float | None, exact: bool) -> Taps:
    index = np.arange(count, dtype=_FLOAT) + _FLOAT(0.5 if exact else 0)
    places = np.floor(index * _ratio(size, count, False, scale)).astype(np.int32)
    return Taps(np.minimum(places, size - 1)[None], None)


def _linear(
    size: int, count: int, align_corners: bool, scale: float | None, float_type: type = _FLOAT
) -> Taps:
    source = np.maximum(_source(size, count, align_corners, scale, float_type), 0)
    low = np.minimum(np.floor(source).astype(np.int32), size - 1)
    high = np.minimum(low + 1, size - 1)
    part = np.clip(source - low, 0, 1).astype(float_type)
    return Taps(np.stack([low, high]), np.stack([1 - part, part]))


def _cubic(
    size: int, count: int, align_corners: bool, scale: float | None, float_type: type = _FLOAT
) -> Taps:
    source = _source(size, count, align_corners, scale, float_type)
    low = np.floor(source).astype(np.int32)
    places = np.clip(low + np.arange(-1, 3, dtype=np.int32)[:, None], 0, size - 1)
    return Taps(places, np.stack(cubic_weights(source - low)).astype(float_type))


def cubic_weights(part: jax.Array | np.ndarray):
    """Weights of the four neighbours of a point `part` of the way from the second to the third."""

    def near(t: jax.Array | np.ndarray):
        return ((_CUBIC + 2) * t - (_CUBIC + 3)) * t * t + 1

    def far(t: jax.Array | np.ndarray):
        return ((_CUBIC * t - 5 * _CUBIC) * t + 8 * _CUBIC) * t - 4 * _CUBIC

    return far(part + 1), near(part), near(1 - part), far(2 - part)


def _resize_axis(x: jax.Array, axis: int, taps: Taps) -> jax.Array:
    size, count = x.shape[axis], taps.places.shape[1]
    if taps.weights is None:
        if size and count % size == 0 and _repeats(taps.places[0], count // size):
            return jnp.repeat(x, count // size, axis=axis)
        return jnp.take(x, taps.places[0], axis=axis)
    shape = [1] * x.ndim
    shape[axis] = count
    terms = [
        jnp.take(x, places, axis=axis) * weights.reshape(shape).astype(x.dtype)
        for places, weights in zip(taps.places, taps.weights, strict=True)
    ]
    return functools.reduce(jnp.add, terms)


def _repeats(places: np.ndarray, times: int) -> bool:
    return bool(np.array_equal(places, np.arange(len(places)) // times))


def _resize(x: jax.Array, taps: Sequence[Taps]) -> jax.Array:
    y = wide(x) if taps[0].weights is not None else x
    for axis, one in zip(range(x.ndim - len(taps), x.ndim), taps, strict=True):
        y = _resize_axis(y, axis, one)
    return y.astype(x.dtype)


def _matrices(sizes: Sequence[int], taps: Sequence[Any]) -> list[np.ndarray | None]:
    """Of axes whose size changes: torch lets the others be."""
    return [
        None
        if size == one.places.shape[1]
        else byte_images.matrix_of(one.places, one.weights, size)
        for size, one in zip(sizes, taps, strict=True)
    ]


def _spread(scales: Sequence[float | None], rank: int) -> Sequence[float | None]:
    return scales if scales else (None,) * rank


def _register(
    name: str, mode: str, rank: int, taps_of: Callable[..., Taps], *, aligns: bool
) -> None:
    """Register a resizing operator and its backward.

    Args:
        name: the aten name.
        mode: that of `iso.domain.interpolate`.
        rank: number of spatial axes.
        taps_of: the taps of one axis from `(size, count, align_corners, scale)`, or without
            `align_corners`.
        aligns: whether the operator takes `align_corners`.
    """

    def all_taps(
        sizes: Sequence[int],
        output_size: Sequence[int],
        options: Sequence[bool | float | None],
        **wider: type,
    ) -> list[Taps]:
        flags = options[:1] if aligns else ()
        scales = _spread(options[len(flags) :], rank)
        return [
            taps_of(size, count, *flags, scale, **wider)
            for size, count, scale in zip(sizes, output_size, scales, strict=True)
        ]

    def ratios(
        shape: Sequence[int], output_size: Sequence[int], options: Sequence[bool | float | None]
    ):
        """The ratios, and whether corners are aligned; None where sizes say something else."""
        flags = options[:1] if aligns else ()
        scales = [scale for scale in options[len(flags) :] if scale]
        corners = bool(flags and flags[0])
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
        """The same in `iso.domain`, which takes sizes or ratios; None where they say two things."""
        chosen = ratios(shape, output_size, options)
        if chosen is None:
            return None
        scales, corners = chosen
        either = {"size": tuple(output_size)} if None in scales else {"scale": scales}
        return functools.partial(domain.interpolate, **either, mode=mode, align_corners=corners)

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
        taps = all_taps(x.shape[-rank:], output_size, options)
        if x.dtype == jnp.uint8 and taps[0].weights is not None:
            taps = all_taps(x.shape[-rank:], output_size, options, float_type=np.float64)
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
        taps, shape = all_taps(input_size[-rank:], output_size, options), tuple(input_size)
        rows = of_rows(grad, taps, shape, output_size, options)
        if rows is not None:
            slope = wide(grad)
            return slope_by_halos(rows, slope, jnp.zeros(shape, slope.dtype)).astype(grad.dtype)
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
        made = getattr(torch.ops.aten, name).default(
            torch.empty((1, *x.shape[1:]), dtype=x.dtype, device="meta") if none else x,
            output_size,
            *options,
        )
        return made[:0] if none else made

    lower(f"aten::{name}", meta=shape)(forward)
    lower(f"aten::{name}_backward")(backward)


for _rank, _line in {1: "linear1d", 2: "bilinear2d", 3: "trilinear3d"}.items():
    _register(f"upsample_{_line}", "linear", _rank, _linear, aligns=True)
    _register(
        f"upsample_nearest{_rank}d",
        "nearest",
        _rank,
        functools.partial(_nearest, exact=False),
        aligns=False,
    )
    _register(
        f"_upsample_nearest_exact{_rank}d",
        "nearest-exact",
        _rank,
        functools.partial(_nearest, exact=True),
        aligns=False,
    )
_register("upsample_bicubic2d", "cubic", 2, _cubic, aligns=True)
