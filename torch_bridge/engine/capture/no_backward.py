"""Results of compiled steps that required a gradient, and whose graph was never made.

A step may return a loss with `requires_grad`. A replay has no autograd graph behind it, and without
this one `backward()` outside would silently skip the step's parameters:

>>> loss = sealed(torch.ones((), device="jax"))
>>> loss.requires_grad, loss.item()
(True, 1.0)
>>> (2 * loss).backward()
Traceback (most recent call last):
    ...
isoshard.core.errors.CaptureError: backward() was called outside on a result of a compiled step, \
whose graph lives inside the program. Call backward() in the step, or return result.detach().
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.core.errors import CaptureError
from isoshard.torch_bridge.engine.recording import lazy_tensor


class _Sealed(torch.autograd.Function):
    """An autograd node that refuses: the graph behind a replayed result was never made."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, with a graph that refuses."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refuse.

        Raises:
            CaptureError: always.
        """
        raise CaptureError(
            "backward() was called outside on a result of a compiled step, whose graph lives "
            "inside the program. Call backward() in the step, or return result.detach()."
        )


def sealed(tensor: lazy_tensor.LazyTensor) -> lazy_tensor.LazyTensor:
    """Let a result require a gradient, as it did when the step was captured."""
    anchor = torch.empty(0, requires_grad=True)
    return _Sealed.apply(anchor, tensor)
