"""Functions that are recorded once, by torch_xla's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isoshard.torch_bridge.kit import Pure, PureModule, TorchFunction, assume_pure, torch_function

__all__ = ["PureModule", "assume_pure", "assume_pure_torch", "j2t_autograd"]


def assume_pure_torch(func: Callable[..., Any], use_cache: bool = False) -> Pure:
    """As `assume_pure`; torch_xla's has no gradients, and an option to cache.

    Args:
        func: its results depend on its arguments alone.
        use_cache: does nothing: what was recorded is used again for arguments of the same shapes.
    """
    return Pure(func)


def j2t_autograd(fn: Callable[..., Any]) -> TorchFunction:
    """Make a JAX function callable on tensors, with gradients by `jax.vjp`.

    Args:
        fn: pure, and traceable by `jax.jit`.
    """
    return torch_function(fn)
