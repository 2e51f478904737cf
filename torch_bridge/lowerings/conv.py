"""Convolutions of any number of spatial axes, plain and transposed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from isoshard.core.blocks.interpreting import recording
from isoshard.core.extensions import (
    block_conv,
    block_conv_transpose,
    by_halos,
    conv_operator,
    cotangent_by_halos,
    operand_cotangent_by_halos,
    transposed_operator,
)
from isoshard.core.nn.convolution import (
    each_group,
    kernel_gradient,
    on_channel_axis,
    transposed_kernel,
    transposed_padding,
)

from . import integer_products
from .argument_forms import per_axis, wide, wide_dtype
from .block_operators import by_groups, by_rows, over_space
from .conv_split import batch_split, kernel_unsharded
from .memory_order import format_of
from .program_partition import partition
from .registry import lower
from .vjp import pull_back


def _options(
    rank: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[Any, Any, Any, Any, Any, Any]:
    """The options of a convolution, with a value for every spatial axis."""
    stride, padding, dilation = (per_axis(v, rank) for v in (stride, padding, dilation))
    return stride, padding, dilation, transposed, per_axis(output_padding, rank), groups


def convolve(
    x: jax.Array,
    weight: jax.Array,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    channels_last: bool = False,
    sums: np.dtype | None = None,
) -> jax.Array:
    """A convolution, plain or transposed.

    Args:
        x: (batch, channels, *space), or (batch, *space, channels).
        weight: as torch has it: (out, in / groups, *kernel); transposed (in, out / groups, ..).
        stride: one per spatial axis, or one for all; so are the other options.
        padding: on both sides of each axis.
        dilation: between the elements of the kernel.
        transposed: whether it is the gradient of a convolution.
        output_padding: of a transposed one, after the end.
        groups: of channels that do not see each other.
        channels_last: where the channels of `x` and of the result are.
        sums: dtype of the result; by default that of `x`.
    """
    rank = x.ndim - 2
    conv_options = _options(rank, stride, padding, dilation, transposed, output_padding, groups)
    stride, padding, dilation, *_ = conv_options
    rows = _of_rows(x, weight, *conv_options, channels_last=channels_last, sums=sums)
    if rows is not None:
        operator, kernel = rows
        return _last(by_halos(operator, _first(x, channels_last), kernel), channels_last)
    window: dict[str, Any] = {
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
    }
    operator = block_conv
    if transposed:
        operator, window["output_padding"] = block_conv_transpose, conv_options[4]
    return over_space(
        lambda x, weight: _unsharded_convolve(x, weight, *conv_options, channels_last, sums),
        lambda x, weight: operator(x, weight, **window),
        rank,
        channels_last=channels_last,
    )(x, weight)


def _of_rows(
    x: jax.Array,
    weight: jax.Array,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
    *,
    channels_last: bool,
    sums: np.dtype | None,
):
    """The operator of which each device computes its own results, and its kernel.

    None for a plain convolution: XLA's partitioner sends halos for it. Of one in groups it gathers
    the batch, and of a depthwise one whose batch is split over a part of the mesh it adds up the
    kernel's gradient too often.
    """
    rank = x.ndim - 2
    plain = groups == 1 and not transposed and all(d == 1 for d in dilation)
    if plain or 0 in weight.shape or not (by_groups(x) if groups > 1 else by_rows(x, rank)):
        return None
    if not transposed:
        pads = tuple((p, p) for p in padding)
        return conv_operator(weight.shape, stride, pads, dilation, groups, sums), weight
    settings = (stride, padding, output_padding, dilation, groups, sums)
    return transposed_operator(weight.shape, *settings), transposed_kernel(weight, groups)


def _first(images: jax.Array, channels_last: bool) -> jax.Array:
    return jnp.moveaxis(images, -1, 1) if channels_last else images


def _last(images: jax.Array, channels_last: bool) -> jax.Array:
    return jnp.moveaxis(images, 1, -1) if channels_last else images


def biased(
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *options: Any,
    channels_last: bool = False,
) -> jax.Array:
    """`convolve` and a bias (or None), which is added before the one rounding."""
    if bias is None:
        return convolve(x, weight, *options, channels_last=channels_last)
    sums = wide_dtype(x.dtype)
    out = wide(convolve(x, weight, *options, channels_last=channels_last, sums=sums))
    return out + (wide(bias) if channels_last else on_channel_axis(wide(bias), x.ndim - 2))


def _unsharded_convolve(
    x: jax.Array,
    weight: jax.Array,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    transposed: bool,
    output_padding: tuple[int, ...],
    groups: int,
    channels_last: bool,
    sums: np.dtype | None,
) -> jax.Array:
    rank = x.ndim - 2
    pads = [(p, p) for p in padding]
    options: dict[str, Any] = {"window_strides": stride, "padding": pads}
    if sums not in (None, x.dtype):
        options["preferred_element_type"] = sums
    if transposed:
        options["window_strides"], options["lhs_dilation"] = (1,) * rank, stride
        options["padding"] = transposed_padding(weight.shape[2:], dilation, pads, output_padding)
        weight = transposed_kernel(weight, groups)
    return _grouped(x, weight, groups, channels_last, rhs_dilation=dilation, **options)


def _grouped(
    x: jax.Array, weight: jax.Array, groups: int, channels_last: bool, **options: Any
) -> jax.Array:
    rank = x.ndim - 2
    channels = x.ndim - 1 if channels_last else 1
    spread = any(d > 1 for d in options["rhs_dilation"]) or "lhs_dilation" in options
    unsplit = groups > 1 or spread
    if unsplit:
        x = batch_split(x)
    if channels_last:
        images = (0, rank + 1, *range(1, rank + 1))
        kernel = (rank + 1, rank, *range(rank))
        layout = lax.ConvDimensionNumbers(images, kernel, images)
        order = (*range(2, rank + 2), 1, 0)
    else:
        layout, order = None, tuple(range(rank + 2))
    inputs = order.index(1)

    def convolve_group(x: jax.Array, weight: jax.Array, groups: int) -> jax.Array:
        out = integer_products.convolution(
            x,
            kernel_unsharded(weight.transpose(order), None if unsplit else inputs),
            feature_group_count=groups,
            dimension_numbers=layout,
            **options,
        )
        return batch_split(out) if unsplit else out

    # XLA's partitioner is wrong where channels are split over more devices than there are groups.
    if groups == 1 or groups % jax.device_count() == 0:
        return convolve_group(x, weight, groups)
    groups_of_operands = zip(jnp.split(x, groups, channels), jnp.split(weight, groups), strict=True)
    return jnp.concatenate(
        [convolve_group(*operands, 1) for operands in groups_of_operands], channels
    )


def _refuse_negative(padding: Sequence[int], dilation: Sequence[int]) -> None:
    """torch's shape function takes them, its kernels do not."""
    if min(padding, default=0) < 0:
        raise RuntimeError(f"negative padding is not supported: {list(padding)}; slice the images")
    if min(dilation, default=1) < 1:
        raise RuntimeError(f"dilation should be greater than zero: {list(dilation)}")


