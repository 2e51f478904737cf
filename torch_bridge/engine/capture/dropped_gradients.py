"""Gradients that a captured step leaves out, since it clears them before it computes them.

Torch would keep them until the step's next call, and add to them if the next backward pass comes
from elsewhere and nobody has cleared them. Then their values are missed, so that is an error. To
Python's eyes they are None, and looking at one is as good as clearing it: `zero_grad`, copies and
`.to` find nothing there.

>>> weight = torch.ones(2, device="jax", requires_grad=True)
>>> weight.grad = stand_in(weight)
>>> weight.sum().backward()
Traceback (most recent call last):
    ...
RuntimeError: backward() would add to the gradient of a tensor of shape (2,), which a compiled step\
 left out: that step clears its gradients before it computes them. Clear them here as well, with\
 zero_grad(), before backward(); or let the compiled step begin without zero_grad() and call it\
 outside, and the step keeps its gradients
>>> weight.grad is None
True
>>> weight.sum().backward()
>>> weight.grad
tensor([1., 1.], device='jax:0')
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.tensor_changes import namespace
from isoshard.torch_bridge.engine.values.value import Aval, Storage
from isoshard.torch_bridge.engine.values.views import Chain


def _refuse(storage: Any, *_: Any) -> Any:
    raise RuntimeError(
        f"backward() would add to the gradient of a tensor of shape "
        f"{tuple(storage.aval.meta.size)}, which a compiled step left out: that step clears its "
        "gradients before it computes them. Clear them here as well, with zero_grad(), before "
        "backward(); or let the compiled step begin without zero_grad() and call it outside, and "
        "the step keeps its gradients"
    )


class DroppedGradient(Storage):
    """The memory that a gradient would have had."""

    __slots__ = ()
    value: Any = property(_refuse, _refuse)

    def __init__(self, aval: Aval):
        """Of this size and dtype."""
        self.number, self.annotation, self.aval = -1, None, aval


def stand_in(owner: torch.Tensor) -> lazy_tensor.LazyTensor:
    """What stands for the gradient of a tensor that was left out."""
    aval = Aval.contiguous(tuple(owner.shape), owner.dtype)
    return lazy_tensor.new_tensor(aval, DroppedGradient(aval), Chain.root(aval))


def is_dropped(gradient: Any) -> bool:
    """Whether a gradient was left out."""
    return gradient is not None and isinstance(namespace(gradient).get("_storage"), DroppedGradient)


FIELD: Any = torch.Tensor.grad
"""How C keeps the gradient of a tensor: a descriptor."""
held = FIELD.__get__
"""The gradient that a tensor has, also one that was left out."""
