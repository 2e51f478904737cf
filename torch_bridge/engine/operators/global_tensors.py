"""CPU tensors that were read from a mesh, which scripts of torch_xla read `global_tensor` of.

In torch_xla the copy of an `XLAShardedTensor` on the CPU is one as well, around an ordinary tensor.
Here it is the ordinary tensor, and `global_tensor` is that tensor outside autograd. Other CPU
tensors have no such attribute.

>>> host = torch.ones(2)
>>> note(host)
>>> is_noted(host), is_noted(torch.ones(2))
(True, False)
"""

from __future__ import annotations

import torch

from isoshard.core.runtime.private_names import or_absent
from isoshard.torch_bridge._torch_internals.undocumented import WeakTensorKeyDictionary

_NOTED = or_absent(WeakTensorKeyDictionary)


def note(host: torch.Tensor) -> None:
    """Say that a CPU tensor was read from a mesh."""
    _NOTED[host] = True


def is_noted(tensor: torch.Tensor) -> bool:
    """Whether a tensor was read from a mesh."""
    return tensor in _NOTED


def install() -> None:
    """Give CPU tensors that were read from a mesh the attribute `global_tensor`."""
    torch.Tensor.global_tensor = property(_global_tensor)


def _global_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if not is_noted(tensor):
        raise AttributeError(f"'{type(tensor).__name__}' object has no attribute 'global_tensor'")
    return tensor.detach()
