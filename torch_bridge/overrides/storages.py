"""Torch's storages, which the `jax` device has none of: refused at the call.

Torch would ask the device's allocator in C++, and the process would end.

>>> torch.UntypedStorage(4, device="jax")  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
RuntimeError: the memory of a tensor on the jax device belongs to JAX, and UntypedStorage(..) ...
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.overrides import addresses


def register() -> None:
    """Let `torch.UntypedStorage`, which every way to make a storage ends in, refuse the device."""
    theirs = torch.UntypedStorage.__new__

    @functools.wraps(theirs)
    def new(cls: type[torch.UntypedStorage], *args: Any, **kwargs: Any) -> torch.UntypedStorage:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type in naming.OURS:
            raise RuntimeError(addresses.refusal(f"{cls.__name__}(..)"))
        return theirs(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign]
