"""Pooling over axes that are split, into shards of any sizes.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows = shard(jnp.arange(8.0)[None, None], make_mesh((4,), ("x",)), (None, None, "x"))
>>> max_pool(rows, 3, stride=2, padding=1).tolist()
[[[1.0, 3.0, 5.0, 7.0]]]
>>> avg_pool(rows, 3, stride=1).sizes                        # 6 outputs, each with its middle row
(None, None, (1, 2, 2, 1))

Layouts and meanings are torch's: `[batch, channels, *space]`, padding at most half a window.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.kit import any_framework, elements_between, lowest, window_count, window_elements

from .conv import ConvReach, Ints
from .reach import METHODS, Operator, View
from .window_arguments import ArgumentErrors
from .window_operators import apply_or_record

Grid = tuple[tuple[int, ...], ...]
"""The window, stride, padding and dilation of each axis of space."""


@dataclasses.dataclass(frozen=True)
class PoolReach(ConvReach):
    """As a kernel's; `ceil` has a last window that is partial, if it begins in the padded axis.

    `counts` is whether the local function divides by the rows of a window: "" (it does not),
    "real" (those that exist), or "padded".
    """

    ceil: bool = False
    counts: str = ""

    def outputs(self, rows: int) -> int:
        """How many windows there are."""
        pad = self.before, self.after
        return window_count(rows, self.kernel, self.stride, self.dilation, pad, self.ceil)

    def tables(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
        """How many rows each window has."""
        if not self.counts:
            return ()
        low, high = (0, rows) if self.counts == "real" else (-self.before, rows + self.after)
        first = self.reads(o, rows)[0]
        counts = elements_between(first, self.kernel, self.dilation, low, high)
        return (counts.astype(np.float32),)


@dataclasses.dataclass(frozen=True)
class _Max:
    """The largest of each window; its gradient goes to the first such."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    fill: float

    def __call__(self, x: Any, views: tuple[View, ...]) -> Any:
        """Compute as many outputs as fit."""
        pads = _pads(views)
        fill = np.array(self.fill, x.dtype)
        if set(self.dilation) == {1}:
            return lax.reduce_window(
                x, fill, lax.max, (1, 1, *self.window), (1, 1, *self.stride), pads
            )
        # The gradient of a dilated reduce_window is not defined in JAX.
        x = lax.pad(x, fill, [(low, high, 0) for low, high in pads])
        outputs = [view.outputs for view in views]
        taps = window_elements(x, self.window, self.stride, self.dilation, outputs)
        stacked = jnp.stack([*taps])
        return jnp.take_along_axis(stacked, lax.argmax(stacked, 0, np.int32)[None], 0)[0]


@dataclasses.dataclass(frozen=True)
class _Mean:
    """The sum of each window, over a number of rows."""

    window: tuple[int, ...]
    stride: tuple[int, ...]
    divisor: float | None

    def __call__(self, x: Any, views: tuple[View, ...]) -> Any:
        """Compute as many outputs as fit."""
        zero = np.zeros((), x.dtype)
        pads = _pads(views)
        sums = lax.reduce_window(x, zero, lax.add, (1, 1, *self.window), (1, 1, *self.stride), pads)
        if self.divisor is not None:
            return sums / self.divisor
        counts: Any = 1  # divided by at once: rounded once
        for axis, view in enumerate(views):
            line = (-1,) + (1,) * (len(views) - axis - 1)
            counts = counts * jnp.asarray(view.tables[0], x.dtype).reshape(line)
        return sums / counts


def _pads(views: tuple[View, ...]) -> list[tuple[int, int]]:
    """Rows that are not read at the end are no negative padding: no window begins there."""
    return [(0, 0), (0, 0), *(((view.pads[0], max(0, view.pads[1]))) for view in views)]


@any_framework
def max_pool(
    x: Any,
    window: Ints,
    *,
    stride: Ints | None = None,
    padding: Ints = 0,
    dilation: Ints = 1,
    ceil_mode: bool = False,
    method: str = "auto",
    mesh: Any = None,
    spec: Any = None,
) -> Any:
    """Take the largest of each window, as torch's `max_pool1d` to `3d`.

    Args:
        x: `[batch, channels, *space]`, a jax.Array or UnevenArray.
        window: rows of a window; one number or one per axis of space.
        stride: rows from one window to the next; by default `window`.
        padding: rows of the least value on either side.
        dilation: rows from one tap to the next.
        ceil_mode: whether a partial last window counts.
        method: as for `conv`.
        mesh: with `spec`, the sharding of `x`; needed inside `jax.jit`, on Auto axes.
        spec: any spelling of a spec.

    Returns:
        `[batch, channels, *space]`, sharded as `x`.

    Raises:
        ShardingError: an argument, or the sharding, does not fit.

    Example:
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> from isoshard.core.transfer.device_put import shard
        >>> rows = np.array([[[3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]]], np.float32)
        >>> max_pool(shard(rows, make_mesh((4,), ("x",)), (None, None, "x")), 2).tolist()
        [[[3.0, 4.0, 9.0, 6.0]]]
    """
    errors, grid = _arguments("max_pool", x, window, stride, padding, dilation, method)
    errors.raise_any()
    return apply_or_record(max_operator(x.dtype, grid, ceil_mode, method), x, mesh, spec)


