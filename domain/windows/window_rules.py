"""Convolutions, windows and running sums: by the operators that exchange halos.

Where these cannot (a kernel in blocks, channels in blocks, windows that take positions along), the
axis is gathered, and results that keep its size are packed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.kit import (
    AxisSplit,
    Even,
    JaxprEqn,
    Value,
    bind,
    layout_of,
    operand_of,
    ordered,
    pack_like,
    placed,
    rule,
    run_unpacked,
    value_of,
)

from .conv import ConvReach, ConvWindow
from .pool import PoolReach
from .reach import Operator, View
from .running_scan import MAXIMUM, MINIMUM, PRODUCT, SUM, scan_axis
from .transposed_conv import TransposedReach, TransposedWindow
from .window_operators import apply


@rule("conv_general_dilated")
def convolution(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """By halos along axes of space, in its blocks along the batch, and else at the true shape."""
    image, kernel = values
    dims = eqn.params["dimension_numbers"]
    operator = _convolution(eqn)
    image = image.unpacked([dims.lhs_spec[1]])
    if operator is None or kernel.uneven or not placed([image]):
        return _at_true_shape(eqn, [image, kernel])
    if not any(image.splits[axis] for axis in dims.lhs_spec[2:]):
        return _at_true_shape(eqn, [image, kernel])
    image = _transposed(image, dims.lhs_spec)
    weight = jnp.transpose(kernel.array, dims.rhs_spec)
    (result,) = _by(operator, image, weight)
    return [_transposed(result, tuple(map(int, np.argsort(dims.out_spec))))]


def _convolution(eqn: JaxprEqn) -> Operator | None:
    """The convolution of `[batch, channels, *space]`; None if it is of no such kind."""
    params = eqn.params
    weight: Any = eqn.invars[1].aval
    kernel = [weight.shape[axis] for axis in params["dimension_numbers"].rhs_spec[2:]]
    strides, spread = params["window_strides"], params["lhs_dilation"]
    dilation, groups = params["rhs_dilation"], params["feature_group_count"]
    pads = params["padding"]
    if params["batch_group_count"] != 1 or not 1 <= len(kernel) <= 3:
        return None
    each = zip(kernel, strides, spread, dilation, pads, strict=True)
    if all(stride == 1 for stride in spread):
        reaches: list[Any] = [ConvReach(k, s, d, *pad) for k, s, _, d, pad in each]
        local: Any = ConvWindow(tuple(strides), tuple(dilation), groups)
    elif all(stride == 1 for stride in strides):
        reaches = [
            TransposedReach(k, by, d, (k - 1) * d - pad[0], pad[1] - pad[0])
            for k, _, by, d, pad in each
        ]
        before = tuple(reach.padding for reach in reaches)
        extra = tuple(reach.extra for reach in reaches)
        local = TransposedWindow(tuple(spread), tuple(dilation), before, extra, groups)
    else:
        return None
    return Operator("conv", tuple(enumerate(reaches, 2)), local, free=(1,))


def _at_true_shape(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """In blocks along the batch; along other axes at the true shape."""
    image, kernel = values
    dims = eqn.params["dimension_numbers"]
    batch, out = dims.lhs_spec[0], dims.out_spec
    kernel = kernel.unpacked()
    inner = image.unpacked([axis for axis in range(len(image.splits)) if axis != batch])
    if eqn.params["batch_group_count"] != 1:
        inner = inner.unpacked()
    if inner.uneven:
        inner = inner.with_zeros()
        (array,) = bind(eqn, [inner.array, kernel.array])
        splits: list[AxisSplit | None] = [None] * len(out)
        splits[out[0]] = inner.splits[batch]
        result = [Value(array, tuple(splits)).with_zeros()]
    else:
        result = run_unpacked(eqn, [inner, kernel])
    if eqn.params["batch_group_count"] == 1:
        hints: list[Even | None] = [None] * len(out)
        hints[out[0]] = image.hints[batch]
        result = [result[0].hinted(tuple(hints))]
    like: list[AxisSplit | None] = [None] * len(out)
    for spatial in range(2, len(out)):
        like[out[spatial]] = image.splits[dims.lhs_spec[spatial]]
    return pack_like(result, like)


def _transposed(value: Value, order: tuple[int, ...]) -> Value:
    if order == tuple(range(len(order))):
        return value
    splits = tuple(value.splits[axis] for axis in order)
    hints = tuple(value.hints[axis] for axis in order)
    return Value(jnp.transpose(value.array, order), splits, value.clean, hints=hints)


@dataclasses.dataclass(frozen=True)
class _Windows:
    """A reduction of windows over every axis of an array."""

    kind: str
    window: tuple[int, ...]
    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    axes: tuple[int, ...]

    def __call__(self, x: Any, views: tuple[View, ...]) -> Any:
        """Compute as many outputs as fit."""
        pads = list(self.padding)
        for axis, view in zip(self.axes, views, strict=True):
            pads[axis] = (view.pads[0], max(0, view.pads[1]))
        start, join = _joins(self.kind, x.dtype)
        return lax.reduce_window(
            x, start, join, self.window, self.strides, pads, window_dilation=self.dilation
        )


def _joins(kind: str, dtype: Any) -> tuple[Any, Callable[..., Any]]:
    if kind == "reduce_window_sum":
        return np.zeros((), dtype), lax.add
    if kind == "reduce_window_max":
        return MAXIMUM.first(dtype), lax.max
    return MINIMUM.first(dtype), lax.min


@rule("reduce_window_sum", "reduce_window_max", "reduce_window_min")
def windows(eqn: JaxprEqn, values: list[Value]) -> Sequence[Value]:
    """Sums and extremes of windows: by halos."""
    (value,) = values
    operator = _windows(eqn, value)
    if operator is None or not placed([value]):
        return ordered(eqn, values)
    return _by(operator, value)


def _windows(eqn: JaxprEqn, value: Value) -> Operator | None:
    params, rank = eqn.params, len(value.splits)
    ones = (1,) * rank
    window, strides = params["window_dimensions"], params["window_strides"]
    dilation = params.get("window_dilation") or ones
    pads = [tuple(pad) for pad in params["padding"]]
    if tuple(params.get("base_dilation") or ones) != ones or min(map(min, pads)) < 0:
        return None
    axes = [
        axis for axis in range(rank) if (window[axis], strides[axis], pads[axis]) != (1, 1, (0, 0))
    ]
    if not any(value.splits[axis] for axis in axes):
        return None
    reaches = tuple(
        (axis, PoolReach(window[axis], strides[axis], dilation[axis], *pads[axis])) for axis in axes
    )
    kind = eqn.primitive.name
    local = _Windows(
        kind, tuple(window), tuple(strides), tuple(dilation), ((0, 0),) * rank, tuple(axes)
    )
    return Operator("pool", reaches, local, fill=_joins(kind, value.dtype)[0].item())


_RUNNING = {"cumsum": SUM, "cumprod": PRODUCT, "cummax": MAXIMUM, "cummin": MINIMUM}


@rule(*_RUNNING)
def running(eqn: JaxprEqn, values: list[Value]) -> Sequence[Value]:
    """Sums, products and extremes up to each row: one total from each device."""
    (value,) = values
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]
    if value.splits[axis] is None or not placed(values):
        return ordered(eqn, values)
    u = operand_of(value)
    return [value_of(scan_axis(_RUNNING[eqn.primitive.name], u, axis, reverse, None, None))]


def _by(operator: Operator, value: Value, *operands: Any) -> list[Value]:
    u = operand_of(value)
    layout = layout_of(u, verb=operator.verb).opened(operator.free)
    return [value_of(apply(operator, u, layout, *operands))]
