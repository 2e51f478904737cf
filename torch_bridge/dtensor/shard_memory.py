"""Memory: a rank's local tensor as the shard of its device, and the reverse.

Everything here is about one process. Memory is shared through DLPack if possible; otherwise core's
rules for host memory apply, which count copies or raise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import torch
from jax.sharding import SingleDeviceSharding

from isoshard.core.errors import CopyError
from isoshard.core.runtime import metrics
from isoshard.core.transfer.exchange import ALIGNMENT, device_dtype, host_to_jax
from isoshard.torch_bridge._torch_internals.dtensor_fields import UNFINISHED
from isoshard.torch_bridge.common.argument_types import DeviceLike, DeviceTensor
from isoshard.torch_bridge.common.dtypes import logical_dtype, numpy_dtype
from isoshard.torch_bridge.common.exchange import shard_to_torch, to_numpy

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex128)  # depend on jax_enable_x64


def local_of(x: DTensor, name: str = "DTensor") -> torch.Tensor:
    """A DTensor's local tensor as a plain one over the same memory, finished and without grad.

    Raises:
        TypeError: the local tensor wraps something else, or is on no device of JAX.
    """
    with torch.no_grad():
        return plain(x.to_local(), name)


def plain(local: DeviceTensor, name: str) -> torch.Tensor:
    """A local tensor as a plain one over the same memory, finished and without grad.

    Args:
        local: what `DTensor.to_local` gave.
        name: of the tensor, for messages.

    Raises:
        TypeError: it wraps something else, or is on no device of JAX.
    """
    if type(local) is not torch.Tensor:
        if isinstance(local, UNFINISHED.resolve(())):
            local = local.wait()
        if type(local) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"{name}: its local tensors are {type(local).__name__}, and JAX can share the "
                "memory of plain tensors only; convert it first"
            )
    if local.device.type not in ("cpu", "cuda"):
        hint = "; materialise it first: module.to_empty(device=..)" if local.is_meta else ""
        raise TypeError(
            f"{name}: its local tensors are on {local.device}, and JAX can share those on cpu and "
            f"cuda{hint}"
        )
    return local.detach()


def shard_of(local: torch.Tensor, device: DeviceLike, copy: bool | None, name: str) -> jax.Array:
    """A local tensor as an array on this process's device.

    Args:
        local: of the shape of a block, on the CPU or the GPU that is `device`.
        device: JAX's.
        copy: None shares memory or copies, False shares or raises, True copies.
        name: of the tensor, for messages.

    Raises:
        CopyError: memory cannot be shared under copy=False, or JAX has no such dtype or value.
    """
    lazy = local.is_conj() or local.is_neg()
    on_cpu = local.device.type == "cpu"
    if not (copy or lazy or local.dtype in _WIDE) and local.is_contiguous():
        if not on_cpu or local.data_ptr() % ALIGNMENT == 0:
            return jax.dlpack.from_dlpack(local)
    if lazy:
        why = "its values are conjugated or negated when they are read"
        local = _counted(local.resolve_conj().resolve_neg(), copy, name, why)
        copy = None
    if on_cpu:
        return host_to_jax(to_numpy(local), SingleDeviceSharding(device), copy=copy, name=name)
    return _from_gpu(local, copy, name)


def padded(
    local: torch.Tensor, block: tuple[int, ...], copy: bool | None, name: str
) -> tuple[torch.Tensor, bool | None]:
    """A short local tensor padded to its block.

    The storage itself, if the tensor is its start and the block all of it; otherwise a copy.

    Args:
        local: shorter than the block.
        block: the shape of the shard on each device.
        copy: as for `shard_of`.
        name: of the tensor, for messages.

    Returns:
        A tensor of the block's shape, and what `copy` is from here on.

    Raises:
        CopyError: it must be copied, and copy is False.

    Example:
        >>> storage = torch.arange(4.)
        >>> padded(storage[:3], (4,), False, "x")[0].data_ptr() == storage.data_ptr()
        True
    """
    size = math.prod(block) * local.itemsize
    starts = local.is_contiguous() and local.storage_offset() == 0
    if starts and local.shape[1:] == block[1:] and local.untyped_storage().nbytes() == size:
        return local.as_strided(block, strides_of(block)), copy
    storage = aligned_zeros(block, local)
    storage[tuple(map(slice, local.shape))] = local
    why = f"the local tensor of shape {tuple(local.shape)} must be padded to {block}"
    return _counted(storage, copy, name, why), None


def local_tensor(
    array: jax.Array, shape: tuple[int, ...] | None = None, *, copy: bool | None = None
) -> torch.Tensor:
    """This process's shard of an array as a plain tensor.

    Args:
        array: with at most one device in this process.
        shape: without padding, if the shard is padded.
        copy: True copies; None and False share the buffer.

    Returns:
        The tensor; empty if this process has no shard.

    Example:
        >>> local_tensor(jax.numpy.arange(4), (3,))
        tensor([0, 1, 2], dtype=torch.int32)
    """
    if not array.sharding.addressable_devices:
        return torch.empty(0, dtype=logical_dtype(array.dtype))
    local = shard_to_torch(array.addressable_data(0), copy=copy)
    return local if shape is None else local[tuple(map(slice, shape))]


def aligned_zeros(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Zeros aligned so that XLA can share them.

    Args:
        shape: of the tensor.
        like: gives dtype and device.

    Example:
        >>> aligned_zeros((3, 5), torch.ones(1)).data_ptr() % 64
        0
    """
    size = math.prod(shape) * like.itemsize
    raw = torch.zeros(size + ALIGNMENT, dtype=torch.uint8, device=like.device)
    start = -raw.data_ptr() % ALIGNMENT
    return raw[start : start + size].view(like.dtype).view(tuple(shape))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a C-contiguous tensor, in elements.

    Example:
        >>> strides_of((2, 3, 4))
        (12, 4, 1)
    """
    return tuple(
        math.prod(max(size, 1) for size in shape[axis + 1 :]) for axis in range(len(shape))
    )


def _from_gpu(local: torch.Tensor, copy: bool | None, name: str) -> jax.Array:
    wide = numpy_dtype(local.dtype)
    dtype = device_dtype(wide, name)
    if dtype != wide:
        narrow = torch.int32 if local.dtype is torch.int64 else torch.uint32
        limits = torch.iinfo(narrow)
        narrowed = _counted(local.to(narrow), copy, name, f"{wide} is stored as {dtype}")
        if not bool((narrowed.to(local.dtype) == local).all()):
            raise CopyError(
                f"{name}: {wide} is stored as {dtype} while jax_enable_x64 is off, and some values "
                f"do not fit {limits.min}..{limits.max}. Call "
                "jax.config.update('jax_enable_x64', True) first."
            )
        local = narrowed
    elif not local.is_contiguous():
        why = f"its local tensor is not contiguous (strides {tuple(local.stride())})"
        local = _counted(local.contiguous(), copy, name, why)
    elif copy:
        local = _counted(local.clone(), copy, name, "")
    return jax.dlpack.from_dlpack(local)


def _counted(copied: torch.Tensor, copy: bool | None, name: str, why: str) -> torch.Tensor:
    if copy is False:
        raise CopyError(
            f"{name}: cannot share memory under copy=False: {why}. Pass copy=None or copy=True."
        )
    metrics.count("copies")
    metrics.count("copied_bytes", copied.numel() * copied.itemsize)
    return copied
