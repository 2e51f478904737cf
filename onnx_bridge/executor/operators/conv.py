"""Convolutions and transposed convolutions over any number of spatial axes.

Images may be split over devices along the batch and the channels. XLA's partitioner is wrong for
many convolutions of images that are split along a spatial axis, so these axes are gathered first.
"""

from __future__ import annotations

import jax
from jax import lax

from isoshard.core.kit import halves, on_channel_axis, transposed_kernel, transposed_padding
from isoshard.onnx_bridge.errors import ModelError

from .registry import operator
from .unsharded_axes import unsharded
from .windows import windows_of


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
        auto_pad: see `windows_of`.
        dilations: see `windows_of`.
        group: channels and filters fall into so many parts that do not mix.
        kernel_shape: as the weight's shape has it.
        pads: see `windows_of`.
        strides: see `windows_of`.

    Returns:
        `(batch, filters, *spatial)`.
    """
    _check_kernel(w, kernel_shape)
    windows = windows_of(x.shape[2:], w.shape[2:], auto_pad, pads, strides, dilations)
    return _convolve(
        x,
        w,
        b,
        window_strides=windows.stride,
        padding=windows.padding,
        rhs_dilation=windows.dilation,
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
    windows = windows_of(x.shape[2:], w.shape[2:], auto_pad, pads, strides, dilations)
    rank = x.ndim - 2
    more = tuple(output_padding or (0,) * rank)
    if output_shape is None and auto_pad.startswith("SAME"):
        output_shape = [n * step for n, step in zip(x.shape[2:], windows.stride, strict=True)]
    padding = windows.padding
    if output_shape is not None:
        axes = zip(x.shape[2:], w.shape[2:], windows.stride, windows.dilation, more, strict=True)
        full = [step * (n - 1) + extra + d * (k - 1) + 1 for n, k, step, d, extra in axes]
        padding = [
            halves(reached - size, more_before=auto_pad != "SAME_UPPER")
            for reached, size in zip(full, output_shape, strict=True)
        ]
    return _convolve(
        x,
        transposed_kernel(w, group),
        b,
        window_strides=(1,) * rank,
        padding=transposed_padding(w.shape[2:], windows.dilation, padding, more),
        lhs_dilation=windows.stride,
        rhs_dilation=windows.dilation,
        feature_group_count=group,
    )


def _check_kernel(w, kernel_shape):
    if kernel_shape is not None and tuple(kernel_shape) != w.shape[2:]:
        raise ModelError(f"kernel_shape is {list(kernel_shape)}, and the weight's is {w.shape}")


def _convolve(x, w, b, **how) -> jax.Array:
    spatial = range(2, x.ndim)
    y = unsharded(
        lax.conv_general_dilated(unsharded(x, spatial), unsharded(w, spatial), **how), spatial
    )
    return y if b is None else y + on_channel_axis(b, len(spatial))
