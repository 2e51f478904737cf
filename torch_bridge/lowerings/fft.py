"""Discrete Fourier transforms, the three that torch makes all others of.

torch encodes the scale of a transform: 0 for none, 1 for one over the root of the number
of elements, 2 for one over their number. XLA transforms at most three axes at once, so more are
done three at a time; and it cannot transform an axis that is split over devices.

>>> print(_scaled(jnp.ones(4), 4, 1))
[0.5 0.5 0.5 0.5]

In a program on a mesh a transform is an operator that reads its operand's sharding at compilation
(`isoshard.domain.fourier.fourier_primitive`): along unsharded axes nothing is sent, and along
split ones lines are exchanged. JAX compiles such an operator where all layouts are on one mesh;
where they are on several, XLA gathers all that a transform reads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import torch

from isoshard.core.extensions import split_fft
from isoshard.core.layout import custom_partitioning

from .argument_forms import lengths
from .registry import lower
from .unsharded_axes import on_a_mesh, unsharded

_AT_ONCE = 3  # the axes that an FFT of XLA has at most


def _scaled(x: jax.Array, count: int, normalization: int) -> jax.Array:
    """`x` divided by 1, the root of `count`, or `count`."""
    divisor = (1, math.sqrt(count), count)[normalization]
    return x if divisor == 1 else x / divisor


def _looks():
    """Whether a transform reads its operand's sharding; for uneven blocks it always does."""
    return custom_partitioning.possible() and on_a_mesh()


def _transform(x: jax.Array, dims: Sequence[int], forward: bool) -> jax.Array:
    """The unscaled transform of a complex array along `dims`."""
    along = list(dims)
    if along and _looks():
        return split_fft("fft" if forward else "ifft", x, along)
    while along:
        some, along = along[-_AT_ONCE:], along[:-_AT_ONCE]
        x = unsharded(x, some)
        x = jnp.fft.fftn(x, axes=some) if forward else jnp.fft.ifftn(x, axes=some, norm="forward")
        x = unsharded(x, some)
    return x


def _in_order(x: torch.Tensor, sizes: Sequence[int], dims: Sequence[int]) -> torch.Tensor:
    """The result on `meta`: signals are contiguous, and in the memory order of those of `x`."""
    dims = [*sorted(dims[:-1], key=lambda axis: -x.stride(axis)), *dims[-1:]]
    others = [axis for axis in range(x.dim()) if axis not in dims]
    order = [*sorted(others, key=lambda axis: -x.stride(axis)), *dims]
    packed = x.new_empty([sizes[axis] for axis in order])
    return packed.permute([order.index(axis) for axis in range(x.dim())])


def _complex_shape(x: torch.Tensor, dim: Sequence[int], *_: int | bool) -> torch.Tensor:
    dims = sorted(dim, key=lambda axis: -x.stride(axis))
    return _in_order(x, x.shape, dims) if dim else x.clone()


def _half_shape(
    x: torch.Tensor, dim: Sequence[int], _normalization: int, onesided: bool
) -> torch.Tensor:
    sizes = list(x.shape)
    if onesided:
        sizes[dim[-1]] = sizes[dim[-1]] // 2 + 1
    return _in_order(x, sizes, dim).to(x.dtype.to_complex())


def _real_shape(
    x: torch.Tensor, dim: Sequence[int], _normalization: int, last_dim_size: int
) -> torch.Tensor:
    sizes = list(x.shape)
    sizes[dim[-1]] = last_dim_size
    x = _complex_shape(x, dim[:-1]) if len(dim) > 1 else x
    return _in_order(x, sizes, dim[-1:]).to(x.dtype.to_real())


@lower("aten::_fft_c2c", meta=_complex_shape)
def _complex_to_complex(
    x: jax.Array, dim: Sequence[int], normalization: int, forward: bool
) -> jax.Array:
    return _scaled(_transform(x, dim, forward), lengths(x.shape, dim), normalization)


@lower("aten::_fft_r2c", meta=_half_shape)
def _real_to_complex(
    x: jax.Array, dim: Sequence[int], normalization: int, onesided: bool
) -> jax.Array:
    count = lengths(x.shape, dim)
    if onesided and _looks():
        out = split_fft("rfft", x, dim)
    elif onesided:
        half = unsharded(jnp.fft.rfft(unsharded(x, dim[-1:]), axis=dim[-1]), dim[-1:])
        out = _transform(half, dim[:-1], True)
    else:
        out = _transform(x.astype(jnp.result_type(x, jnp.complex64)), dim, True)
    return _scaled(out, count, normalization)


@lower("aten::_fft_c2r", meta=_real_shape)
def _complex_to_real(
    x: jax.Array, dim: Sequence[int], normalization: int, last_dim_size: int
) -> jax.Array:
    if _looks():
        out = split_fft("irfft", x, dim, last_dim_size)
        return _scaled(out, lengths(out.shape, dim), normalization)
    x = unsharded(_transform(x, dim[:-1], False), dim[-1:])
    out = jnp.fft.irfft(x, last_dim_size, axis=dim[-1], norm="forward")
    out = unsharded(out, dim[-1:])
    return _scaled(out, lengths(out.shape, dim), normalization)
