"""Exchange: host memory, JAX arrays and torch tensors, with the copies said aloud.

Every conversion takes `copy`: False shares memory or raises `CopyError`, True gives memory of its
own, None (the default) shares where it can and copies where it must. Copies are counted in
`metrics` ("copies", "copied_bytes").

>>> from isoshard.core.mesh import make_mesh
>>> from isoshard.core.spec import named_sharding
>>> mesh = make_mesh((8,), ("x",))
>>> host = aligned_empty((8, 16), np.float32)
>>> host[:] = 1
>>> a = to_jax(host, named_sharding(("x", None), mesh, 2), copy=False)    # rows: 64 bytes each
>>> a.addressable_shards[3].data.unsafe_buffer_pointer() == host[3:].ctypes.data
True
>>> to_jax(host, named_sharding((None, "x"), mesh, 2), copy=False)
Traceback (most recent call last):
    ...
isoshard.core.errors.CopyError: array: cannot share memory under copy=False: the slice [0:8, 0:2] of device 0 is not contiguous (strides (64, 4) bytes). Pass copy=None or copy=True.

The rule: on CPU devices a device shares the slice it holds if that slice is C-contiguous and
starts on a 64-byte boundary. Whoever shares sees later writes to the host memory in the JAX array,
which the rest of JAX takes for immutable: write no more, or pass copy=True.

No value changes unseen. While `jax_enable_x64` is off, 64-bit integers become 32-bit ones if every
value fits, which is a copy, and 64-bit floats are refused.
"""  # noqa: E501

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, Sharding

from . import metrics
from .devices import Device
from .errors import CopyError
from .frameworks import framework_of, require
from .spec import same_layout

ALIGNMENT = 64  # bytes; XLA's CPU client copies a host buffer that starts elsewhere
_PACKED = ("int2", "uint2", "int4", "uint4", "float4_e2m1fn")  # smaller on device than on host


def to_jax(
    x: Any, sharding: NamedSharding | None = None, *, copy: bool | None = None, name: str = "array"
) -> Any:
    """Give the same values as a `jax.Array`.

    Args:
        x: a NumPy array, a jax.Array, an array or module of a framework with a bridge, or a
            container of those.
        sharding: the layout. By default that of `x`; a host array goes to JAX's default device.
        copy: None may share memory with `x` or copy, False shares or raises, True copies.
        name: of the array, for messages.

    Returns:
        The jax.Array, or the container of them. Under a JAX transformation: a traced value,
        constrained to `sharding`.

    Raises:
        CopyError: memory cannot be shared under copy=False, or a value or dtype has no equal.
        TypeError: `x` is none of the above.

    Example:
        >>> to_jax(np.arange(3, dtype=np.int32)) + 1
        Array([1, 2, 3], dtype=int32)
    """
    if isinstance(x, jax.Array):
        return lay_out(x, sharding, copy=copy, name=name)
    if isinstance(x, np.ndarray):
        return host_to_jax(x, sharding, copy=copy, name=name)
    framework = framework_of(x)
    if framework is not None:
        return framework.to_jax(x, sharding, copy=copy)
    return _map_container(
        lambda path, leaf: to_jax(leaf, sharding, copy=copy, name=path), x, "to_jax"
    )


def to_torch(a: Any, *, copy: bool | None = None) -> Any:
    """Give the same values as torch tensors.

    Args:
        a: a jax.Array on any number of devices, a NumPy array, or a container of those.
        copy: None may share memory or copy, False shares or raises, True copies.

    Returns:
        Tensors with the layout of `a`, on the torch device `jax`, or the container of them. For
        plain CPU tensors of each piece, see `local_shards(a, framework="torch")`.

    Raises:
        ImportError: torch is not installed.
        CopyError: memory cannot be shared under copy=False.
        TypeError: `a` is none of the above.
    """
    torch = require("torch")
    if isinstance(a, np.ndarray):
        a = to_jax(a, copy=copy)
    if isinstance(a, jax.Array):
        return torch.from_jax(a, copy=copy)
    if torch.owns(a):
        return torch.from_jax(torch.to_jax(a, copy=copy)) if copy else a
    return _map_container(lambda path, leaf: to_torch(leaf, copy=copy), a, "to_torch")


