"""Pooling: the maximum, mean or norm over windows, or over all of an image.

For a maximum, an image that is split over devices along a spatial axis is gathered first: XLA's
partitioner loses a part of the gradient of windows that reach over two devices.
"""

from __future__ import annotations

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import ModelError
from .operator_arguments import bounded, widened
from .registry import operator
from .unsharded_axes import whole
from .windows import Windows

_MOST_DILATED = 4096


@operator("MaxPool", counted=True)
def max_pool(
    x,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations=None,
    pads=None,
    storage_order=0,
    strides=None,
    outputs,
):
    """The largest element of each window, and its place if that is asked for.

    Args:
        x: `(batch, channels, *spatial)`.
        kernel_shape: size of the windows.
        auto_pad: see `Windows`.
        ceil_mode: see `Windows`.
        dilations: see `Windows`.
        pads: see `Windows`.
        storage_order: 1 counts places in an image down its columns.
        strides: see `Windows`.
        outputs: 2 for the places too, flat in the whole of `x`.

    Returns:
        The maxima, or them and their places.
    """
    windows = Windows(
        x.shape[2:],
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    spatial = range(2, x.ndim)
    x = whole(x, spatial)
    low = np.asarray(-np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min)
    low = low.astype(x.dtype)
    found = _window_max(x, low, windows)
    if outputs == 1:
        return whole(found, spatial)
    return whole(found, spatial), _places(lax.stop_gradient(x), low, windows, storage_order)


def _window_max(x, low, windows):
    if all(step == 1 for step in windows.dilations):
        return lax.reduce_window(x, low, lax.max, **windows.over_images)
    # JAX has no gradient of dilated windows: the larger of slices, one per element of a window
    if math.prod(windows.kernel) > _MOST_DILATED:
        raise ModelError(
            f"kernel_shape {list(windows.kernel)} with dilations has more than {_MOST_DILATED} "
            "elements"
        )
    y = lax.pad(x, low, [(a, b, 0) for a, b in windows.over_images["padding"]])
    reach = [(n - 1) * step + 1 for n, step in zip(windows.counts, windows.strides, strict=True)]
    slices = []
    for place in itertools.product(*(range(k) for k in windows.kernel)):
        first = [k * d for k, d in zip(place, windows.dilations, strict=True)]
        last = [a + n for a, n in zip(first, reach, strict=True)]
        ends = (0, 0, *first), (*x.shape[:2], *last), (1, 1, *windows.strides)
        slices.append(lax.slice(y, *ends))
    return functools.reduce(jnp.maximum, slices)


def _places(x, low, windows, storage_order):
    """Where the first largest element of each window lies in all of `x`."""
    position = jnp.arange(math.prod(x.shape), dtype=jnp.int32)
    if storage_order:
        order = (*x.shape[:2], *reversed(x.shape[2:]))
        position = position.reshape(order).transpose(0, 1, *reversed(range(2, x.ndim)))
    else:
        position = position.reshape(x.shape)

    def later_wins(a, b):
        keep = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(keep, a[0], b[0]), jnp.where(keep, a[1], b[1])

    start = (low, np.int32(np.iinfo(np.int32).max))
    places = lax.reduce_window((x, position), start, later_wins, **windows.over_images)[1]
    return places.astype(jax.dtypes.canonicalize_dtype(np.int64))


@operator("AveragePool")
def average_pool(
    x,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    count_include_pad=0,
    dilations=None,
    pads=None,
    strides=None,
):
    """The mean of each window.

    Args:
        x: `(batch, channels, *spatial)`.
        kernel_shape: size of the windows.
        auto_pad: see `Windows`.
        ceil_mode: see `Windows`; what hangs over the end is never counted.
        count_include_pad: divide by all elements of a window, the zeros of the padding too.
        dilations: see `Windows`.
        pads: see `Windows`.
        strides: see `Windows`.

    Returns:
        The means.
    """
    windows = Windows(
        x.shape[2:],
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    return (_window_sum(widened(x), windows) / _counts(x.shape, windows, count_include_pad)).astype(
        x.dtype
    )


def _window_sum(x, windows):
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, **windows.over_images)


def _counts(shape, windows, count_include_pad):
    """Elements per window: `(1, 1, *counts)`, a product of one number per axis."""
    counts = np.ones((1, 1), np.float32)
    bounded(math.prod(windows.counts), "the windows")
    for axis, size in enumerate(shape[2:]):
        before, after = windows.padding[axis]
        low, high = (-before, size + after) if count_include_pad else (0, size)
        first = np.arange(windows.counts[axis]) * windows.strides[axis] - before
        until = [
            np.clip(-((first - bound) // windows.dilations[axis]), 0, windows.kernel[axis])
            for bound in (low, high)
        ]
        inside = until[1] - until[0]
        counts = counts[..., None] * inside.astype(np.float32)
    return counts


@operator("LpPool", since=2)
def lp_pool(
    x,
    *,
    kernel_shape,
    auto_pad="NOTSET",
    ceil_mode=0,
    dilations=None,
    p=2,
    pads=None,
    strides=None,
):
    """The p-norm of each window; the arguments are those of `average_pool`."""
    windows = Windows(
        x.shape[2:],
        kernel_shape,
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
        ceil_mode=ceil_mode,
    )
    return (_window_sum(jnp.abs(widened(x)) ** p, windows) ** (1 / p)).astype(x.dtype)


@operator("GlobalAveragePool")
def global_average_pool(x):
    """The mean of each channel's image."""
    return jnp.mean(x, axis=_spatial(x), keepdims=True)


@operator("GlobalMaxPool")
def global_max_pool(x):
    """The largest element of each channel's image."""
    return jnp.max(x, axis=_spatial(x), keepdims=True)


@operator("GlobalLpPool", since=2)
def global_lp_pool(x, *, p=2):
    """The p-norm of each channel's image."""
    return jnp.sum(jnp.abs(x) ** p, axis=_spatial(x), keepdims=True) ** (1 / p)


def _spatial(x):
    if x.ndim < 3:
        raise ModelError(f"a shape (batch, channels, spatial..) is wanted, and {x.shape} is given")
    return tuple(range(2, x.ndim))
