"""Operators that move elements about: joins, pads, flips, casts.

Views (`transpose`, `slice`, `expand`, ..) belong to the engine; here are the functions that make a
new array.

>>> from isoshard.torch_bridge.lowerings import registry
>>> constant_pad_nd = registry.find(torch.ops.aten.constant_pad_nd.default).function
>>> constant_pad_nd(jnp.ones(3), (1, -1), 7.0)
Array([7., 1., 1.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from isoshard.core.extensions import block_pad
from isoshard.core.lifting.in_blocks import in_blocks

from .argument_forms import as_scalar, axis, cast
from .index_updates import read_slice
from .memory_order import as_images, format_of, lower_cloned, lower_contiguous
from .registry import lower
from .unsharded_axes import named, unsharded

for _name in ("clone", "lift_fresh_copy", "alias_copy", "detach_copy"):
    lower(f"aten::{_name}")(lambda x: x)
for _name in ("_unsafe_view", "_reshape_copy", "view_copy"):
    lower(f"aten::{_name}")(jnp.reshape)


@lower("aten::_to_copy")
def to_copy(x: jax.Array, *, dtype: np.dtype | None = None) -> jax.Array:
    """The array in another dtype."""
    return x if dtype is None or x.dtype == dtype else cast(x, dtype)


@lower("aten::copy")
def copy(x: jax.Array, src: jax.Array) -> jax.Array:
    """`src` in the shape and dtype of `x`."""
    return jnp.broadcast_to(to_copy(src, dtype=x.dtype), x.shape)


@lower("aten::cat", promote="inputs")
def cat(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """Arrays joined along an axis; torch skips those of shape (0,)."""
    kept = [t for t in tensors if t.shape != (0,)]
    return jnp.concatenate(kept, axis=dim) if kept else tensors[0]


@lower("aten::stack", promote="inputs")
def stack(tensors: Sequence[jax.Array], dim: int = 0) -> jax.Array:
    """Arrays joined along a new axis."""
    return jnp.stack(tensors, axis=dim)


@lower_cloned("aten::flip")
def flip(x: jax.Array, dims: Sequence[int]) -> jax.Array:
    """The array backwards along the axes `dims`."""
    return jnp.flip(x, [axis(d, x.ndim) for d in dims]) if x.ndim else x


def _rolled(
    x: torch.Tensor, shifts: int | Sequence[int], dims: int | list[int] | tuple[int, ...] = ()
) -> torch.Tensor:
    """An empty tensor has no axis that torch would look at."""
    return torch.roll(x, shifts, dims) if x.numel() else torch.empty_like(x)


@lower("aten::roll", meta=_rolled)
def roll(x: jax.Array, shifts: int | Sequence[int], dims: int | Sequence[int] = ()) -> jax.Array:
    """The array turned by `shifts` along `dims`; along its flat form without `dims`."""
    shifts = [shifts] if isinstance(shifts, int) else shifts
    dims = [dims] if isinstance(dims, int) else dims
    if x.size == 0:
        return x
    if not dims or x.ndim == 0:
        return jnp.roll(x, sum(shifts))
    return jnp.roll(x, shifts, dims)


def _rot90_shape(x: torch.Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> torch.Tensor:
    """torch's other kernels turn by a flip, which keeps strides, and a transposition."""
    result = torch.ops.aten.rot90(x, k, dims)
    if k % 4 == 0:
        return result
    flipped = x.clone()
    return flipped if k % 4 == 2 else flipped.transpose(*dims)


@lower("aten::rot90", meta=_rot90_shape)
def rot90(x: jax.Array, k: int = 1, dims: Sequence[Any] = (0, 1)) -> jax.Array:
    """A quarter turn, `k` times, in the plane of two axes."""
    return jnp.rot90(x, k % 4, tuple(dims))