def _as_kernel_strides(x: torch.Tensor, weight: torch.Tensor, *options: Any) -> torch.Tensor:
    """The shape of a convolution, with channels last where torch's CPU kernels write them so."""
    _refuse_negative(*options[2:4])
    out = torch.ops.aten.convolution.default(x, weight, *options)
    format = format_of(x) or format_of(weight)
    double = torch.float64 in (x.dtype, weight.dtype)
    single_volume = x.dim() == 5 and x.shape[0] == options[-1] == 1  # a volume without groups
    return (
        out if format is None or double or single_volume else out.contiguous(memory_format=format)
    )


lower("aten::convolution", meta=_as_kernel_strides)(biased)


@lower(
    "aten::_convolution",
    meta=lambda x, weight, *options: _as_kernel_strides(x, weight, *options[:7]),
)
def _convolution_with_flags(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, *options: Any
) -> jax.Array:
    return biased(x, weight, bias, *options[:6])


def gradient_of_images(
    grad: jax.Array, x: jax.Array, weight: jax.Array, *options: Any, channels_last: bool = False
) -> jax.Array:
    """The gradient of what `convolve` convolves; `options` as there."""
    conv_options = _options(x.ndim - 2, *options)
    rows = _cotangent_operands(grad, x, weight, *conv_options, channels_last=channels_last)
    if rows is None:
        function = functools.partial(convolve, channels_last=channels_last)
        return pull_back(lambda a: function(a, weight, *conv_options), grad, x)[0]
    return _last(cotangent_by_halos(*rows).astype(x.dtype), channels_last)


