"""Histograms, of numbers and of points.

A bin includes its left edge and not its right one; the last one includes both. Numbers outside
and NaN are not counted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from .registry import lower


def _outer(
    x: jax.Array, least: float | None, most: float | None, half: float
) -> tuple[jax.Array, jax.Array]:
    """The outer edges: the arguments, or of the data where they are equal; never an empty span."""
    if least is None and x.size:
        low, high = jnp.min(x), jnp.max(x)
    else:
        low, high = (
            jnp.asarray(end, x.dtype) for end in (least or 0, 1 if least is None else most)
        )
    flat = low == high
    return jnp.where(flat, low - half, low), jnp.where(flat, high + half, high)


def _as_many_as_bins(
    x: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0
) -> torch.Tensor:
    """One count for each bin. torch's own shape function warns of what is random on CUDA alone."""
    if bins <= 0:
        raise RuntimeError(f"torch.histc(): bins must be > 0, but got {bins} for dimension 0")
    if not (math.isfinite(min) and math.isfinite(max)):
        raise RuntimeError(f"torch.histc: range of [{min}, {max}] is not finite")
    if min > max:
        raise RuntimeError(f"torch.histc: max must be larger than min, but got [{min}, {max}]")
    return x.new_empty((bins,))


@lower("aten::histc", meta=_as_many_as_bins)
def _histc(x: jax.Array, bins: int = 100, min: float = 0, max: float = 0) -> jax.Array:
    bounds = (None, None) if min == max else (min, max)
    values = x.reshape(-1)
    low, high = _outer(values, *bounds, 1)
    bin_index = jnp.floor((values - low) / (high - low) * bins)
    inside = (values >= low) & (values <= high)
    bin_index = jnp.where(inside, jnp.minimum(bin_index, bins - 1), bins).astype(jnp.int32)
    return jnp.zeros((bins,), x.dtype).at[bin_index].add(jnp.ones_like(values), mode="drop")


def _edges(x: jax.Array, bins: int, span: Sequence[float] | None) -> jax.Array:
    least, most = span or (None, None)
    low, high = _outer(x, least, most, 0.5)
    return jnp.linspace(low, high, bins + 1, dtype=x.dtype)


def _count(
    points: jax.Array, edges: Sequence[jax.Array], weight: jax.Array | None, density: bool
) -> jax.Array:
    """The histogram of points (M, D) over a grid with these edges along each axis."""
    bin_index = jnp.zeros(points.shape[:1], jnp.int32)
    inside = jnp.ones(points.shape[:1], bool)
    for axis, edge in enumerate(edges):
        x, bins = points[:, axis], edge.shape[0] - 1
        inside &= (x >= edge[0]) & (x <= edge[-1])
        axis_bin = jnp.searchsorted(edge, x, side="right").astype(jnp.int32) - 1
        bin_index = bin_index * bins + jnp.clip(axis_bin, 0, bins - 1)
    shape = [edge.shape[0] - 1 for edge in edges]
    total = functools.reduce(lambda a, b: a * b, shape, 1)
    share = jnp.ones(bin_index.shape, points.dtype) if weight is None else weight.reshape(-1)
    counts = jnp.zeros((total,), points.dtype)
    counts = counts.at[jnp.where(inside, bin_index, total)].add(share, mode="drop").reshape(shape)
    if density:
        widths = [jnp.diff(edge) for edge in edges]
        volume = functools.reduce(jnp.multiply.outer, widths)
        counts = counts / jnp.sum(counts) / volume
    return counts


@lower(
    "aten::histogram.bin_ct",
    meta=lambda x, bins=100, **_: (x.new_empty((bins,)), x.new_empty((bins + 1,))),
)
def _histogram(
    x: jax.Array,
    bins: int = 100,
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> tuple[jax.Array, jax.Array]:
    edges = _edges(x.reshape(-1), bins, range)
    return _count(x.reshape(-1, 1), [edges], weight, density), edges


@lower(
    "aten::histogram.bins_tensor",
    meta=lambda x, bins, **_: (x.new_empty((bins.numel() - 1,)), x.new_empty((bins.numel(),))),
)
def _histogram_between(
    x: jax.Array, bins: jax.Array, *, weight: jax.Array | None = None, density: bool = False
) -> tuple[jax.Array, jax.Array]:
    return _count(x.reshape(-1, 1), [bins], weight, density), bins


def _grid(
    x: jax.Array, bins: Sequence[int], span: Sequence[float] | None
) -> tuple[jax.Array, list[jax.Array]]:
    points = x.reshape(-1, x.shape[-1])
    spans = [None] * len(bins) if span is None else list(zip(span[::2], span[1::2], strict=True))
    return points, [
        _edges(points[:, axis], count, span)
        for axis, (count, span) in enumerate(zip(bins, spans, strict=True))
    ]


def _edge_shapes(x: torch.Tensor, bins: Sequence[int], **_: Any) -> list[torch.Tensor]:
    return [x.new_empty((count + 1,)) for count in bins]


@lower("aten::_histogramdd_bin_edges", meta=_edge_shapes)
def _bin_edges(
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> list[jax.Array]:
    return _grid(x, bins, range)[1]


@lower("aten::_histogramdd_from_bin_cts", meta=lambda x, bins, **_: x.new_empty(tuple(bins)))
def _histogramdd(
    x: jax.Array,
    bins: Sequence[int],
    *,
    range: Sequence[float] | None = None,
    weight: jax.Array | None = None,
    density: bool = False,
) -> jax.Array:
    return _count(*_grid(x, bins, range), weight, density)


@lower(
    "aten::_histogramdd_from_bin_tensors",
    meta=lambda x, bins, **_: x.new_empty(tuple(edge.numel() - 1 for edge in bins)),
)
def _histogramdd_between(
    x: jax.Array,
    bins: Sequence[jax.Array],
    *,
    weight: jax.Array | None = None,
    density: bool = False,
) -> jax.Array:
    return _count(x.reshape(-1, x.shape[-1]), bins, weight, density)
