"""`t_`, `transpose_`, `unsqueeze_` and their like on a view, as autograd has to see them.

Autograd remembers how a view came from its base, and goes that way again after a write. On a device
whose tensors are not described by strides alone, it does not see an in-place transpose, and
gradients would be silently wrong. So the tensor becomes a new view, and stays the same object (its
content is swapped, as by `torch.utils.swap_tensors`):

>>> import torch, isoshard.torch_bridge
>>> x = torch.arange(8.0).reshape(2, 2, 2).to("jax").requires_grad_()
>>> f = (x * 1)[1]
>>> f.t_() is f
True
>>> g = f.mul_(torch.tensor([1.0, 10.0], device="jax"))       # columns of f, rows of x[1]
>>> f.sum().backward()
>>> x.grad[1].tolist()
[[1.0, 1.0], [10.0, 10.0]]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.tensor_fields import is_view, swap_contents

_VIEWS = ("t", "transpose", "swapaxes", "swapdims", "unsqueeze", "squeeze", "as_strided")


def register(cls: type[torch.Tensor]) -> None:
    """Give a class of tensors methods that turn its views."""
    for view in _VIEWS:
        name = f"{view}_"
        setattr(cls, name, _method(getattr(torch.Tensor, name), getattr(torch.Tensor, view)))


def _method(in_place: Callable[..., Any], view: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(in_place)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not is_view(self):
            return in_place(self, *args, **kwargs)
        turned = view(self, *args, **kwargs)
        # A graph that references the earlier tensor goes on with it, which is `turned` from now on.
        fields, view_fields = self.__dict__, turned.__dict__
        self.__dict__, turned.__dict__ = view_fields, fields
        swap_contents(self, turned)
        return self

    return method
