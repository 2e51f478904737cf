"""Operations built of XLA's, by torch_xla's name.

>>> import torch, isoshard.torch_bridge
>>> def slice_and_add(a, b, dimno=0):
...     return a.slice_in_dim(0, 1, dimno) + b.slice_in_dim(1, 2, dimno)
>>> operation = register("slice_and_add", slice_and_add)
>>> x = torch.tensor([1.0, 2.0], device="jax")
>>> operation(x, x * 10)
tensor([21.], device='jax:0')

Unlike torch_xla's they have gradients, and of those gradients.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from isoshard.torch_bridge.kit import TorchFunction

from . import xla_builder

__all__ = ["Op", "register"]


class Op:
    """An operation on tensors.

    Args:
        name: of the operation.
        opfn: builds it: of one `xla_builder.Op` for each tensor, and of keyword arguments.
    """

    def __init__(self, name: str, opfn: Callable[..., Any]):
        """See the class."""
        self._name, self._opfn = name, opfn
        self._known: dict[Any, TorchFunction] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Record the operation.

        Args:
            *args: tensors on the device.
            **kwargs: for the function that builds it.

        Returns:
            A tensor, or a tuple of them.
        """
        shapes = xla_builder.tensor_shape(args)
        key = pickle.dumps(([shape.shape for shape in shapes], kwargs))
        cached = self._known.get(key)
        if cached is None:
            build = xla_builder.Op.wrap_function(self._opfn)
            computation = xla_builder.create_computation(self._name, build, shapes, **kwargs)
            cached = self._known[key] = TorchFunction(computation, self._name, wide=True)
        return cached(*args)


def register(name: str, opfn: Callable[..., Any]) -> Op:
    """An operation on tensors, built of XLA's.

    Args:
        name: of the operation.
        opfn: of one `xla_builder.Op` for each tensor, and of the keyword arguments of a call;
            returns one or several.
    """
    return Op(name, opfn)
