"""Interpolation over axes that are split, into shards of any sizes.

>>> import jax.numpy as jnp
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows = shard(jnp.arange(4.0)[None, None], make_mesh((4,), ("x",)), (None, None, "x"))
>>> interpolate(rows, scale=2, mode="linear").tolist()
[[[0.0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.0]]]
>>> interpolate(rows, size=7, mode="linear", align_corners=True).array.tolist()
[[[0.0, 0.5, 1.0, 0.0, 1.5, 2.0, 2.5, 3.0]]]

Meanings are torch's; "linear" and "cubic" are along each axis, so "bilinear" and "bicubic" there.
An output is a sum over a few rows, which each device has or gets from a neighbour.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from isoshard.core.kit import (
    Taps,
    adaptive_windows,
    any_framework,
    linear_call,
    resample,
    smooth_taps,
)

from .reach import Operator, View
from .window_arguments import ArgumentErrors, is_integer
from .window_operators import apply_or_record

RESIZE_MODES = ("nearest", "nearest-exact", "linear", "cubic", "area")
_CORNERS = ("linear", "cubic")


@dataclasses.dataclass(frozen=True)
class ResizeReach:
    """Output o is a weighted sum of rows; `scale` is outputs per row, None for their ratio."""

    size: int
    mode: str
    align_corners: bool
    scale: float | None
    native = False

    def outputs(self, rows: int) -> int:
        """The new size."""
        return self.size

    def reads(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """From the first row of the sum to the last."""
        taps = self._taps(o, rows)[0]
        return taps.min(1, initial=rows - 1), taps.max(1, initial=0) + 1

    def home(self, o: np.ndarray, rows: int) -> np.ndarray:
        """The row at the same relative position."""
        return (2 * o + 1) * rows // (2 * self.size)

    def tables(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, ...]:
        """The rows of each sum, their weights, and the outputs' indices."""
        return (*self._taps(o, rows), o.astype(np.int32))

    def readers(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """The other way around: for each row the outputs that read it, and with what weights.

        Example:
            >>> ResizeReach(3, "nearest", False, None).readers(2)[0].tolist()
            [[0, 1], [2, 0]]
        """
        taps, weights = self._taps(np.arange(self.size), rows)
        output, tap = np.nonzero(weights)
        row = taps[output, tap]
        order = np.argsort(row, kind="stable")
        counts = np.bincount(row, minlength=rows)
        rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        readers = np.zeros((rows, max(counts.max(initial=0), 1)), np.int32)
        shares = np.zeros(readers.shape)
        readers[row[order], rank] = output[order]
        shares[row[order], rank] = weights[output, tap][order]
        return readers, shares

    def _taps(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        rates = {"nearest": self._nearest, "nearest-exact": self._nearest, "area": self._area}
        taps, weights = rates.get(self.mode, self._smooth)(o, rows)
        return np.clip(taps, 0, rows - 1).astype(np.int32), weights

    def _nearest(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        exact = self.mode == "nearest-exact"
        if self.scale is None:
            row = (2 * o + exact) * rows // (2 * self.size)
        else:
            row = np.floor((o + exact / 2) / self.scale).astype(int)
        return row[:, None], np.ones((len(o), 1))

    def _area(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        taps, inside = adaptive_windows(o, rows, self.size)
        return taps, inside / inside.sum(1, keepdims=True)

    def _smooth(self, o: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
        corners, scale = self.align_corners, self.scale
        taps = smooth_taps(self.mode, o, rows, self.size, align_corners=corners, scale=scale)
        return taps.indices.T, taps.weights.T


@dataclasses.dataclass(frozen=True)
class _Sums:
    """The weighted sums of a window's rows, axis after axis.

    Each is linear, and has its own transpose: a sum over the outputs that read a row. JAX's own
    is a scatter, which takes 60 times as long on CPUs.
    """

    reaches: tuple[ResizeReach, ...]
    rows: tuple[int, ...]

    def __call__(self, window: Any, views: tuple[View, ...]) -> Any:
        """Compute the outputs."""
        for axis, (view, reach, rows) in enumerate(
            zip(views, self.reaches, self.rows, strict=True), 2
        ):
            taps, weights, outputs = view.tables
            taps = jnp.clip(taps - view.start, 0, window.shape[axis] - 1)
            if not jnp.issubdtype(window.dtype, jnp.inexact):
                window = jnp.take(window, taps[:, 0], axis)
                continue
            row_indices = jnp.minimum(view.start + jnp.arange(window.shape[axis]), rows - 1)
            readers, shares = reach.readers(rows)
            readers = jnp.asarray(readers)[row_indices] - outputs[0]
            in_view = (readers >= 0) & (readers < view.outputs)
            in_view &= (view.start + jnp.arange(window.shape[axis]) < rows)[:, None]
            shares = jnp.where(in_view, jnp.asarray(shares)[row_indices], 0)
            readers = jnp.clip(readers, 0, view.outputs - 1)
            window = linear_call(
                lambda tables, x, axis=axis: _summed(x, tables[0], axis),
                lambda tables, x, axis=axis: _summed(x, tables[1], axis),
                ((taps, weights), (readers, shares)),
                window,
            )
        return window


def _summed(x: Any, sums: tuple[Any, Any], axis: int) -> Any:
    """Sums of `rows[i, 0]`, `rows[i, 1]`, .. of an axis, with weights."""
    rows, weights = sums
    return resample(x, axis, Taps(rows.T, jnp.asarray(weights, x.dtype).T), mode="clip")


@any_framework
def interpolate(
    x: Any,
    *,
    size: int | Sequence[int] | None = None,
    scale: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool = False,
    mesh: Any = None,
    spec: Any = None,
) -> Any:
    """Resize one, two or three axes, as torch's `interpolate`.

    Args:
        x: `[batch, channels, *space]`, a jax.Array or UnevenArray of floats; of any dtype for the
            nearest modes.
        size: outputs along each axis of space, or one number for all.
        scale: outputs per row instead, likewise; the size is rounded down.
        mode: "nearest", "nearest-exact", "linear", "cubic", or "area".
        align_corners: whether the first and last output are the first and last row, and not the
            outer boundaries the same; for "linear" and "cubic".
        mesh: with `spec`, the sharding of `x`; needed inside `jax.jit`, on Auto axes.
        spec: any spelling of a spec.

    Returns:
        `[batch, channels, *space]`, sharded as `x`: an UnevenArray if `x` is one or the outputs
        do not divide.

    Raises:
        ShardingError: an argument, or the sharding, does not fit.

    Example:
        >>> interpolate(jnp.ones((1, 1, 4)), mode="area", align_corners=True)
        Traceback (most recent call last):
            ...
        isoshard.core.errors.ShardingError: interpolate: give either size or scale; align_corners is for 'linear' and 'cubic', not 'area'
    """  # noqa: E501
    errors = ArgumentErrors("interpolate")
    axes = len(x.shape) - 2
    errors.require(
        1 <= axes <= 3, f"x of shape {tuple(x.shape)} has not one to three axes of space"
    )
    errors.raise_any()
    errors.require((size is None) != (scale is None), "give either size or scale")
    errors.choice("mode", mode, RESIZE_MODES)
    errors.require(
        not align_corners or mode in _CORNERS,
        f"align_corners is for 'linear' and 'cubic', not {mode!r}",
    )
    nearest = mode.startswith("nearest")
    errors.require(
        nearest or jnp.issubdtype(x.dtype, jnp.inexact),
        f"x is of {x.dtype}, and mode {mode!r} of floats",
    )
    scales = _scales(errors, scale, axes)
    if size is None:
        sizes = tuple(int(n * (s or 1)) for n, s in zip(x.shape[2:], scales, strict=True))
        errors.require(min(sizes) > 0, f"scale {scale!r} leaves nothing of {tuple(x.shape[2:])}")
    else:
        sizes = errors.per_axis("size", size, axes, least=1)
    errors.raise_any()
    rows = tuple(x.shape[2:])
    return apply_or_record(resize_operator(rows, sizes, scales, mode, align_corners), x, mesh, spec)


def resize_operator(
    rows: tuple[int, ...],
    sizes: tuple[int, ...],
    scales: tuple[float | None, ...],
    mode: str,
    align_corners: bool,
) -> Operator:
    """That of `interpolate`: from rows to sizes, by ratios where there are any."""
    reaches = tuple(
        ResizeReach(new, mode, align_corners, ratio)
        for new, ratio in zip(sizes, scales, strict=True)
    )
    return Operator("interpolate", tuple(enumerate(reaches, 2)), _Sums(reaches, rows))


def _scales(errors: ArgumentErrors, scale: Any, axes: int) -> tuple[float | None, ...]:
    if scale is None:
        return (None,) * axes
    is_scalar = isinstance(scale, float) or is_integer(scale)
    ratios: Any = (scale,) * axes if is_scalar else scale
    valid = (
        isinstance(ratios, Sequence) and len(ratios) == axes and all(ratio > 0 for ratio in ratios)
    )
    errors.require(valid, f"scale {scale!r} is no number above 0, or {axes} of them")
    return tuple(map(float, ratios)) if valid else (1.0,) * axes