def host_to_jax(
    host: np.ndarray, sharding: Sharding | None, *, copy: bool | None = None, name: str = "array"
) -> jax.Array:
    """Lay host memory out over devices.

    Takes time independent of the number of bytes where memory is shared; 64-bit integers are read
    once to see whether they fit.

    Args:
        host: any strides, alignment and numeric dtype; kept alive while the result shares it.
        sharding: the layout; axes split evenly. None leaves the array on JAX's default device,
            not committed to it.
        copy: None shares each slice that it can and copies the others, False shares all or
            raises, True shares nothing.
        name: of the array, for messages.

    Returns:
        The array. Copies are finished when this returns.

    Raises:
        CopyError: memory cannot be shared under copy=False, or a value or dtype has no equal.
    """
    dtype = device_dtype(host.dtype, name)
    private = dtype != host.dtype
    if private:
        check_narrowing(host, dtype, copy, name)
        host = _private(host, dtype)
    target = sharding
    sharding = sharding or _default_sharding()
    reasons = _why_copied(host, sharding)
    if reasons and copy is False:
        raise _refusal(name, next(iter(reasons.values())))
    if copy and not private and len(reasons) < len(sharding.addressable_devices):
        private, host = True, _private(host, dtype)
        reasons = _why_copied(host, sharding)
    array = jax.device_put(host, target)  # its may_alias=False would share all the same
    if reasons:
        piece = math.prod(sharding.shard_shape(host.shape)) * host.itemsize
        _count_copies(len(reasons), piece * len(reasons))
        if not private:
            array.block_until_ready()  # JAX may still be reading memory that the caller can write
    return array


def lay_out(
    x: jax.Array, sharding: Sharding | None, *, copy: bool | None = None, name: str = "array"
) -> jax.Array:
    """Lay a JAX array out over devices.

    Args:
        x: on any devices, or traced.
        sharding: the layout; axes split evenly. None keeps the one of `x`.
        copy: None shares the buffers that are where they belong, False shares all or raises, True
            shares none.
        name: of the array, for messages.

    Returns:
        The array; a traced value is constrained.

    Raises:
        CopyError: data must move, and copy is False.
    """
    if isinstance(x, Tracer):
        return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)
    if sharding is None and not copy:
        return x
    sharding = sharding or x.sharding
    if copy is False and not same_layout(x.sharding, sharding, x.ndim):
        raise _refusal(name, f"its data must move from {x.sharding} to {sharding}")
    if copy:  # first where it is: on the way to another layout JAX shares all the same
        x = jax.device_put(x, x.sharding, may_alias=False)
    return jax.device_put(x, sharding)


def check_shareable(
    x: np.ndarray | jax.Array, sharding: Sharding, *, copy: bool | None, name: str = "array"
) -> None:
    """Raise what `host_to_jax` or `lay_out` would raise, and do nothing else.

    Args:
        x: the array.
        sharding: the layout.
        copy: as for `to_jax`.
        name: of the array, for messages.

    Raises:
        CopyError: as `to_jax`.
    """
    if isinstance(x, np.ndarray):
        dtype = device_dtype(x.dtype, name)
        if dtype != x.dtype:
            check_narrowing(x, dtype, copy, name)
        elif copy is False and (reasons := _why_copied(x, sharding)):
            raise _refusal(name, next(iter(reasons.values())))
    elif copy is False and not isinstance(x, Tracer):
        lay_out(x, sharding, copy=False, name=name)


def device_dtype(dtype: np.dtype, name: str = "array") -> np.dtype:
    """The dtype of the device buffer that holds host values of `dtype`.

    Args:
        dtype: of the host array.
        name: of the array, for messages.

    Returns:
        The same dtype; for 64-bit integers while `jax_enable_x64` is off, the 32-bit one.

    Raises:
        CopyError: JAX has no such dtype, or only a less exact one.

    Example:
        >>> device_dtype(np.dtype("float64"), "weight")
        Traceback (most recent call last):
            ...
        isoshard.core.errors.CopyError: weight: float64 would lose precision, as jax_enable_x64 is off. Convert it with .astype('float32'), or call jax.config.update('jax_enable_x64', True) first.
    """  # noqa: E501
    found, fault = _device_dtype(dtype, jax.dtypes.canonicalize_dtype(np.int64) == np.int64)
    if fault:
        raise CopyError(f"{name}: {fault}")
    return found


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


@functools.lru_cache(maxsize=256)
def _device_dtype(dtype: np.dtype, x64: bool) -> tuple[np.dtype, str]:
    numeric = jax.numpy.issubdtype(dtype, np.number) or dtype == np.bool_
    if not numeric or not dtype.isnative:
        return dtype, (
            f"JAX has no dtype {dtype.str if numeric else dtype}. Convert it with .astype(..) to a "
            "number type in this machine's byte order, or leave it out."
        )
    found = np.dtype(jax.dtypes.canonicalize_dtype(dtype))
    if found != dtype and not np.issubdtype(dtype, np.integer):
        return dtype, (
            f"{dtype} would lose precision, as jax_enable_x64 is off. Convert it with "
            f".astype('{found}'), or call jax.config.update('jax_enable_x64', True) first."
        )
    return found, ""


