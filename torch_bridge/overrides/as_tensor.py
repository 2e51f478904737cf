"""`torch.as_tensor` and `torch.asarray` of a tensor on the `jax` device, which share its memory.

torch compares the requested device with the one that the tensor's C++ side has, finds another, and
would copy. Both functions are replaced once, when the device is registered, by ones that take such
a tensor as it is; anything else goes to torch's own.

>>> x = torch.zeros(3, device="jax")
>>> torch.as_tensor(x, device=x.device) is x, torch.asarray(x, device="jax") is x
(True, True)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.device_slot import (
    device_functions,
    let_scripts_call,
)
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor


def register() -> None:
    """Replace the functions, unless `with torch.device(..)` would not recognize them any more."""
    if device_functions is None:
        return
    device_functions()  # torch remembers which functions take a default device: its own
    torch.as_tensor = _sharing(torch.as_tensor)
    torch.asarray = _sharing(torch.asarray)
    let_scripts_call(torch.as_tensor, "aten::as_tensor")
    let_scripts_call(torch.asarray, "aten::asarray")


def _sharing(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def share(data: Any, *args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        naming.check_index(device)
        if not isinstance(data, lazy_tensor.LazyTensor) or (
            device is not None and torch.device(device).type not in naming.OURS
        ):
            return theirs(data, *args, **kwargs)
        return theirs(data, *args, **{**kwargs, "device": _THERE})

    return share


_THERE = torch.device("lazy", 0)
"""Where torch's C++ side finds the tensors."""
