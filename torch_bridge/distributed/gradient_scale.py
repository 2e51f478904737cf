"""A tensor as it is, whose gradient is scaled: one tensor may stand for those of many devices.

>>> x = torch.ones(2, requires_grad=True)
>>> with_scaled_gradient(x, 4).sum().backward()
>>> x.grad
tensor([4., 4.])
"""

from __future__ import annotations

from typing import Any

import torch


def with_scaled_gradient(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """The tensor, whose gradient is `scale` times that of the result."""
    result: Any = _Scaled.apply(tensor, scale)
    return result


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, scale: float) -> Any:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return gradient[0] * ctx.scale, None
