"""Host memory to devices: which slices share memory, which are copied, and why.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.layout.spec import named_sharding
>>> rows = named_sharding(("x", None), make_mesh((8,), ("x",)), 2)
>>> host = aligned_empty((8, 16), np.float32)
>>> host[:] = 1
>>> a = host_to_jax(host, rows, copy=False)
>>> [p.data.unsafe_buffer_pointer() - host.ctypes.data for p in a.addressable_shards][:3]
[0, 64, 128]

Each process slices for its own devices, without communication (`host_slices`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from isoshard.core.errors import no_sharing
from isoshard.core.layout.axis_types import constrain
from isoshard.core.layout.partial_sums import check_no_sums, unreduced
from isoshard.core.layout.virtual_devices import Device
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import cached

from .device_dtypes import check_narrowing, device_dtype, is_supported, jax_dtype
from .host_slices import HostSlice, host_slices, start_of

ALIGNMENT = 64  # bytes; XLA's CPU client copies a host buffer that starts elsewhere
_PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")  # smaller on device than on host


def host_to_jax(
    host: np.ndarray, sharding: Sharding | None, *, copy: bool | None = None, name: str = "array"
) -> jax.Array:
    """Put host memory on devices.

    Takes time independent of the number of bytes where memory is shared; 64-bit integers are read
    once to check that they fit.

    Args:
        host: any strides, alignment and numeric dtype; kept alive while the result shares it.
        sharding: the sharding, even. None is JAX's default device, uncommitted. Over devices of
            several processes each process passes the global array, and puts the slices of its own
            devices; that the arrays are equal is not checked.
        copy: None shares each slice that it can and copies the others, False shares all or
            raises, True shares nothing.
        name: of the array, for messages.

    Returns:
        The array. Copies are finished when this returns. In a JAX transformation that traces it,
        a constant of the program.

    Raises:
        CopyError: memory cannot be shared under copy=False, or a value or dtype has no equal.
        UnrepresentableError: the sharding has unreduced axes.
    """
    target = sharding
    sharding = sharding or _default_sharding()
    _check_no_sums(sharding, name)
    slices = host_slices(sharding, host.shape)
    if not sharding.is_fully_addressable:  # jax.device_put would compare values in a collective
        return slices_to_jax(host, sharding, host.shape, slices, copy=copy, name=name)
    owned = not is_supported(host.dtype, jax.config.jax_enable_x64)
    if owned:
        dtype = device_dtype(host.dtype, name)
        check_narrowing(host, dtype, copy, name)
        host = _owned_copy(host, dtype)
    reasons = _copy_reasons(host, sharding, slices)
    if reasons and copy is False:
        raise no_sharing(name, next(iter(reasons.values())))
    if copy and not owned and len(reasons) < len(slices):
        owned, host = True, _owned_copy(host, host.dtype)
        reasons = _copy_reasons(host, sharding, slices)
    array = jax.device_put(host, target)  # may_alias=False would share nevertheless (jax 0.10)
    if isinstance(array, Tracer):
        if copy is False:
            raise no_sharing(name, "a traced program takes its own copy, as a constant")
        return array if target is None else constrain(array, target)
    if reasons:
        shard_bytes = math.prod(sharding.shard_shape(host.shape)) * host.itemsize
        _count_copies(len(reasons), shard_bytes * len(reasons))
        if not owned:
            array.block_until_ready()  # JAX may still be reading memory that the caller can write
    return array


def slices_to_jax(
    host: np.ndarray,
    sharding: Sharding,
    shape: tuple[int, ...],
    slices: tuple[HostSlice, ...],
    *,
    copy: bool | None,
    name: str,
) -> jax.Array:
    """Put host memory that contains the shards of this process's devices, without communication.

    Args:
        host: the memory that `slices` index.
        sharding: the sharding of the global array.
        shape: the global shape.
        slices: one per device of this process; none if it owns no device of the mesh.
        copy: as for `host_to_jax`.
        name: of the array, for messages.

    Raises:
        CopyError: as `host_to_jax`.
    """
    dtype = device_dtype(host.dtype, name)
    narrow = dtype != host.dtype
    reasons = check_slices(host, sharding, slices, copy=copy, name=name)
    if not slices:
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    shards: dict[tuple[int, ...], np.ndarray] = {}
    copied = 0
    for slice_ in slices:
        shard = host[slice_.index] if slice_.index else host
        owned = narrow or (copy and slice_.device not in reasons)
        if slice_.start not in shards:
            shards[slice_.start] = _owned_copy(shard, dtype) if owned else shard
        if slice_.device in reasons:
            copied += shard.size * dtype.itemsize
    array = jax.make_array_from_callback(
        shape, sharding, lambda index: shards[start_of(index)], dtype=dtype
    )
    if reasons:
        _count_copies(len(reasons), copied)
        array.block_until_ready()  # JAX may still be reading memory that the caller can write
    return array


def narrowed_to_jax(
    host: np.ndarray, sharding: Sharding | None, *, copy: bool | None = None, name: str = "array"
) -> jax.Array:
    """Put host memory as `host_to_jax`, after narrowing it as `jnp.asarray` does, which copies.

    Raises:
        CopyError: as `host_to_jax`.
    """
    converted = narrowed(host, copy, name)
    return host_to_jax(converted, sharding, copy=copy if converted is host else None, name=name)


def narrowed(host: np.ndarray, copy: bool | None, name: str) -> np.ndarray:
    """Host values in the dtype that JAX stores them in; counted as "narrowed" in `metrics`.

    Args:
        host: the array.
        copy: as for `host_to_jax`.
        name: of the array, for messages.

    Raises:
        CopyError: it has to be narrowed and copy is False, an integer does not fit, or JAX has no
            such dtype.
    """
    if not check_narrowed(host, copy, name):
        return host
    return _owned_copy(host, jax_dtype(host.dtype))


def check_narrowed(host: np.ndarray, copy: bool | None, name: str) -> bool:
    """Raise what `narrowed` would raise; return whether it would copy."""
    dtype = jax_dtype(host.dtype, name)
    if dtype == host.dtype:
        return False
    check_narrowing(host, dtype, copy, name)
    return True


def check_host(host: np.ndarray, sharding: Sharding, *, copy: bool | None, name: str) -> None:
    """Raise what `host_to_jax` would raise, and do nothing else.

    Args:
        host: the array.
        sharding: the layout.
        copy: as for `host_to_jax`.
        name: of the array, for messages.

    Raises:
        CopyError: as `host_to_jax`.
    """
    _check_no_sums(sharding, name)
    check_slices(host, sharding, host_slices(sharding, host.shape), copy=copy, name=name)


def _check_no_sums(sharding: Sharding, name: str) -> None:
    if _has_sums(sharding):
        fix = "Shard it by a spec without unreduced=, then iso.reshard makes terms of it."
        check_no_sums(sharding, "data from the host has no terms", fix, name=name)


@cached(4096)
def _has_sums(sharding: Sharding) -> bool:
    return bool(unreduced(sharding))


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Create an uninitialized NumPy array that is aligned as XLA needs to share it.

    Example:
        >>> aligned_empty((3, 5), np.float32).ctypes.data % ALIGNMENT
        0
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def check_slices(
    host: np.ndarray,
    sharding: Sharding,
    slices: tuple[HostSlice, ...],
    *,
    copy: bool | None,
    name: str,
) -> dict[Device, str]:
    """Raise what `slices_to_jax` would raise, and do nothing else.

    Args:
        host: the memory that `slices` index.
        sharding: the sharding of the global array.
        slices: one per device of this process.
        copy: as for `host_to_jax`.
        name: of the array, for messages.

    Raises:
        CopyError: as `host_to_jax`.
    """
    dtype = device_dtype(host.dtype, name)
    if dtype != host.dtype:
        check_narrowing(host, dtype, copy, name)
        reason = _reason_for_all(host, sharding)
        return {slice_.device: reason for slice_ in slices} if reason else {}
    reasons = _copy_reasons(host, sharding, slices)
    if reasons and copy is False:
        raise no_sharing(name, next(iter(reasons.values())))
    return reasons


def _copy_reasons(
    host: np.ndarray, sharding: Sharding, slices: tuple[HostSlice, ...]
) -> dict[Device, str]:
    """The devices whose slice JAX will copy, with the reason."""
    if host.size == 0 or not slices:
        return {}
    reason = _reason_for_all(host, sharding)
    if not reason and host.ndim and not host[slices[0].index].flags.c_contiguous:
        strides = host.strides
        reason = f"{_slice_text(host, slices[0])} is not contiguous (strides {strides} bytes)"
    if reason:
        return {slice_.device: reason for slice_ in slices}
    base = host.ctypes.data
    if not base % ALIGNMENT and _all_aligned(slices, host.strides):
        return {}
    return {
        slice_.device: f"{_slice_text(host, slice_)} starts {(base + offset) % ALIGNMENT} bytes "
        f"past a {ALIGNMENT}-byte boundary (see isoshard.core.transfer.exchange.aligned_empty)"
        for slice_, offset in zip(slices, _offsets(slices, host.strides), strict=True)
        if (base + offset) % ALIGNMENT
    }


def _reason_for_all(host: np.ndarray, sharding: Sharding) -> str:
    platform = _platform(sharding)
    if platform != "cpu":
        return f"the devices are {platform}, and host memory must be copied there"
    if _is_packed(host.dtype):
        return f"{host.dtype} takes a byte each on the host and less on a device"
    return ""


@cached(256)
def _is_packed(dtype: np.dtype) -> bool:
    return dtype.name in _PACKED


@cached(4096)
def _all_aligned(slices: tuple[HostSlice, ...], strides: tuple[int, ...]) -> bool:
    return not any(offset % ALIGNMENT for offset in _offsets(slices, strides))


@cached(4096)
def _offsets(slices: tuple[HostSlice, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The offset in bytes of each slice in a host array."""
    starts = [start_of(slice_.index) for slice_ in slices]
    return tuple(
        sum(index * stride for index, stride in zip(start, strides, strict=True))
        for start in starts
    )


def _slice_text(host: np.ndarray, slice_: HostSlice) -> str:
    ranges = ", ".join(
        f"{range_.start or 0}:{size if range_.stop is None else range_.stop}"
        for range_, size in zip(slice_.index, host.shape, strict=True)
    )
    return f"the slice [{ranges}] of device {slice_.position}"


@cached(4096)
def _platform(sharding: Sharding) -> str:
    return next(iter(sharding.device_set)).platform


def _owned_copy(host: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy that no caller can write to, counted."""
    buffer = aligned_empty(host.shape, dtype)
    np.copyto(buffer, host, casting="unsafe")
    _count_copies(1, buffer.nbytes)
    if dtype != host.dtype:
        metrics.count("narrowed")
        metrics.count("narrowed_bytes", buffer.nbytes)
    return buffer


def _count_copies(buffers: int, size: int) -> None:
    metrics.count("copies", buffers)
    metrics.count("copied_bytes", size)


def _default_sharding() -> Sharding:
    return jax.device_put(np.float32(0)).sharding
