"""Checksums of an array's values, which processes compare in place of the values.

Equal arrays have equal checksums, whatever their memory, strides or sharding; arrays with other
values, or in another order, have others except with probability 2**-64.

>>> a = np.arange(6, dtype=np.float32).reshape(2, 3)
>>> value_sum(a) == value_sum(jax.numpy.asarray(a)) == value_sum(np.asfortranarray(a))
True
>>> value_sum(a) == value_sum(a[::-1])
False

An array in host memory, or on one CPU device, is read in place, in chunks of 1 MiB. On other
devices, or where it is sharded, a program on them computes the checksum, and 8 bytes are copied to
the host. An element is as many words of 32 bits as it needs; the word `i` has weight
`_mix(i // _ROW) + _mix(i % _ROW, ..)`, modulo 2**32, so that the host needs only the sums of rows
and of columns, which NumPy computes at memory speed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_ROW = 4096
_CHUNK = 64 * _ROW  # words: 1 MiB, which fits a core's cache
_COLUMN_SEED = 0x9E3779B9  # 2**32 / golden ratio: columns get other weights than rows
_SMALL = ("int2", "uint2", "int4", "uint4")  # of less than a byte on devices


def value_sum(x: np.ndarray | jax.Array) -> str:
    """The checksum of a fully addressable array of any shape, strides and dtype.

    Example:
        >>> value_sum(np.zeros(0)), value_sum(np.ones(1, np.int8))[:8]
        ('0000000000000000', '00000001')
    """
    if isinstance(x, jax.Array):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        if x.is_fully_replicated:
            x = x.addressable_data(0)
        if len(x.devices()) > 1 or next(iter(x.devices())).platform != "cpu":
            plain, weighted = np.asarray(_sums_on_devices(x))
            return f"{plain:08x}{weighted:08x}"
        x = np.asarray(x)
    return _sum_on_host(x)


def _sum_on_host(host: np.ndarray) -> str:
    columns = np.zeros(_ROW, np.uint32)
    plain = weighted = np.uint32(0)
    first = 0
    for words in _rows_of_words(host):
        rows = np.add.reduce(words, 1, dtype=np.uint32)
        columns += np.add.reduce(words, 0, dtype=np.uint32)
        row_indices = np.arange(first, first + len(rows), dtype=np.uint64).astype(np.uint32)
        plain = np.add.reduce(rows, initial=plain, dtype=np.uint32)
        weighted = np.add.reduce(rows * _mix(row_indices), initial=weighted, dtype=np.uint32)
        first += len(rows)
    weighted_columns = columns * _mix(np.arange(_ROW, dtype=np.uint32) ^ np.uint32(_COLUMN_SEED))
    weighted = np.add.reduce(weighted_columns, initial=weighted, dtype=np.uint32)
    return f"{int(plain):08x}{int(weighted):08x}"


def _rows_of_words(host: np.ndarray) -> Iterator[np.ndarray]:
    """The words of an array in its logical order, by rows, padded with zeros."""
    left = np.zeros(0, np.uint32)
    for chunk in _chunks(host):
        words = _words(chunk)
        if len(left):
            words = np.concatenate([left, words])
        complete = len(words) // _ROW * _ROW
        if complete:
            yield words[:complete].reshape(-1, _ROW)
        left = words[complete:]
    if len(left):
        last = np.zeros((1, _ROW), left.dtype)
        last[0, : len(left)] = left
        yield last


def _chunks(host: np.ndarray) -> Iterator[np.ndarray]:
    """Consecutive elements, flat; copied chunk by chunk where they are not contiguous."""
    if host.flags.c_contiguous:
        flat = host.reshape(-1)
        for start in range(0, flat.size, _CHUNK):
            yield flat[start : start + _CHUNK]
    elif host[0].size > _CHUNK:
        for row in host:
            yield from _chunks(row)
    else:
        step = max(1, _CHUNK // max(1, host[0].size))
        for start in range(0, len(host), step):
            yield np.ascontiguousarray(host[start : start + step]).reshape(-1)


def _words(flat: np.ndarray) -> np.ndarray:
    if flat.dtype.name in _SMALL:
        flat = flat.astype(np.int8)
    return flat.view(f"u{min(4, flat.dtype.itemsize)}")


@functools.partial(jax.jit, inline=False)
def _sums_on_devices(x: jax.Array) -> jax.Array:
    words = _device_words(x)
    index, inner = jnp.zeros(words.shape, jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        iota = jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
        index, inner = index + iota * jnp.uint32(inner % 2**32), inner * words.shape[axis]
    weights = _mix(index // _ROW) + _mix((index % _ROW) ^ jnp.uint32(_COLUMN_SEED))
    plain = jnp.sum(words, dtype=jnp.uint32)
    return jnp.stack([plain, jnp.sum(words * weights, dtype=jnp.uint32)])


def _device_words(x: jax.Array) -> jax.Array:
    """The words of an array; those of one element are a trailing axis."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], -1)
    if x.dtype == bool or x.dtype.name in _SMALL:
        x = x.astype(jnp.int8)
    width = min(4, x.dtype.itemsize)
    words = jax.lax.bitcast_convert_type(x, f"uint{8 * width}").astype(jnp.uint32)
    return words.reshape(math.prod(words.shape)) if words.ndim == 0 else words


def _mix(bits: Any) -> Any:
    """Mix the bits of 32-bit integers (fmix32, the finalizer of MurmurHash3)."""
    bits = (bits ^ (bits >> 16)) * bits.dtype.type(0x85EBCA6B)
    bits = (bits ^ (bits >> 13)) * bits.dtype.type(0xC2B2AE35)
    return bits ^ (bits >> 16)
