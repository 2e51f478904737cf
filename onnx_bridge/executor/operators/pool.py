"""Pooling: the maximum, mean or norm over windows, or over all of an image.

For a maximum, an image that is split over devices along a spatial axis is gathered first: XLA's
partitioner loses a part of the gradient of windows that reach over two devices.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.kit import lowest, window_argmax, window_max, window_sum
from isoshard.core.kit import precision_wide as wide

from ...errors import ModelError
from .operator_arguments import bounded
from .registry import operator
from .unsharded_axes import unsharded
from .windows import windows_of

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
    """The largest element of each window, and its index if the node has that output.

    Args:
        x: `(batch, channels, *spatial)`.
        kernel_shape: size of the windows.
        auto_pad: see `windows_of`.
        ceil_mode: see `windows_of`.
        dilations: see `windows_of`.
        pads: see `windows_of`.
        storage_order: 1 counts places in an image down its columns.
        strides: see `windows_of`.
        outputs: 2 for the places too, flat in the global array of `x`.

    Returns:
        The maxima, or them and their places.
    """
    windows = windows_of(x.shape[2:], kernel_shape, auto_pad, pads, strides, dilations, ceil_mode)
    spatial = range(2, x.ndim)
    x = unsharded(x, spatial)
    result = _window_max(x, windows)
    if outputs == 1:
        return unsharded(result, spatial)
    return unsharded(result, spatial), _flat_indices(lax.stop_gradient(x), windows, storage_order)


def _window_max(x, windows):
    if all(step == 1 for step in windows.dilation):
        return window_max(x, windows)
    # JAX has no gradient of dilated windows: the larger of slices, one per element of a window
    if math.prod(windows.kernel) > _MOST_DILATED:
        raise ModelError(
            f"kernel_shape {list(windows.kernel)} with dilations has more than {_MOST_DILATED} "
            "elements"
        )
    y = lax.pad(x, lowest(x.dtype), [(a, b, 0) for a, b in windows.over(x.ndim)["padding"]])
    return functools.reduce(jnp.maximum, windows.elements(y))


def _flat_indices(x, windows, storage_order):
    """Where the first largest element of each window is in all of `x`."""
    position = jnp.arange(math.prod(x.shape), dtype=jnp.int32)
    if storage_order:
        order = (*x.shape[:2], *reversed(x.shape[2:]))
        position = position.reshape(order).transpose(0, 1, *reversed(range(2, x.ndim)))
    indices = window_argmax(x, position.reshape(x.shape), windows)
    return indices.astype(jax.dtypes.canonicalize_dtype(np.int64))


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
    """The mean of each window."""
    windows = windows_of(x.shape[2:], kernel_shape, auto_pad, pads, strides, dilations, ceil_mode)
    bounded(math.prod(windows.counts), "the windows")
    counts = windows.lengths(include_pad=bool(count_include_pad)).astype(np.float32)
    return (window_sum(wide(x), windows) / counts).astype(x.dtype)


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
    windows = windows_of(x.shape[2:], kernel_shape, auto_pad, pads, strides, dilations, ceil_mode)
    return (window_sum(jnp.abs(wide(x)) ** p, windows) ** (1 / p)).astype(x.dtype)


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
        raise ModelError(f"its input has shape {x.shape}, not (batch, channels, spatial..)")
    return tuple(range(2, x.ndim))
