"""Host memory on devices: which slices are shared, which are copied, and why.

>>> from isoshard.core.layout.mesh import make_mesh
>>> from isoshard.core.layout.spec import named_sharding
>>> rows = named_sharding(("x", None), make_mesh((8,), ("x",)), 2)
>>> host = aligned_empty((8, 16), np.float32)
>>> host[:] = 1
>>> a = host_to_jax(host, rows, copy=False)
>>> [p.data.unsafe_buffer_pointer() - host.ctypes.data for p in a.addressable_shards][:3]
[0, 64, 128]

Each process slices for its own devices and asks no other (`host_slices`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from isoshard.core.errors import no_sharing
from isoshard.core.layout.axis_types import constrain
from isoshard.core.layout.partial_sums import refuse, unreduced
from isoshard.core.layout.virtual_devices import Device
from isoshard.core.runtime import metrics
from isoshard.core.runtime._jax_internals.tracers import Tracer
from isoshard.core.runtime.caches import cached

from .device_dtypes import check_narrowing, device_dtype, is_kept, jax_dtype
from .host_slices import HostSlice, cuts_of, start_of

ALIGNMENT = 64  # bytes; XLA's CPU client copies a host buffer that starts elsewhere
_PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")  # smaller on device than on host


def host_to_jax(
    host: np.ndarray, sharding: Sharding | None, *, copy: bool | None = None, name: str = "array"
) -> jax.Array:
    """Lay host memory out over devices.

    Takes time independent of the number of bytes where memory is shared; 64-bit integers are read
    once to see whether they fit.

    Args:
        host: any strides, alignment and numeric dtype; kept alive while the result shares it.
        sharding: the layout; axes split evenly. None leaves the array on JAX's default device,
            not committed to it. Over devices of several processes each process gives the whole,
            and places the slices of its own devices; none looks whether theirs are the same.
        copy: None shares each slice that it can and copies the others, False shares all or
            raises, True shares nothing.
        name: of the array, for messages.

    Returns:
        The array. Copies are finished when this returns. In a JAX transformation that traces it,
        a constant of the program.

    Raises:
        CopyError: memory cannot be shared under copy=False, or a value or dtype has no equal.
        UnrepresentableError: the layout has sums that are still to be taken.
    """
    target = sharding
    sharding = sharding or _default_sharding()
    _refuse_sums(sharding, name)
    cuts = cuts_of(sharding, host.shape)
    if not sharding.is_fully_addressable:  # device_put would compare values in a collective
        return cuts_to_jax(host, sharding, host.shape, cuts, copy=copy, name=name)
    private = not is_kept(host.dtype, jax.config.jax_enable_x64)
    if private:
        dtype = device_dtype(host.dtype, name)
        check_narrowing(host, dtype, copy, name)
        host = _private(host, dtype)
    reasons = _why_copied(host, sharding, cuts)
    if reasons and copy is False:
        raise no_sharing(name, next(iter(reasons.values())))
    if copy and not private and len(reasons) < len(cuts):
        private, host = True, _private(host, host.dtype)
        reasons = _why_copied(host, sharding, cuts)
    array = jax.device_put(host, target)  # its may_alias=False would share all the same
    if isinstance(array, Tracer):
        if copy is False:
            raise no_sharing(name, "a traced program takes its own copy, as a constant")
        return array if target is None else constrain(array, target)
    if reasons:
        piece = math.prod(sharding.shard_shape(host.shape)) * host.itemsize
        _count_copies(len(reasons), piece * len(reasons))
        if not private:
            array.block_until_ready()  # JAX may still be reading memory that the caller can write
    return array


def cuts_to_jax(
    host: np.ndarray,
    sharding: Sharding,
    shape: tuple[int, ...],
    cuts: tuple[HostSlice, ...],
    *,
    copy: bool | None,
    name: str,
) -> jax.Array:
    """Lay out host memory of which this process has what its own devices hold, or more.

    Nothing is asked of other processes, and nothing is compared with theirs.

    Args:
        host: the memory that `cuts` are of.
        sharding: the layout.
        shape: of the whole array.
        cuts: one per device of this process; none if it owns no device of the mesh.
        copy: as for `host_to_jax`.
        name: of the array, for messages.

    Returns:
        The array. Copies are finished when this returns.

    Raises:
        CopyError: as `host_to_jax`.
    """
    dtype = device_dtype(host.dtype, name)
    narrow = dtype != host.dtype
    reasons = check_cuts(host, sharding, cuts, copy=copy, name=name)
    if not cuts:
        return jax.make_array_from_single_device_arrays(shape, sharding, [], dtype=dtype)
    pieces: dict[tuple[int, ...], np.ndarray] = {}
    copied = 0
    for cut in cuts:
        piece = host[cut.index] if cut.index else host
        mine = narrow or (copy and cut.device not in reasons)
        if cut.start not in pieces:
            pieces[cut.start] = _private(piece, dtype) if mine else piece
        if cut.device in reasons:
            copied += piece.size * dtype.itemsize
    array = jax.make_array_from_callback(
        shape, sharding, lambda index: pieces[start_of(index)], dtype=dtype
    )
    if reasons:
        _count_copies(len(reasons), copied)
        array.block_until_ready()  # JAX may still be reading memory that the caller can write
    return array


def take_host(
    host: np.ndarray, sharding: Sharding | None, *, copy: bool | None = None, name: str = "array"
) -> jax.Array:
    """Lay host memory out as `host_to_jax`, after narrowing it as `jnp.asarray` does.

    Args:
        host: as for `host_to_jax`, floats of 64 bits as well.
        sharding: the layout, or None.
        copy: as for `host_to_jax`; narrowing copies.
        name: of the array, for messages.

    Returns:
        The array.

    Raises:
        CopyError: as `host_to_jax`.
    """
    made = narrowed(host, copy, name)
    return host_to_jax(made, sharding, copy=copy if made is host else None, name=name)


def narrowed(host: np.ndarray, copy: bool | None, name: str) -> np.ndarray:
    """Host values in the dtype in which JAX holds them; counted as "narrowed" in `metrics`.

    Args:
        host: the array.
        copy: as for `host_to_jax`.
        name: of the array, for messages.

    Returns:
        The array itself, or one in 32 bits that nobody else writes to.

    Raises:
        CopyError: it has to be narrowed and copy is False, an integer does not fit, or JAX has no
            such dtype.
    """
    if not check_narrowed(host, copy, name):
        return host
    return _private(host, jax_dtype(host.dtype))


def check_narrowed(host: np.ndarray, copy: bool | None, name: str) -> bool:
    """Raise what `narrowed` would raise; whether it would make another array."""
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
    _refuse_sums(sharding, name)
    check_cuts(host, sharding, cuts_of(sharding, host.shape), copy=copy, name=name)


def _refuse_sums(sharding: Sharding, name: str) -> None:
    if _has_sums(sharding):
        fix = "Lay it out by a spec without unreduced=; of that array iso.reshard makes terms."
        refuse(sharding, "data from the host is whole", fix, name=name)


@cached(4096)
def _has_sums(sharding: Sharding) -> bool:
    return bool(unreduced(sharding))


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Make an uninitialised NumPy array that starts where XLA can share it.

    Args:
        shape: of the array.
        dtype: of the array.

    Returns:
        A C-contiguous array that starts on a 64-byte boundary.

    Example:
        >>> aligned_empty((3, 5), np.float32).ctypes.data % ALIGNMENT
        0
    """
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


