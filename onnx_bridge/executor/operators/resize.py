"""Resize: images in another size, by the nearest element, linearly or by cubics.

Each element of the result is a weighted sum of a few elements per axis (`isoshard.core.nn`).
Scales and sizes must be known when the program is compiled.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.kit import Taps, cubic, filter_taps, resample, tap_offsets, triangle
from isoshard.core.kit import precision_wide as wide

from ...errors import ModelError
from .operator_arguments import axes_of, bounded, choice
from .registry import operator

_COORDINATES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
    "tf_half_pixel_for_nn",
)
_NEAREST = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_POLICIES = ("stretch", "not_larger", "not_smaller")


class Axis(NamedTuple):
    """The resizing of one axis.

    Attributes:
        size: of the input.
        count: of the result.
        scale: result per input.
        roi: (start, end) of the part that is read, as shares of the input.
    """

    size: int
    count: int
    scale: float
    roi: tuple[float, float]


@operator("Resize", since=11, static=("roi", "scales", "sizes"))
def resize(
    x,
    roi=None,
    scales=None,
    sizes=None,
    *,
    antialias=0,
    axes=None,
    coordinate_transformation_mode="half_pixel",
    cubic_coeff_a=-0.75,
    exclude_outside=0,
    extrapolation_value=0.0,
    keep_aspect_ratio_policy="stretch",
    mode="nearest",
    nearest_mode="round_prefer_floor",
):
    """A tensor in another size.

    Args:
        x: any tensor.
        roi: the part that "tf_crop_and_resize" reads: starts, then ends.
        scales: result per input, per axis.
        sizes: of the result, in place of `scales`.
        antialias: widen the filter where the result is smaller.
        axes: which are resized; all if left out.
        coordinate_transformation_mode: where an element of the result is in the input.
        cubic_coeff_a: the free number of the cubics.
        exclude_outside: elements outside the input weigh nothing, instead of the edge's.
        extrapolation_value: fills what "tf_crop_and_resize" reads outside.
        keep_aspect_ratio_policy: "stretch", or one scale for all axes: "not_larger" or
            "not_smaller" than `sizes`.
        mode: "nearest", "linear" or "cubic".
        nearest_mode: how places are rounded.

    Returns:
        The resized tensor, in the dtype of `x`.
    """
    choice(mode, "mode", ("nearest", "linear", "cubic"))
    choice(coordinate_transformation_mode, "coordinate_transformation_mode", _COORDINATES)
    choice(nearest_mode, "nearest_mode", _NEAREST)
    named = tuple(range(x.ndim)) if axes is None else axes_of(axes, x.ndim)
    resized = _resized_axes(x.shape, named, roi, scales, sizes, keep_aspect_ratio_policy)
    taps, outside = {}, {}
    bounded(
        max((axis_resize.count for axis_resize in resized.values()), default=0),
        "the places of Resize",
    )
    for axis, axis_resize in resized.items():
        if (
            axis_resize.count == axis_resize.size
            and axis_resize.scale == 1
            and axis_resize.roi == (0, 1)
        ):
            continue
        where = _where(axis_resize, coordinate_transformation_mode)
        if coordinate_transformation_mode == "tf_crop_and_resize":
            outside[axis] = (where < 0) | (where > axis_resize.size - 1)
        if mode == "nearest":
            positions = np.clip(_rounded(where, nearest_mode), 0, axis_resize.size - 1)
            taps[axis] = Taps(positions[None], None)
            continue
        kernel = triangle if mode == "linear" else functools.partial(cubic, a=cubic_coeff_a)
        reach = 1 if mode == "linear" else 2
        squeezed = min(axis_resize.scale, 1.0) if antialias else 1.0
        weights = len(tap_offsets(reach, squeezed)) * max(len(where), 1)
        bounded(weights, "the weights of Resize")
        how = {"squeezed": squeezed, "exclude_outside": bool(exclude_outside)}
        taps[axis] = filter_taps(where, axis_resize.size, kernel, reach, **how)
    return _apply(x, taps, outside, extrapolation_value)


@operator("Resize", since=10, static=("scales",))
def resize_10(x, scales, *, mode="nearest"):
    """`Resize` of opset 10: element i of the result is at i / scale."""
    return resize(
        x,
        None,
        scales,
        mode=mode,
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    )


def _resized_axes(shape, named, roi, scales, sizes, policy) -> dict[int, Axis]:
    choice(policy, "keep_aspect_ratio_policy", _POLICIES)
    scales, sizes, roi = (None if v is None or v.size == 0 else v for v in (scales, sizes, roi))
    if (scales is None) == (sizes is None):
        raise ModelError("Resize wants scales or sizes, one of them")
    requested: Any = scales if sizes is None else sizes
    if requested.size != len(named):
        raise ModelError(f"{requested.size} scales or sizes are given for {len(named)} axes")
    read = [shape[axis] for axis in named]
    if sizes is None:
        ratios = [float(scale) for scale in requested]
        counts = [int(np.floor(n * r)) for n, r in zip(read, ratios, strict=True)]
    else:
        counts = [int(n) for n in requested]
        ratios = [n / size for n, size in zip(counts, read, strict=True)]
        if policy != "stretch":
            ratios = [min(ratios) if policy == "not_larger" else max(ratios)] * len(named)
            counts = [int(r * n + 0.5) for n, r in zip(read, ratios, strict=True)]
    regions = [(0.0, 1.0)] * len(named)
    if roi is not None:
        if roi.size != 2 * len(named):
            raise ModelError(f"roi has {roi.size} numbers, and two per axis are {2 * len(named)}")
        regions = list(zip(roi[: len(named)].tolist(), roi[len(named) :].tolist(), strict=True))
    return {
        axis: Axis(size, count, ratio, region)
        for axis, size, count, ratio, region in zip(
            named, read, counts, ratios, regions, strict=True
        )
    }


def _where(axis: Axis, mode: str) -> np.ndarray:
    """Where each element of the result is in the input."""
    index = np.arange(axis.count, dtype=np.float64)
    width = axis.scale * axis.size
    if mode == "align_corners":
        return index * ((axis.size - 1) / (width - 1) if width != 1 else 0)
    if mode == "asymmetric":
        return index / axis.scale
    if mode == "tf_half_pixel_for_nn":
        return (index + 0.5) / axis.scale
    if mode == "tf_crop_and_resize":
        start, end = axis.roi
        reach = (end - start) * (axis.size - 1)
        if width == 1:
            return np.full(axis.count, reach / 2 + start * (axis.size - 1))
        return start * (axis.size - 1) + index * reach / (width - 1)
    if mode == "pytorch_half_pixel" and width == 1:
        return np.full(axis.count, -0.5)
    shift = 0.0
    if mode == "half_pixel_symmetric":
        shift = axis.size / 2 * (1 - axis.count / width)
    return shift + (index + 0.5) / axis.scale - 0.5


def _rounded(where: np.ndarray, mode: str) -> np.ndarray:
    rounded = {
        "floor": np.floor,
        "ceil": np.ceil,
        "round_prefer_floor": lambda x: np.ceil(x - 0.5),
        "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    }[mode](where)
    return rounded.astype(np.int32)


def _apply(
    x: jax.Array, taps: dict[int, Taps], outside: dict[int, np.ndarray], fill: float
) -> jax.Array:
    exact = all(axis_taps.weights is None for axis_taps in taps.values())
    floats = jnp.issubdtype(x.dtype, jnp.floating)
    y = x if exact else wide(x) if floats else x.astype(jnp.float32)
    for axis, axis_taps in taps.items():
        y = resample(y, axis, axis_taps)
    for axis, outside_axis in outside.items():
        if outside_axis.any():
            line = outside_axis.reshape([-1 if axis == d else 1 for d in range(x.ndim)])
            y = jnp.where(line, jnp.asarray(fill, y.dtype), y)
    if exact or floats:
        return y.astype(x.dtype)
    limits = jnp.iinfo(x.dtype)
    return jnp.clip(jnp.round(y), limits.min, limits.max).astype(x.dtype)
