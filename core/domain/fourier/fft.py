"""Fourier transforms along whole axes of arrays that are split along others: nothing is sent.

>>> import numpy as np
>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.transfer.device_put import shard
>>> rows = shard(np.eye(4, dtype=np.float32), make_mesh((4,), ("x",)), ("x",))
>>> spectra = jax.jit(fft)(rows)                         # also without `jax.jit`
>>> print(spectra[1], spectra.sharding.spec)
[ 1.+0.j  0.-1.j -1.+0.j  0.+1.j] P('x',)

XLA alone gathers whatever is split (`jnp.fft`). Here the operator gets its operand's layout when
the program is compiled, so nothing is to be said inside `jax.jit`, and gradients are made of the
same transforms. Along an axis that is split devices exchange lines, there and back. An axis is
gathered of a single line, of half a spectrum (transform first along an axis that is whole: the last
of `axes` is the one of `rfft`), and in blocks of unequal sizes.

All layouts of a program with such an operator must be on one mesh; JAX says so if they are not.
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

from isoshard.core.domain.blocks.any_framework import any_framework
from isoshard.core.domain.blocks.known_shardings import lies, sharding_of
from isoshard.core.domain.lifting.lifting import lift
from isoshard.core.domain.windows.window_arguments import Faults, is_whole
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime.bounded import PROGRAMS

from .fourier_primitive import transform

_NORMS = ("backward", "ortho", "forward")


@any_framework
def fft(x: Any, axes: int | Sequence[int] = -1, *, norm: str = "backward") -> Any:
    """Transform.

    Args:
        x: a jax.Array, of real or complex numbers, or an UnevenArray of them, laid out anyhow;
            integers and halves are taken as float32 (integers as float64 with 64-bit types).
        axes: one, or several, along all of which is transformed.
        norm: what divides by the number of elements: "forward" this one, "backward" `ifft`,
            "ortho" both, by its root.

    Returns:
        Complex, of the shape, layout and sizes of `x`.

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
        Complex, of the shape, layout and sizes of `x`.

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
        Complex; sizes and layout are those of `x`, but along the last of `axes`.

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
        Real; sizes and layout are those of `x`, but along the last of `axes`.

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
    return lies(_transformed(kind, axes, norm, length, x), _result_layout(kind, axes[-1], x))


def _result_layout(kind: str, last: int, x: Any) -> NamedSharding | None:
    """The operand's layout; half a spectrum, and what it is of, are replicated along their axis."""
    told = sharding_of(x)
    if kind in ("fft", "ifft") or not isinstance(told, NamedSharding):
        return told
    entries = [None if at == last else entry for at, entry in enumerate(entries_of(told.spec))]
    return NamedSharding(told.mesh, P(*entries))


@functools.lru_cache(maxsize=PROGRAMS)
def _lifted(kind: str, axes: tuple[int, ...], norm: str, length: int) -> Any:
    return lift(functools.partial(_transformed, kind, axes, norm, length))


def _transformed(kind: str, axes: tuple[int, ...], norm: str, length: int, x: Any) -> Any:
    found = transform(kind, _wide(x, kind != "rfft"), axes, length)
    shape = x.shape if kind == "rfft" else found.shape
    count = math.prod(shape[axis] for axis in axes)
    if norm == "ortho":
        return found / math.sqrt(count)
    return found / count if (norm == "forward") == (kind in ("fft", "rfft")) else found


def _wide(x: Any, is_complex: bool) -> Any:
    """Numbers that XLA transforms."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(float)
    dtype = jnp.promote_types(x.dtype, jnp.complex64 if is_complex else jnp.float32)
    return x.astype(dtype)


def _checked(
    kind: str, x: Any, axes: Any, norm: str, length: int | None
) -> tuple[tuple[int, ...], int]:
    """The axes from 0, and the length of the last of `irfft`'s result."""
    faults, ndim = Faults(kind), len(x.shape)
    given = (axes,) if is_whole(axes) else tuple(axes)
    right = bool(given) and all(is_whole(axis) and -ndim <= axis < ndim for axis in given)
    faults.unless(right, f"axes {axes!r} are none of the {ndim} axes")
    found = tuple(int(axis) % ndim for axis in given) if right else ()
    faults.unless(len(set(found)) == len(found), f"axes {axes!r} name an axis twice")
    empty = [axis for axis in found if x.shape[axis] == 0]
    faults.unless(not empty, f"axes {empty} have no elements")
    faults.choice("norm", norm, _NORMS)
    is_complex = jnp.issubdtype(x.dtype, jnp.complexfloating)
    faults.unless(kind != "rfft" or not is_complex, f"x is of {x.dtype}, take fft")
    half = x.shape[found[-1]] if found else 1
    possible = (2 * half - 2, 2 * half - 1)
    told = possible[0] or 1 if length is None else length
    if kind == "irfft" and found:
        fits = is_whole(told) and told in possible and told > 0
        fault = f"length {told!r} is not {possible[0]} or {possible[1]}, of {half} elements"
        faults.unless(fits, fault)
    faults.raise_any()
    return found, int(told)
