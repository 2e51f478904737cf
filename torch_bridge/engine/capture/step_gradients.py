"""Gradients of a captured step: which it clears, drops, and which results have no graph.

A training step that calls `zero_grad()`, `backward()` and `optimizer.step()` leaves gradients
behind that its next call clears unread. The captured program does not return them, which saves the
memory of all parameters; `Zeroing` detects such a step while it is recorded.

Torch would keep them until the step's next call, and add to them if the next backward pass comes
from elsewhere. Then their values are missing, so that raises. In Python they are None, and reading
one is as good as clearing it: `zero_grad`, copies and `.to` find none.

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

A step may return a loss with `requires_grad`. A replay has no autograd graph behind it, and a
`backward()` outside would silently skip the step's parameters, so it raises:

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

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.core.errors import CaptureError
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


def has_gradient(argument: torch.Tensor) -> bool:
    """Whether backward may give an argument a gradient."""
    return argument.requires_grad and argument.is_leaf


FIELD: Any = torch.Tensor.grad
"""How C keeps the gradient of a tensor: a descriptor."""
held = FIELD.__get__
"""The gradient that a tensor has, also one that was left out."""


class Zeroing:
    """Context that notes whose gradients are set to None by `zero_grad()`.

    Args:
        holders: the modules and optimizers whose calls are recorded.
        is_written: whether the step has written to a parameter so far.
    """

    def __init__(self, holders: Sequence[Any], is_written: Callable[[torch.Tensor], bool]):
        """See the class."""
        self._holders = list(holders)
        self._is_listening = False
        self._is_written = is_written
        self._thrown: set[int] = set()
        self._own: list[tuple[dict[str, Any], Any]] = []

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether the step threw a parameter's gradient away before it updated the parameter."""
        return id(parameter) in self._thrown

    def __enter__(self) -> None:
        """Listen to `zero_grad` of every module and optimizer."""
        self._is_listening = True
        self._listen(self._holders)

    def include(self, holders: Sequence[Any]) -> None:
        """Listen to more modules and optimizers."""
        self._holders += holders
        if self._is_listening:
            self._listen(holders)

    def _listen(self, holders: Sequence[Any]) -> None:
        for holder in holders:
            attributes = vars(holder)
            self._own.append((attributes, attributes.get("zero_grad")))
            attributes["zero_grad"] = functools.partial(self._call, holder, holder.zero_grad)

    def __exit__(self, *exc: object) -> None:
        """Listen no more."""
        self._is_listening = False
        for attributes, before in self._own:
            del attributes["zero_grad"]
            if before is not None:
                attributes["zero_grad"] = before
        self._own.clear()

    def _call(self, holder: Any, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = zero_grad(*args, **kwargs)
        if kwargs.get("set_to_none", args[0] if args else True):
            for parameter in _parameters(holder):
                if parameter.grad is None and not self._is_written(parameter):
                    self._thrown.add(id(parameter))
        return result


def _parameters(holder: Any) -> list[torch.Tensor]:
    if isinstance(holder, torch.nn.Module):
        return list(holder.parameters())
    return [parameter for group in holder.param_groups for parameter in group["params"]]


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
