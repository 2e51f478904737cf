"""Activation checkpointing: keep less for backward, and compute it again.

>>> import torch
>>> x = torch.ones(3, device="jax", requires_grad=True)
>>> checkpoint(lambda x: x.sin().exp(), x).sum().backward()
>>> x.grad.shape
torch.Size([3])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge.kit import recompute


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Call a function without keeping what its backward needs.

    Args:
        function: of tensors and anything else; called again in backward.
        *args: for the function.
        use_reentrant: not used. The one way there is gives what both of torch's give, works with
            `torch.autograd.grad` too, and needs no input that requires a gradient.
        preserve_rng_state: not used; random numbers are always the same in both calls.
        **kwargs: for the function.

    Returns:
        What the function returns.
    """
    owner = function if isinstance(function, torch.nn.Module) else None
    owner = owner or getattr(function, "__self__", None)
    owner = owner if isinstance(owner, torch.nn.Module) else None
    return recompute.checkpoint(function, *args, owner=owner, **kwargs)