@any_framework
def avg_pool(
    x: Any,
    window: Ints,
    *,
    stride: Ints | None = None,
    padding: Ints = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: float | None = None,
    method: str = "auto",
    mesh: Any = None,
    spec: Any = None,
) -> Any:
    """Take the mean of each window, as torch's `avg_pool1d` to `3d`.

    Args:
        x: `[batch, channels, *space]`, a jax.Array or UnevenArray of floats.
        window: rows of a window; one number or one per axis of space.
        stride: rows from one window to the next; by default `window`.
        padding: rows of zeros on either side.
        ceil_mode: whether a partial last window counts.
        count_include_pad: whether padding rows count in the mean.
        divisor_override: what to divide by instead of the number of elements.
        method: as for `conv`.
        mesh: with `spec`, the sharding of `x`; needed inside `jax.jit`, on Auto axes.
        spec: any spelling of a spec.

    Returns:
        `[batch, channels, *space]`, sharded as `x`.

    Raises:
        ShardingError: an argument, or the sharding, does not fit.

    Example:
        >>> avg_pool(jnp.ones((1, 1, 8)), 2, padding=2, divisor_override=0)
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: avg_pool: padding (2,) is more than half of window (2,); divisor_override 0 divides nothing
    """  # noqa: E501
    errors, grid = _arguments("avg_pool", x, window, stride, padding, 1, method)
    errors.require(divisor_override != 0, "divisor_override 0 divides nothing")
    errors.require(jnp.issubdtype(x.dtype, jnp.inexact), f"x is of {x.dtype}, and a mean of floats")
    errors.raise_any()
    counted = "padded" if count_include_pad else "real"
    operator = mean_operator(grid, ceil_mode, counted, divisor_override, method)
    return apply_or_record(operator, x, mesh, spec)


def _arguments(
    verb: str, x: Any, window: Any, stride: Any, padding: Any, dilation: Any, method: str
) -> tuple[ArgumentErrors, Grid]:
    """The window, stride, padding and dilation of each axis."""
    errors = ArgumentErrors(verb)
    axes = len(x.shape) - 2
    errors.require(
        1 <= axes <= 3, f"x of shape {tuple(x.shape)} has not one to three axes of space"
    )
    errors.raise_any()
    windows = errors.per_axis("window", window, axes, least=1)
    strides = errors.per_axis("stride", windows if stride is None else stride, axes, least=1)
    pads = errors.per_axis("padding", padding, axes, least=0)
    dilations = errors.per_axis("dilation", dilation, axes, least=1)
    errors.require(
        all(2 * pad <= size for pad, size in zip(pads, windows, strict=True)),
        f"padding {pads} is more than half of window {windows}",
    )
    errors.choice("method", method, METHODS)
    return errors, (windows, strides, pads, dilations)


def max_operator(dtype: Any, grid: Grid, ceil_mode: bool, method: str = "auto") -> Operator:
    """That of `max_pool`, for arrays of a dtype."""
    fill = lowest(dtype).item()
    window, stride, _, dilation = grid
    local = _Max(window, stride, dilation, fill)
    return Operator("max_pool", _reaches(grid, ceil_mode, ""), local, fill=fill, method=method)


def mean_operator(
    grid: Grid, ceil_mode: bool, counted: str, divisor: float | None, method: str = "auto"
) -> Operator:
    """That of `avg_pool`; `counted` rows are "real" or "padded", as in `PoolReach`."""
    local = _Mean(grid[0], grid[1], divisor)
    return Operator("avg_pool", _reaches(grid, ceil_mode, counted), local, method=method)


def _reaches(grid: Grid, ceil_mode: bool, counts: str) -> tuple[tuple[int, PoolReach], ...]:
    return tuple(
        (axis + 2, PoolReach(window, stride, dilation, pad, pad, ceil_mode, counts))
        for axis, (window, stride, pad, dilation) in enumerate(zip(*grid, strict=True))
    )
