"""Results of compiled steps that required a gradient, and whose graph was never made.

A step may return a loss with `requires_grad`. A replay has no autograd graph behind it, and without
a trace of it `backward()` outside would pass by the step's parameters in silence:

>>> loss = sealed(torch.ones((), device="jax"))
>>> loss.requires_grad, loss.item()
(True, 1.0)
>>> (2 * loss).backward()
Traceback (most recent call last):
    ...
isoshard.torch_bridge.engine.capture.symbolic.CaptureError: backward() was called outside on a \
result of a compiled step, whose graph lives inside the program. Call backward() in the step, or \
return result.detach().
"""

from __future__ import annotations

from typing import Any

import torch

from .. import base
from .symbolic import CaptureError


class _Sealed(torch.autograd.Function):
    """The end of the road for gradients: the graph behind a replayed result was never made."""

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


def sealed(tensor: base.LazyTensor) -> base.LazyTensor:
    """Let a result require a gradient, as it did when the step was captured."""
    anchor = torch.empty(0, requires_grad=True)
    return _Sealed.apply(anchor, tensor)  # pyright: ignore[reportReturnType]
