"""CPU tensors and host arrays share memory.

NumPy has no bfloat16 and no float8 of its own, and torch does not support ml_dtypes, so those types
cross as integers of the same width. Nothing here copies.
"""

from __future__ import annotations

import jax
import numpy as np
import torch

from isoshard.core.errors import CopyError
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.runtime import metrics

from .dtypes import BYTES, logical_dtype, numpy_dtype

_BITS = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16)}
_NATIVE = frozenset("?bBhHiIlLqQefdFD")


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor's memory as an array of the same dtype, without a copy.

    Returns:
        An array with the same shape and strides.

    >>> t = torch.ones(3, dtype=torch.bfloat16)
    >>> to_numpy(t).dtype
    dtype(bfloat16)
    """
    dtype = numpy_dtype(tensor.dtype)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.dtype in BYTES:
        return tensor.view(torch.uint8).numpy()
    if dtype.char in _NATIVE:
        return tensor.numpy()
    bits, _ = _BITS[dtype.itemsize]
    return tensor.view(bits).numpy().view(dtype)


def from_numpy(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A host array's memory as a CPU tensor; converted only if its logical dtype is wider.

    Args:
        array: a writable array in the physical dtype of `dtype`.
        dtype: the logical torch dtype of the result.

    >>> from_numpy(np.arange(2, dtype=np.int32), torch.int64)
    tensor([0, 1])
    """
    if array.dtype.char in _NATIVE:
        tensor = torch.from_numpy(array)
        return tensor.view(dtype) if dtype in BYTES else tensor.to(dtype)
    _, numpy_bits = _BITS[array.dtype.itemsize]
    raw = np.ascontiguousarray(array).reshape(array.shape).view(numpy_bits)
    return (
        torch.from_numpy(raw).view(dtype)
        if array.ndim
        else torch.from_numpy(raw.reshape(1)).view(dtype)[0]
    )


def shard_to_torch(array: jax.Array, *, copy: bool | None = None) -> torch.Tensor:
    """One device's buffer as a plain CPU or CUDA tensor.

    Args:
        array: on one device.
        copy: True copies; False and None share the memory (DLPack never needs to copy here).

    Returns:
        A tensor of the physical dtype. Writing to it changes an array that JAX takes for immutable.

    >>> shard_to_torch(jax.numpy.arange(3, dtype="bfloat16"))
    tensor([0., 1., 2.], dtype=torch.bfloat16)
    """
    if array.dtype.itemsize > 1 or not array.dtype.name.startswith("float8"):
        tensor = torch.from_dlpack(array)
    elif _is_on_cpu(array):
        # DLPack has no float8 here, but the host can see the buffer as bytes.
        shared = torch.from_dlpack(np.asarray(array).view(np.uint8))
        tensor = shared.view(logical_dtype(array.dtype))
    elif copy is False:
        raise CopyError(
            f"a {array.dtype.name} buffer on {array.device} cannot be shared with torch: DLPack "
            "has no such dtype. Pass copy=None or copy=True."
        )
    else:
        bits = jax.lax.bitcast_convert_type(array, "uint8")
        metrics.count("copies")
        metrics.count("copied_bytes", array.nbytes)
        return torch.from_dlpack(bits).view(logical_dtype(array.dtype))
    return tensor.clone() if copy else tensor


def share_with_cpu(array: jax.Array | UnevenArray) -> torch.Tensor:
    """An array on one CPU device as a plain CPU tensor over the same memory.

    Raises:
        CopyError: the array is on several devices, on another one, or in blocks of unequal sizes.
    """
    if not isinstance(array, jax.Array) or len(array.devices()) > 1 or not _is_on_cpu(array):
        raise CopyError(
            f"an array of shape {tuple(array.shape)} that is not on one CPU device cannot share "
            "memory with one CPU tensor; pass copy=None for a copy, or take "
            'isoshard.local_shards(array, framework="torch"), which shares each shard\'s memory'
        )
    return shard_to_torch(array, copy=False)


def _is_on_cpu(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())
