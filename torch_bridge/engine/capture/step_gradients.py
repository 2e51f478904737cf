"""Gradients of a captured step: which it clears, drops, and which results have no graph.

A training step that calls `zero_grad()`, `backward()` and `optimizer.step()` leaves gradients
behind that its next call clears unread. The captured program does not return them, which saves the
memory of all parameters; `ClearedGradients` detects such a step while it is recorded.

Torch would keep them until the step's next call, and add to them if the next backward pass comes
from elsewhere. Then their values are missing, so that raises. In Python they are None, and reading
one is as good as clearing it: `zero_grad`, copies and `.to` find none.

>>> weight = torch.ones(2, device="jax", requires_grad=True)
>>> weight.grad = dropped_gradient(weight)
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

>>> loss = raise_in_backward(torch.ones((), device="jax"))
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


def _raise_dropped(storage: Any, *_: Any) -> Any:
    raise RuntimeError(
        f"backward() would add to the gradient of a tensor of shape "
        f"{tuple(storage.aval.meta.size)}, which a compiled step left out: that step clears its "
        "gradients before it computes them. Clear them here as well, with zero_grad(), before "
        "backward(); or let the compiled step begin without zero_grad() and call it outside, and "
        "the step keeps its gradients"
    )


class DroppedGradient(Storage):
    """The storage of a gradient that the program does not return."""

    __slots__ = ()
    value: Any = property(_raise_dropped, _raise_dropped)

    def __init__(self, aval: Aval):
        """With the size and dtype of the parameter."""
        self.id, self.annotation, self.aval = -1, None, aval


def dropped_gradient(owner: torch.Tensor) -> lazy_tensor.LazyTensor:
    """The placeholder for the gradient of a tensor."""
    aval = Aval.contiguous(tuple(owner.shape), owner.dtype)
    return lazy_tensor.new_tensor(aval, DroppedGradient(aval), Chain.root(aval))


def is_dropped(gradient: Any) -> bool:
    """Whether a gradient is such a placeholder."""
    return gradient is not None and isinstance(namespace(gradient).get("_storage"), DroppedGradient)


def has_gradient(argument: torch.Tensor) -> bool:
    """Whether backward may give an argument a gradient."""
    return argument.requires_grad and argument.is_leaf


GRAD: Any = torch.Tensor.grad
"""The descriptor of `Tensor.grad` in C."""
raw_gradient = GRAD.__get__
"""The gradient of a tensor, which may be a dropped one."""


class ClearedGradients:
    """Context that records whose gradients `zero_grad()` sets to None.

    Args:
        objects: the modules and optimizers whose calls are recorded.
        is_written: whether the step has written to a parameter so far.
    """

    def __init__(self, objects: Sequence[Any], is_written: Callable[[torch.Tensor], bool]):
        """See the class."""
        self._listened = list(objects)
        self._is_listening = False
        self._is_written = is_written
        self._cleared: set[int] = set()
        self._overridden: list[tuple[dict[str, Any], Any]] = []

    def __contains__(self, parameter: torch.Tensor) -> bool:
        """Whether the step cleared a parameter's gradient before it updated the parameter."""
        return id(parameter) in self._cleared

    def __enter__(self) -> None:
        """Override `zero_grad` of every module and optimizer."""
        self._is_listening = True
        self._listen(self._listened)

    def include(self, objects: Sequence[Any]) -> None:
        """Add modules and optimizers."""
        self._listened += objects
        if self._is_listening:
            self._listen(objects)

    def _listen(self, objects: Sequence[Any]) -> None:
        for obj in objects:
            attributes = vars(obj)
            self._overridden.append((attributes, attributes.get("zero_grad")))
            attributes["zero_grad"] = functools.partial(self._call, obj, obj.zero_grad)

    def __exit__(self, *exc: object) -> None:
        """Remove the overrides."""
        self._is_listening = False
        for attributes, before in self._overridden:
            del attributes["zero_grad"]
            if before is not None:
                attributes["zero_grad"] = before
        self._overridden.clear()

    def _call(self, obj: Any, zero_grad: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = zero_grad(*args, **kwargs)
        if kwargs.get("set_to_none", args[0] if args else True):
            for parameter in _parameters(obj):
                if parameter.grad is None and not self._is_written(parameter):
                    self._cleared.add(id(parameter))
        return result


def _parameters(obj: Any) -> list[torch.Tensor]:
    if isinstance(obj, torch.nn.Module):
        return list(obj.parameters())
    return [parameter for group in obj.param_groups for parameter in group["params"]]


class _RaiseInBackward(torch.autograd.Function):
    """An autograd node without a backward: a replayed result has no graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, with this node as its graph."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Raise `CaptureError`."""
        raise CaptureError(
            "backward() was called outside on a result of a compiled step, whose graph lives "
            "inside the program. Call backward() in the step, or return result.detach()."
        )


def raise_in_backward(tensor: lazy_tensor.LazyTensor) -> lazy_tensor.LazyTensor:
    """A result that requires a gradient, as when captured, and raises in `backward()`."""
    anchor = torch.empty(0, requires_grad=True)
    return _RaiseInBackward.apply(anchor, tensor)