def _why_copied(host: np.ndarray, sharding: Sharding) -> dict[Device, str]:
    """The devices whose slice JAX will copy, and why."""
    if host.size == 0:
        return {}
    slices = _slices(sharding, host.shape, host.strides)
    why = _always_copied(host, sharding)
    device, index, _ = slices[0]
    if not why and host.ndim and not host[index].flags.c_contiguous:
        why = f"{_where(host, device, index)} is not contiguous (strides {host.strides} bytes)"
    if why:
        return {device: why for device, *_ in slices}
    base = host.__array_interface__["data"][0]
    return {
        device: f"{_where(host, device, index)} starts {(base + offset) % ALIGNMENT} bytes past a "
        f"{ALIGNMENT}-byte boundary (see isoshard.core.exchange.aligned_empty)"
        for device, index, offset in slices
        if (base + offset) % ALIGNMENT
    }


@functools.lru_cache(maxsize=4096)
def _slices(
    sharding: Sharding, shape: tuple[int, ...], strides: tuple[int, ...]
) -> list[tuple[Device, tuple[slice, ...], int]]:
    """Each device's slice of a host array, and the bytes from the array's start to its own."""
    return [
        (device, index or (), _offset(index or (), strides))
        for device, index in sharding.addressable_devices_indices_map(shape).items()
    ]


def _always_copied(host: np.ndarray, sharding: Sharding) -> str:
    platform = _platform(sharding)
    if platform != "cpu":
        return f"the devices are {platform}, and host memory must be moved there"
    if host.dtype.name in _PACKED:
        return f"{host.dtype} takes a byte each on the host and less on a device"
    return ""


def _offset(index: tuple[slice, ...], strides: tuple[int, ...]) -> int:
    starts = (part.start or 0 for part in index)
    return sum(start * stride for start, stride in zip(starts, strides, strict=True))


def _where(host: np.ndarray, device: Device, index: tuple[slice, ...]) -> str:
    parts = ", ".join(
        f"{part.start or 0}:{size if part.stop is None else part.stop}"
        for part, size in zip(index, host.shape, strict=True)
    )
    return f"the slice [{parts}] of device {device.id}"


@functools.lru_cache(maxsize=4096)
def _platform(sharding: Sharding) -> str:
    return next(iter(sharding.device_set)).platform


def _refusal(name: str, why: str) -> CopyError:
    return CopyError(
        f"{name}: cannot share memory under copy=False: {why}. Pass copy=None or copy=True."
    )


def check_narrowing(
    host: np.ndarray, dtype: np.dtype, copy: bool | None, name: str = "array"
) -> None:
    """Raise unless 64-bit integers may be stored as 32-bit ones, value by value.

    Args:
        host: of a 64-bit integer dtype.
        dtype: the 32-bit one.
        copy: as for `to_jax`; storing in fewer bits is a copy.
        name: of the array, for messages.

    Raises:
        CopyError: copy is False, or a value does not fit.
    """
    if copy is False:
        raise _refusal(name, f"{host.dtype} is stored as {dtype} while jax_enable_x64 is off")
    limits = np.iinfo(dtype)
    if host.size == 0:
        return
    low, high = int(host.min()), int(host.max())
    if low < limits.min or high > limits.max:
        raise CopyError(
            f"{name}: {host.dtype} is stored as {dtype} while jax_enable_x64 is off, and the "
            f"values {low}..{high} do not fit {limits.min}..{limits.max}. Call "
            "jax.config.update('jax_enable_x64', True) first."
        )


def _private(host: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A copy that nobody else writes to, counted."""
    mine = aligned_empty(host.shape, dtype)
    np.copyto(mine, host, casting="unsafe")
    _count_copies(1, mine.nbytes)
    return mine


def _count_copies(buffers: int, size: int) -> None:
    metrics.count("copies", buffers)
    metrics.count("copied_bytes", size)


def _default_sharding() -> Sharding:
    return jax.device_put(np.float32(0)).sharding


def _map_container(convert: Any, tree: Any, verb: str) -> Any:
    if jax.tree.all(jax.tree.map(lambda leaf: leaf is tree, tree)) and jax.tree.leaves(tree):
        raise TypeError(
            f"{verb} takes a NumPy array, a jax.Array, a tensor or module of a framework with a "
            f"bridge, or a container of those; given was {type(tree).__name__}"
        )
    return jax.tree.map_with_path(
        lambda path, leaf: convert(jax.tree_util.keystr(path, simple=True, separator="."), leaf),
        tree,
    )