def check_cuts(
    host: np.ndarray,
    sharding: Sharding,
    cuts: tuple[HostSlice, ...],
    *,
    copy: bool | None,
    name: str,
) -> dict[Device, str]:
    """Raise what `cuts_to_jax` would raise, and do nothing else.

    Args:
        host: the memory that `cuts` are of.
        sharding: the layout.
        cuts: one per device of this process.
        copy: as for `host_to_jax`.
        name: of the array, for messages.

    Returns:
        The devices whose slice JAX will copy, and why.

    Raises:
        CopyError: as `host_to_jax`.
    """
    dtype = device_dtype(host.dtype, name)
    if dtype != host.dtype:
        check_narrowing(host, dtype, copy, name)
        why = _always_copied(host, sharding)
        return {cut.device: why for cut in cuts} if why else {}
    reasons = _why_copied(host, sharding, cuts)
    if reasons and copy is False:
        raise no_sharing(name, next(iter(reasons.values())))
    return reasons


def _why_copied(
    host: np.ndarray, sharding: Sharding, cuts: tuple[HostSlice, ...]
) -> dict[Device, str]:
    """The devices whose slice JAX will copy, and why."""
    if host.size == 0 or not cuts:
        return {}
    why = _always_copied(host, sharding)
    if not why and host.ndim and not host[cuts[0].index].flags.c_contiguous:
        strides = host.strides
        why = f"{_where(host, cuts[0])} is not contiguous (strides {strides} bytes)"
    if why:
        return {cut.device: why for cut in cuts}
    base = host.ctypes.data
    if not base % ALIGNMENT and _all_aligned(cuts, host.strides):
        return {}
    return {
        cut.device: f"{_where(host, cut)} starts {(base + offset) % ALIGNMENT} bytes past a "
        f"{ALIGNMENT}-byte boundary (see isoshard.core.transfer.exchange.aligned_empty)"
        for cut, offset in zip(cuts, _offsets(cuts, host.strides), strict=True)
        if (base + offset) % ALIGNMENT
    }


def _always_copied(host: np.ndarray, sharding: Sharding) -> str:
    platform = _platform(sharding)
    if platform != "cpu":
        return f"the devices are {platform}, and host memory must be moved there"
    if _is_packed(host.dtype):
        return f"{host.dtype} takes a byte each on the host and less on a device"
    return ""


@cached(256)
def _is_packed(dtype: np.dtype) -> bool:
    return dtype.name in _PACKED


@cached(4096)
def _all_aligned(cuts: tuple[HostSlice, ...], strides: tuple[int, ...]) -> bool:
    return not any(offset % ALIGNMENT for offset in _offsets(cuts, strides))


@cached(4096)
def _offsets(cuts: tuple[HostSlice, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """The bytes from a host array's start to that of each cut."""
    starts = [start_of(cut.index) for cut in cuts]
    return tuple(
        sum(at * step for at, step in zip(start, strides, strict=True)) for start in starts
    )


def _where(host: np.ndarray, cut: HostSlice) -> str:
    parts = ", ".join(
        f"{part.start or 0}:{size if part.stop is None else part.stop}"
        for part, size in zip(cut.index, host.shape, strict=True)
    )
    return f"the slice [{parts}] of device {cut.number}"


@cached(4096)
def _platform(sharding: Sharding) -> str:
    return next(iter(sharding.device_set)).platform


def _private(host: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy that nobody else writes to, counted."""
    mine = aligned_empty(host.shape, dtype)
    np.copyto(mine, host, casting="unsafe")
    _count_copies(1, mine.nbytes)
    if dtype != host.dtype:
        metrics.count("narrowed")
        metrics.count("narrowed_bytes", mine.nbytes)
    return mine


def _count_copies(buffers: int, size: int) -> None:
    metrics.count("copies", buffers)
    metrics.count("copied_bytes", size)


def _default_sharding() -> Sharding:
    return jax.device_put(np.float32(0)).sharding
