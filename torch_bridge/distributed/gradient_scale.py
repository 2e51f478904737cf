"""A tensor as it is, whose gradient is scaled: one tensor may stand for those of many devices.

>>> x = torch.ones(2, requires_grad=True)
>>> ScaledGradient.apply(x, 4).sum().backward()
>>> x.grad
tensor([4., 4.])
"""

from __future__ import annotations

from typing import Any

import torch


class ScaledGradient(torch.autograd.Function):
    """`apply(tensor, scale)`: the tensor, whose gradient is `scale` times that of the result."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, scale: float) -> Any:
        """The tensor.

        Args:
            ctx: of torch.
            tensor: any.
            scale: a number.
        """
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        """The scaled gradient.

        Args:
            ctx: of torch.
            *gradient: of the result.
        """
        return gradient[0] * ctx.scale, None