def gradient_of_weight(
    grad: jax.Array, x: jax.Array, weight: jax.Array, *options: Any, channels_last: bool = False
) -> jax.Array:
    """The gradient of the weight of `convolve`; `options` as there."""
    stride, padding, dilation, transposed, _, groups = conv_options = _options(x.ndim - 2, *options)
    rows = _cotangent_operands(grad, x, weight, *conv_options, channels_last=channels_last)
    if rows is not None:
        cotangent = operand_cotangent_by_halos(*rows).astype(weight.dtype)
        if not transposed:
            return cotangent
        return pull_back(lambda w: transposed_kernel(w, groups), cotangent, weight)[0]
    if partition().partly and not recording():
        if channels_last:
            grad, x = (jnp.moveaxis(images, -1, 1) for images in (grad, x))
        image, cotangents = (grad, x) if transposed else (x, grad)
        return kernel_gradient(
            image, cotangents, weight.shape[2:], stride, padding, dilation, groups
        )

    def usual(grad: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
        function = functools.partial(convolve, channels_last=channels_last)
        return pull_back(lambda w: function(x, w, *conv_options), grad, weight)[0]

    def by_group(grad: jax.Array, x: jax.Array, weight: jax.Array) -> jax.Array:
        def group_product(x: jax.Array, weight: jax.Array) -> jax.Array:
            return _unsharded_convolve(x, weight, *conv_options[:-1], 1, channels_last, None)

        channels = x.ndim - 1 if channels_last else 1
        return pull_back(lambda w: each_group(group_product, x, w, groups, channels), grad, weight)[
            0
        ]

    if groups > 1 and partition().replicated and not recording() and 0 not in x.shape:
        return lax.platform_dependent(grad, x, weight, cpu=by_group, default=usual)
    return usual(grad, x, weight)


def _cotangent_operands(
    grad: jax.Array, x: jax.Array, weight: jax.Array, *options: Any, channels_last: bool
):
    """Operands of the gradients of `_of_rows`: operator, both images, kernel; or None."""
    rows = _of_rows(x, weight, *options, channels_last=channels_last, sums=None)
    if rows is None:
        return None
    operator, kernel = rows
    return operator, *(wide(_first(each, channels_last)) for each in (grad, x)), wide(kernel)


@lower("aten::convolution_backward")
def gradients(
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    *options: Any,
    channels_last: bool = False,
) -> tuple[jax.Array | None, ...]:
    """The gradients of `biased`; `options` as there, then the output mask."""
    *conv_options, output_mask = options
    of_x, of_weight = None, None
    if output_mask[0]:
        of_x = gradient_of_images(grad, x, weight, *conv_options, channels_last=channels_last)
    if output_mask[1]:
        of_weight = gradient_of_weight(grad, x, weight, *conv_options, channels_last=channels_last)
    channels = grad.ndim - 1 if channels_last else 1
    axes = tuple(axis for axis in range(grad.ndim) if axis != channels)
    return of_x, of_weight, jnp.sum(grad, axis=axes) if output_mask[2] else None


@lower("aten::conv_tbc")
def _conv_tbc(x: jax.Array, weight: jax.Array, bias: jax.Array, pad: int = 0) -> jax.Array:
    """1-d convolution of (time, batch, channel) with a kernel (width, in, out)."""
    layout = ("HNC", "HIO", "HNC")
    sums = wide_dtype(x.dtype)
    out = integer_products.convolution(
        *(x, weight),
        feature_group_count=1,
        dimension_numbers=layout,
        window_strides=(1,),
        padding=[(pad, pad)],
        rhs_dilation=(1,),
        preferred_element_type=sums,
    )
    return out + wide(bias)
