"""A torch before 2.10, which cannot have the `jax` device, as torch_xla 2.9 needs one.

There `isoshard.torch_bridge` registers nothing; `isoshard.torch_bridge.torch_xla_backend` works,
and everything else of the bridge raises ImportError at its first use.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from isoshard.core.frameworks import Framework, register
from isoshard.core.runtime.private_names import release

OLDEST = (2, 10)
"""The first torch that lets a backend written in Python register a device."""


def has_device() -> bool:
    """Whether this torch can have the `jax` device."""
    return release(torch.__version__) >= OLDEST


def refuse(what: str) -> NoReturn:
    """Raise for what needs a newer torch.

    Raises:
        ImportError: always.

    >>> refuse("isoshard.torch_bridge.compile")    # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    ImportError: isoshard.torch_bridge.compile needs the torch device `jax`, and so torch >= 2.10; \
this is torch .... Install a newer torch, or, for tensors of torch_xla 2.9, use \
isoshard.torch_bridge.torch_xla_backend.
    """
    raise ImportError(
        f"{what} needs the torch device `jax`, and so torch >= {'.'.join(map(str, OLDEST))}; this "
        f"is torch {torch.__version__}. Install a newer torch, or, for tensors of torch_xla 2.9, "
        "use isoshard.torch_bridge.torch_xla_backend."
    )


class OldTorch(Framework):
    """Core's verbs for objects of an old torch: each raises ImportError."""

    name = "torch"

    def owns(self, obj: Any) -> bool:
        """Tensors and modules."""
        return isinstance(obj, torch.Tensor | torch.nn.Module)

    def check_shard(self, x: Any, mesh: Any, spec: Any, **options: Any) -> None:
        """Raise, as `shard` would."""
        self._lacks("shard", x)

    def from_jax(self, array: Any, *, copy: bool | None = None) -> Any:
        """Raise ImportError."""
        refuse("isoshard.to_torch")

    def shard_from_jax(self, array: Any, *, copy: bool | None = None) -> Any:
        """Raise ImportError."""
        refuse("isoshard.local_shards(.., framework='torch')")

    def _lacks(self, verb: str, obj: Any) -> NoReturn:
        refuse(f"isoshard.{verb} of a {type(obj).__name__}")


def register_refusals() -> None:
    """Register `OldTorch` in place of the bridge."""
    register(OldTorch())
