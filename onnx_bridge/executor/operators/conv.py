"""Convolutions and transposed convolutions over any number of spatial axes.

Images may be split over devices along the batch and the channels. XLA's partitioner is wrong for
many convolutions of images that are split along a spatial axis, so these axes are gathered first.
"""

from __future__ import annotations

import math

import jax
from jax import lax

from ...errors import ModelError
from .registry import operator
from .unsharded_axes import whole
from .windows import Windows


@operator("Conv")
def conv(
    x,
    w,
    b=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    pads=None,
    strides=None,
):
    """Each filter's products with the windows of an image, summed; plus a bias.

    Args:
        x: `(batch, channels, *spatial)`.
        w: `(filters, channels / group, *kernel)`.
        b: `(filters,)`.
        auto_pad: see `Windows`.
        dilations: see `Windows`.
        group: channels and filters fall into so many parts that do not mix.
        kernel_shape: as the weight's shape has it.
        pads: see `Windows`.
        strides: see `Windows`.

    Returns:
        `(batch, filters, *spatial)`.
    """
    _check_kernel(w, kernel_shape)
    windows = Windows(
        x.shape[2:],
        w.shape[2:],
        strides=strides,
        dilations=dilations,
        pads=pads,
        auto_pad=auto_pad,
    )
    return _convolve(
        x,
        w,
        b,
        window_strides=windows.strides,
        padding=windows.padding,
        rhs_dilation=windows.dilations,
        feature_group_count=group,
    )


@operator("ConvTranspose")
def conv_transpose(
    x,
    w,
    b=None,
    *,
    auto_pad="NOTSET",
    dilations=None,
    group=1,
    kernel_shape=None,
    output_padding=None,
    output_shape=None,
    pads=None,
    strides=None,
):
    """The transpose of `Conv`: each element of an image spreads a filter over the result.

    Args:
        x: `(batch, channels, *spatial)`.
        w: `(channels, filters / group, *kernel)`.
        b: `(filters,)`.
        auto_pad: with "SAME_..", the result is `stride` times as large as the image.
        dilations: between the elements of a filter.
        group: see `conv`.
        kernel_shape: as the weight's shape has it.
        output_padding: added after each axis of the result.
        output_shape: sizes of the result's spatial axes; the padding follows from them.
        pads: what is cut from the result, before each axis, then after each.
        strides: from one element's filter to the next.

    Returns:
        `(batch, filters, *spatial)`.
    """
    _check_kernel(w, kernel_shape)
    windows = Windows(
        x.shape[2:], w.shape[2:], strides=strides, dilations=dilations, pads=pads, auto_pad=auto_pad
    )
    rank = x.ndim - 2
    more = tuple(output_padding or (0,) * rank)
    if output_shape is None and auto_pad.startswith("SAME"):
        output_shape = [n * step for n, step in zip(x.shape[2:], windows.strides, strict=True)]
    padding = []
    for axis in range(rank):
        reach = windows.dilations[axis] * (w.shape[2 + axis] - 1) + 1
        before, after = windows.padding[axis] if output_shape is None else (0, 0)
        if output_shape is not None:
            full = windows.strides[axis] * (x.shape[2 + axis] - 1) + more[axis] + reach
            total = full - output_shape[axis]
            less = total // 2
            before, after = (
                (less, total - less) if auto_pad == "SAME_UPPER" else (total - less, less)
            )
        padding.append((reach - 1 - before, reach - 1 - after + more[axis]))
    inputs, filters = w.shape[:2]
    kernel = w.reshape(group, inputs // group, filters, *w.shape[2:]).swapaxes(1, 2)
    kernel = kernel.reshape(group * filters, inputs // group, *w.shape[2:])
    return _convolve(
        x,
        lax.rev(kernel, range(2, kernel.ndim)),
        b,
        window_strides=(1,) * rank,
        padding=padding,
        lhs_dilation=windows.strides,
        rhs_dilation=windows.dilations,
        feature_group_count=group,
    )


def _check_kernel(w, kernel_shape):
    if kernel_shape is not None and tuple(kernel_shape) != w.shape[2:]:
        raise ModelError(f"kernel_shape is {list(kernel_shape)}, and the weight's is {w.shape}")


def _convolve(x, w, b, **how) -> jax.Array:
    spatial = range(2, x.ndim)
    numbers = lax.conv_dimension_numbers(x.shape, w.shape, None)  # batch, channels, spatial
    y = lax.conv_general_dilated(
        whole(x, spatial), whole(w, spatial), dimension_numbers=numbers, **how
    )
    y = whole(y, spatial)
    return y if b is None else y + b.reshape(1, math.prod(b.shape), *(1,) * len(spatial))
