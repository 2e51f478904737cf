"""torch_xla in core's registry, where torch is too old for the `jax` device."""

from __future__ import annotations

from typing import Any

import jax
import torch

from isoshard.core.kit import ShardingError, UnevenArray, register
from isoshard.torch_bridge.kit import old_torch

from . import backend_exchange, backend_marks


class TorchXla(old_torch.OldTorch):
    """Core's verbs for tensors of torch_xla; those for other objects of an old torch raise."""

    def sharding_of(self, x: Any) -> Any:
        """See `marking.sharding_of`."""
        return backend_marks.sharding_of(x) if _is_theirs(x) else super().sharding_of(x)

    def to_jax(
        self, x: Any, sharding: Any = None, *, copy: bool | None = None, name: str = "tensor"
    ) -> Any:
        """See `exchange.to_jax`."""
        if _is_theirs(x):
            return backend_exchange.to_jax(x, sharding, copy=copy, name=name)
        return super().to_jax(x, sharding, copy=copy, name=name)

    def from_jax(self, array: jax.Array | UnevenArray, *, copy: bool | None = None) -> Any:
        """See `exchange.from_jax`."""
        if isinstance(array, UnevenArray):
            raise ShardingError(
                f"torch_xla has no tensors in blocks of unequal sizes, and got {array}; "
                "gather it first: iso.full(array)"
            )
        return backend_exchange.from_jax(array, copy=copy)


def register_if_old() -> None:
    """Register, unless the bridge itself serves torch's objects."""
    if not old_torch.has_device():
        register(TorchXla())


def _is_theirs(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "xla"
