"""Normalisations: batch, instance, layer, group, root mean square, response; and dropout.

Statistics of 16-bit floats are computed in float32, as ONNX's `stash_type` asks by default.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.kit import on_channel_axis, reciprocal_rms, statistics
from isoshard.core.kit import precision_wide as wide

from ...errors import ModelError
from .operator_arguments import axis_of, scalar_of
from .registry import operator


@operator("BatchNormalization", since=9)
def batch_normalization(
    x, scale, b, input_mean, input_var, *, epsilon=1e-5, momentum=0.9, training_mode=0
):
    """Each channel less its mean, divided by its deviation, scaled and shifted."""
    mean, variance = input_mean, input_var
    if training_mode:
        axes = tuple(axis for axis in range(x.ndim) if axis != 1)
        mean, variance = jnp.mean(wide(x), axes), jnp.var(wide(x), axes)
    factor = scale * lax.rsqrt(variance + epsilon)
    space = x.ndim - 2
    y = (x - on_channel_axis(mean, space)) * on_channel_axis(factor, space)
    y = (y + on_channel_axis(b, space)).astype(x.dtype)
    if not training_mode:
        return y
    running = (input_mean * momentum + mean * (1 - momentum)).astype(input_mean.dtype)
    return y, running, (input_var * momentum + variance * (1 - momentum)).astype(input_var.dtype)


@operator("InstanceNormalization", since=6)
def instance_normalization(x, scale, b, *, epsilon=1e-5):
    """Each image of each channel less its mean, divided by its deviation, scaled and shifted."""
    y, *_ = _normalised(x, tuple(range(2, x.ndim)), epsilon)
    return y.astype(x.dtype) * on_channel_axis(scale, x.ndim - 2) + on_channel_axis(b, x.ndim - 2)


@operator("LayerNormalization", since=17)
def layer_normalization(x, scale, b=None, *, axis=-1, epsilon=1e-5, stash_type=1):
    """The axes from `axis` on less their mean, divided by their deviation, scaled and shifted.

    Args:
        x: any shape.
        scale: can be broadcast to `x`.
        b: likewise.
        axis: the first that is normalised.
        epsilon: added to the variance.
        stash_type: 1: computed in float32; another: in the dtype of `x`.
    """
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    y, mean, inverse = _normalised(x, axes, epsilon, stash_type)
    y = y.astype(x.dtype) * scale
    return (y if b is None else y + b), mean, inverse


@operator("GroupNormalization", since=21)
def group_normalization(x, scale, bias, *, num_groups, epsilon=1e-5, stash_type=1):
    """Groups of channels less their mean, divided by their deviation; scaled by channel."""
    y = _grouped(x, num_groups, epsilon, stash_type)
    return y * on_channel_axis(scale, x.ndim - 2) + on_channel_axis(bias, x.ndim - 2)


@operator("GroupNormalization", since=18)
def group_normalization_by_group(x, scale, bias, *, num_groups, epsilon=1e-5):
    """`GroupNormalization` of opsets 18 to 20, with a scale and a shift per group."""
    repeats = x.shape[1] // num_groups
    scale, bias = (jnp.repeat(value, repeats) for value in (scale, bias))
    y = _grouped(x, num_groups, epsilon, 1)
    return y * on_channel_axis(scale, x.ndim - 2) + on_channel_axis(bias, x.ndim - 2)


def _grouped(x, num_groups, epsilon, stash_type):
    if x.shape[1] % num_groups:
        raise ModelError(f"num_groups={num_groups} does not divide {x.shape[1]} channels")
    groups = x.reshape(x.shape[0], num_groups, -1)
    y, *_ = _normalised(groups, (2,), epsilon, stash_type)
    return y.reshape(x.shape).astype(x.dtype)


def _normalised(x, axes, epsilon, stash_type=1):
    values = wide(x) if stash_type == 1 else x
    mean, _, inverse = statistics(values, axes, epsilon, jnp.mean)
    return (values - mean) * inverse, mean, inverse


@operator("RMSNormalization", since=23)
def rms_normalization(x, scale, *, axis=-1, epsilon=1e-5, stash_type=1):
    """The axes from `axis` on divided by the root of their mean square, scaled."""
    axes = tuple(range(axis_of(axis, x.ndim), x.ndim))
    values = wide(x) if stash_type == 1 else x
    y = values * reciprocal_rms(values, axes, epsilon, jnp.mean)
    return (y.astype(x.dtype) * scale).astype(scale.dtype)


@operator("LpNormalization")
def lp_normalization(x, *, axis=-1, p=2):
    """The input divided by its p-norm along an axis; zero where that is zero."""
    if p not in (1, 2):
        raise ModelError(f"p is {p}; possible are 1 and 2")
    size = jnp.abs(x) if p == 1 else x * x
    total = jnp.sum(size, axis_of(axis, x.ndim), keepdims=True)
    safe = jnp.where(total == 0, 1, total)
    return jnp.where(total == 0, 0, x / (safe if p == 1 else jnp.sqrt(safe)))


@operator("LRN")
def lrn(x, *, size, alpha=1e-4, beta=0.75, bias=1.0):
    """The input divided by a power of the mean square over `size` neighbouring channels."""
    before = (size - 1) // 2
    window = (1, size, *(1,) * (x.ndim - 2))
    padding = ((0, 0), (before, size - 1 - before), *((0, 0),) * (x.ndim - 2))
    total = lax.reduce_window(x * x, np.zeros((), x.dtype), lax.add, window, (1,) * x.ndim, padding)
    return x / (bias + alpha / size * total) ** beta


@operator("Dropout", since=12, static=("ratio", "training_mode"))
def dropout(x, ratio=None, training_mode=None, *, seed=None):
    """The input, and a mask of ones: nothing is dropped outside training."""
    training = training_mode is not None and bool(scalar_of(training_mode, "training_mode"))
    if training and (ratio is None or scalar_of(ratio, "ratio") != 0):
        raise ModelError(
            "Dropout is in training mode, which draws random numbers: export the model in its "
            "inference mode (torch: module.eval())"
        )
    return x, jnp.ones(x.shape, bool)


@operator("Dropout", since=7)
def dropout_by_attribute(x, *, ratio=0.5):
    """`Dropout` before opset 12, where it is never in training mode."""
    return x, jnp.ones(x.shape, bool)
