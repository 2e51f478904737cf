"""`torch.autograd.grad`, whose gradients are sharded as their leaves.

`backward()` has a hook for that, which only `.grad` passes. The function is replaced once, when the
device is registered; gradients of other devices pass as they are.

>>> import isoshard as iso
>>> mesh = iso.make_mesh((8,), ("x",))
>>> weight = iso.shard(torch.ones(8, 2), mesh, ("x",)).requires_grad_()
>>> [gradient] = torch.autograd.grad((weight * 2).sum(), weight)
>>> iso.to_jax(gradient).sharding.spec == iso.P("x")
True
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.device_slot import let_scripts_call
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.recorder import recorder
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.layout import marks


def register() -> None:
    """Replace the function."""
    theirs: Any = torch.autograd.grad

    @functools.wraps(theirs)
    def grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with naming.in_users_words():
            gradients = theirs(outputs, inputs, *args, **kwargs)
        if not lazy_tensor.used() or not isinstance(recorder(), Tape):
            return gradients
        if isinstance(gradients, dict):
            return {
                name: _resharded(inputs[name], gradient) for name, gradient in gradients.items()
            }
        leaves = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        if len(leaves) != len(gradients):  # one GradientEdge
            return gradients
        return tuple(map(_resharded, leaves, gradients))

    setattr(torch.autograd, "grad", grad)  # noqa: B010  (typed with overloads)
    let_scripts_call(grad, "aten::grad")


def _resharded(leaf: Any, gradient: Any) -> Any:
    both = isinstance(leaf, lazy_tensor.LazyTensor) and isinstance(gradient, lazy_tensor.LazyTensor)
    if not both or leaf.shape != gradient.shape or not marks.is_leaf(leaf):
        return gradient
    return marks.gradient_sharded_as(leaf, gradient)
