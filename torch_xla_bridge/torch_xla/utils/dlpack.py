"""DLPack: one buffer shared between a tensor on the device and another library.

>>> import torch
>>> x = from_dlpack(torch.arange(4.0))
>>> x.device, torch.utils.dlpack.from_dlpack(to_dlpack(x))
(device(type='jax', index=0), tensor([0., 1., 2., 3.]))
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import dlpack

from isoshard.core.kit import to_jax, to_torch
from isoshard.torch_bridge.kit import lazy_tensor, tape


def to_dlpack(xla_tensor: torch.Tensor) -> Any:
    """Share the buffer of a tensor; it is computed first if need be.

    Args:
        xla_tensor: on the logical device, and sharded on one chip.

    Returns:
        A DLPack capsule. What is written to it shows in the tensor.

    Raises:
        BufferError: the tensor is on several chips, or requires a gradient.
        RuntimeError: it is on another device.
    """
    if not isinstance(xla_tensor, lazy_tensor.LazyTensor):
        raise RuntimeError(
            f"to_dlpack takes a tensor on the logical device, and this one is on "
            f"{xla_tensor.device}; use torch.utils.dlpack.to_dlpack"
        )
    tape.materialize([lazy_tensor.read(xla_tensor)])
    return xla_tensor.__dlpack__()


def from_dlpack(ext_tensor: Any) -> torch.Tensor:
    """A tensor on the logical device that shares another library's buffer.

    Args:
        ext_tensor: an object with `__dlpack__`, or a capsule. Write to it no more afterwards.

    Raises:
        CopyError: the buffer cannot be shared as it is: it is not aligned to 64 bytes, not
            contiguous, or of a 64-bit dtype while `jax_enable_x64` is off.
    """
    return to_torch(to_jax(dlpack.from_dlpack(ext_tensor), copy=False))
