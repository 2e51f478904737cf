"""Fourier transforms along unsplit axes of arrays that are split along others: nothing is sent.

>>> import numpy as np
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows = shard(np.eye(4, dtype=np.float32), make_mesh((4,), ("x",)), ("x",))
>>> spectra = jax.jit(fft)(rows)                         # also without `jax.jit`
>>> print(spectra[1], spectra.sharding.spec)
[ 1.+0.j  0.-1.j -1.+0.j  0.+1.j] P('x',)

XLA alone gathers whatever is split (`jnp.fft`). Here the operator gets its operand's sharding when
the program is compiled, so `jax.jit` needs no annotation, and gradients are made of the
same transforms. Along an axis that is split devices exchange lines, there and back. An axis is
gathered of a single line, of half a spectrum (transform first along an axis that is not split: the
last of `axes` is the one of `rfft`), and in blocks of unequal sizes.

All shardings of a program with such an operator must be on one mesh; else JAX raises.
Inside `jax.shard_map` the functions are those of `jnp.fft`, of a shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    PROGRAMS,
    UnevenArray,
    any_framework,
    cached,
    entries_of,
    lift,
    record_sharding,
    sharding_of,
)
from isoshard.domain.windows.window_arguments import ArgumentErrors, is_integer

from .fourier_primitive import transform

_NORMS = ("backward", "ortho", "forward")


@any_framework
def fft(x: Any, axes: int | Sequence[int] = -1, *, norm: str = "backward") -> Any:
    """Transform.

    Args:
        x: a jax.Array, of real or complex numbers, or an UnevenArray of them, with any sharding;
            integers and halves are taken as float32 (integers as float64 with 64-bit types).
        axes: one, or several, along all of which is transformed.
        norm: what divides by the number of elements: "forward" this one, "backward" `ifft`,
            "ortho" both, by its root.

    Returns:
        Complex, of the shape, sharding and sizes of `x`.

    Raises:
        ShardingError: an argument does not fit.

    Example:
        >>> print(fft(jnp.ones((2, 2)), (0, 1)))
        [[4.+0.j 0.+0.j]
         [0.+0.j 0.+0.j]]
    """
    return _run("fft", x, axes, norm)


@any_framework
def ifft(x: Any, axes: int | Sequence[int] = -1, *, norm: str = "backward") -> Any:
    """Transform back.

    Args:
        x: as for `fft`.
        axes: as for `fft`.
        norm: as for `fft`.

    Returns:
        Complex, of the shape, sharding and sizes of `x`.

    Raises:
        ShardingError: an argument does not fit.

    Example:
        >>> print(ifft(fft(jnp.arange(3.0))).real)
        [0. 1. 2.]
    """
    return _run("ifft", x, axes, norm)


@any_framework
def rfft(x: Any, axes: int | Sequence[int] = -1, *, norm: str = "backward") -> Any:
    """Transform real numbers, and leave away what follows from the rest.

    Args:
        x: as for `fft`, real.
        axes: as for `fft`; along the last of them the spectrum is of `n // 2 + 1` elements.
        norm: as for `fft`.

    Returns:
        Complex; sizes and sharding are those of `x`, but along the last of `axes`.

    Raises:
        ShardingError: an argument does not fit.

    Example:
        >>> print(rfft(jnp.arange(4.0)))
        [ 6.+0.j -2.+2.j -2.+0.j]
    """
    return _run("rfft", x, axes, norm)


@any_framework
def irfft(
    x: Any,
    axes: int | Sequence[int] = -1,
    *,
    length: int | None = None,
    norm: str = "backward",
) -> Any:
    """Transform a spectrum of real numbers back.

    Args:
        x: as for `fft`, of m elements along the last of `axes`.
        axes: as for `fft`.
        length: of the result along the last of `axes`, `2 * m - 2` or `2 * m - 1`; by default the
            first.
        norm: as for `fft`.

    Returns:
        Real; sizes and sharding are those of `x`, but along the last of `axes`.

    Raises:
        ShardingError: an argument does not fit.

    Example:
        >>> print(irfft(rfft(jnp.arange(3.0)), length=3))
        [0. 1. 2.]
    """
    return _run("irfft", x, axes, norm, length)


def _run(kind: str, x: Any, axes: Any, norm: str, length: int | None = None) -> Any:
    x = x if isinstance(x, UnevenArray | jax.Array) else jnp.asarray(x)
    axes, length = _checked(kind, x, axes, norm, length)
    if isinstance(x, UnevenArray):
        return _lifted(kind, axes, norm, length)(x)
    return record_sharding(
        _transformed(kind, axes, norm, length, x), _result_sharding(kind, axes[-1], x)
    )


def _result_sharding(kind: str, last: int, x: Any) -> NamedSharding | None:
    """The operand's sharding; half a spectrum and its real counterpart are unsplit along theirs."""
    sharding = sharding_of(x)
    if kind in ("fft", "ifft") or not isinstance(sharding, NamedSharding):
        return sharding
    entries = [None if at == last else entry for at, entry in enumerate(entries_of(sharding.spec))]
    return NamedSharding(sharding.mesh, P(*entries))


@cached(PROGRAMS)
def _lifted(kind: str, axes: tuple[int, ...], norm: str, length: int) -> Any:
    return lift(functools.partial(_transformed, kind, axes, norm, length))


def _transformed(kind: str, axes: tuple[int, ...], norm: str, length: int, x: Any) -> Any:
    result = transform(kind, _wide(x, kind != "rfft"), axes, length)
    shape = x.shape if kind == "rfft" else result.shape
    count = math.prod(shape[axis] for axis in axes)
    if norm == "ortho":
        return result / math.sqrt(count)
    return result / count if (norm == "forward") == (kind in ("fft", "rfft")) else result


def _wide(x: Any, is_complex: bool) -> Any:
    """An operand of a dtype that XLA transforms."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(float)
    dtype = jnp.promote_types(x.dtype, jnp.complex64 if is_complex else jnp.float32)
    return x.astype(dtype)


def _checked(
    kind: str, x: Any, axes: Any, norm: str, length: int | None
) -> tuple[tuple[int, ...], int]:
    """The axes from 0, and the length of the last of `irfft`'s result."""
    errors, ndim = ArgumentErrors(kind), len(x.shape)
    requested = (axes,) if is_integer(axes) else tuple(axes)
    valid = bool(requested) and all(is_integer(axis) and -ndim <= axis < ndim for axis in requested)
    errors.require(valid, f"axes {axes!r} are none of the {ndim} axes")
    normalized = tuple(int(axis) % ndim for axis in requested) if valid else ()
    errors.require(len(set(normalized)) == len(normalized), f"axes {axes!r} name an axis twice")
    empty = [axis for axis in normalized if x.shape[axis] == 0]
    errors.require(not empty, f"axes {empty} have no elements")
    errors.choice("norm", norm, _NORMS)
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    errors.require(kind != "rfft" or not is_complex, f"x is of {x.dtype}, take fft")
    half = x.shape[normalized[-1]] if normalized else 1
    possible = (2 * half - 2, 2 * half - 1)
    result_length = possible[0] or 1 if length is None else length
    if kind == "irfft" and normalized:
        possible_length = (
            is_integer(result_length) and result_length in possible and result_length > 0
        )
        message = (
            f"length {result_length!r} is not {possible[0]} or {possible[1]}, of {half} elements"
        )
        errors.require(possible_length, message)
    errors.raise_any()
    return normalized, int(result_length)