@lower("aten::repeat", "aten::tile")
def repeat(x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    """Copies of the array side by side along each axis, new axes in front."""
    return jnp.tile(x, tuple(repeats))


@lower("aten::repeat_interleave.self_int")
def repeat_interleave(
    x: jax.Array, repeats: int, dim: int | None = None, *, output_size: int | None = None
) -> jax.Array:
    """Each element `repeats` times in a row along an axis."""
    return jnp.repeat(x, repeats, axis=dim)


@lower_contiguous("aten::tril")
def tril(x: jax.Array, diagonal: int = 0) -> jax.Array:
    """The lower triangle of each matrix, 0 above it."""
    return jnp.tril(x, diagonal)


@lower_contiguous("aten::triu")
def triu(x: jax.Array, diagonal: int = 0) -> jax.Array:
    """The upper triangle of each matrix, 0 below it."""
    return jnp.triu(x, diagonal)


def _pixels_shuffled(x: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    result = torch.ops.aten.pixel_shuffle.default(x, upscale_factor)
    format = format_of(x)
    return result if format is None else result.contiguous(memory_format=format)


@lower("aten::pixel_shuffle", meta=_pixels_shuffled)
def pixel_shuffle(x: jax.Array, upscale_factor: int) -> jax.Array:
    """Channels become blocks of pixels: (.., C r r, H, W) to (.., C, H r, W r)."""
    r = upscale_factor
    *batch, channels, height, width = x.shape
    blocks = x.reshape(*batch, channels // r**2, r, r, height, width)
    return jnp.moveaxis(blocks, (-4, -3), (-3, -1)).reshape(
        *batch, channels // r**2, height * r, width * r
    )


@lower("aten::pixel_unshuffle")
def pixel_unshuffle(x: jax.Array, downscale_factor: int) -> jax.Array:
    """Blocks of pixels become channels: (.., C, H r, W r) to (.., C r r, H, W)."""
    r = downscale_factor
    *batch, channels, height, width = x.shape
    blocks = x.reshape(*batch, channels, height // r, r, width // r, r)
    return jnp.moveaxis(blocks, (-3, -1), (-4, -3)).reshape(
        *batch, channels * r**2, height // r, width // r
    )


def _shuffled(x: torch.Tensor, groups: int) -> torch.Tensor:
    format = format_of(x) or torch.contiguous_format
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=format)


@lower("aten::channel_shuffle", "aten::native_channel_shuffle", meta=_shuffled)
def channel_shuffle(x: jax.Array, groups: int) -> jax.Array:
    """The channels of (N, C, ..) dealt round robin from `groups` groups."""
    count, channels, *rest = x.shape
    return jnp.swapaxes(x.reshape(count, groups, channels // groups, *rest), 1, 2).reshape(x.shape)


@lower("aten::constant_pad_nd")
def constant_pad_nd(x: jax.Array, pad: Sequence[int], value: complex = 0) -> jax.Array:
    """`value` around the array; pairs (before, after) from the last axis on, negative ones crop."""
    pairs = _pairs(pad, x.ndim)
    if min(pad, default=0) < 0:
        x, pairs = _cropped(x, pairs)
    # XLA's partitioner ends the process when a part is taken out of the padding of a split axis.
    x = unsharded(x, [axis for axis, pair in enumerate(pairs) if any(pair)])
    return jax.lax.pad(x, as_scalar(value, x.dtype), [(lo, hi, 0) for lo, hi in pairs])


def _cropped(
    x: jax.Array, pairs: Sequence[tuple[int, int]]
) -> tuple[jax.Array, list[tuple[int, int]]]:
    """The array cropped by negative pairs, and the remaining pairs.

    XLA's partitioner is wrong about a pad that crops at one end and grows at the other.
    """
    starts = [max(0, -low) for low, _ in pairs]
    stops = [size + min(0, high) for size, (_, high) in zip(x.shape, pairs, strict=True)]
    cropped = jax.lax.slice(named(x), starts, stops)
    return cropped, [(max(0, low), max(0, high)) for low, high in pairs]


def _pairs(pad: Sequence[int], ndim: int) -> list[tuple[int, int]]:
    """aten's flat padding list, last axis first, as one (before, after) per axis."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    return [(0, 0)] * (ndim - len(pairs)) + pairs


def _pad_as(mode: str) -> Callable[..., jax.Array]:
    """A pad by the array's own elements; negative padding crops the padded array."""

    def pad(x: jax.Array, padding: Sequence[int]) -> jax.Array:
        def pad_array(x: jax.Array) -> jax.Array:
            pairs = _pairs([max(p, 0) for p in padding], x.ndim)
            grown = _edged(x, pairs) if mode == "edge" else jnp.pad(x, pairs, mode=mode)
            crops = _pairs([min(p, 0) for p in padding], x.ndim)
            return _cropped(grown, crops)[0]

        def by_halos(u: Any) -> Any:
            return block_pad(u, _pairs(padding, u.ndim), mode)

        return in_blocks(pad_array, by_halos)(x)

    return pad


def _edged(x: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """`jnp.pad(x, pairs, mode="edge")`, whose first rows XLA's partitioner takes for all of `x`."""
    for dim, (low, high) in enumerate(pairs):
        size, shape = x.shape[dim], list(x.shape)
        operands = [x]
        if low:
            shape[dim] = low
            operands.insert(0, jnp.broadcast_to(read_slice(x, dim, 0, 1), shape))
        if high:
            shape[dim] = high
            operands.append(jnp.broadcast_to(read_slice(x, dim, size - 1, size), shape))
        x = jnp.concatenate(operands, dim)
    return x


def _pad_backward(pad: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    def backward(grad_output: jax.Array, x: jax.Array, padding: Sequence[int]) -> jax.Array:
        return jax.vjp(lambda x: pad(x, padding), x)[1](grad_output)[0]

    return backward


for _rank in (1, 2, 3):
    for _name, _pad in (("reflection", _pad_as("reflect")), ("replication", _pad_as("edge"))):
        _padded = f"aten::{_name}_pad{_rank}d"
        lower(_padded, meta=as_images(_padded))(_pad)
        _backward = f"{_padded}_backward"
        lower(_backward, meta=as_images(_backward, 1))(_pad_backward(_pad))
