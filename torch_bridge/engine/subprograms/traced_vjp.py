"""Torch code recorded together with its VJP.

The code runs once, on placeholder tensors; then torch's own autograd runs backward from its
results. One `SubTrace` records both, and is cut into subprograms: first the function, then its VJP.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.torch_bridge._torch_internals.undocumented import is_autocast_enabled
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording.graph_leaves import leaves_of
from isoshard.torch_bridge.engine.values.value import Aval

from .subtrace import SubTrace

Code = Callable[[list[Any]], Sequence[lazy_tensor.LazyTensor]]


@dataclasses.dataclass(frozen=True)
class CapturedInput:
    """One argument of the recorded code.

    Attributes:
        aval: its size, stride and dtype.
        wanted: whether its gradient is wanted.
        carried: whether it comes from the run of the same code before.
    """

    aval: Aval
    wanted: bool
    carried: bool = False


class TracedVjp:
    """One run of some code, recorded with its VJP.

    Args:
        code: takes one tensor for each of `inputs`, and returns tensors.
        inputs: what stands for its arguments.
        what: what the code is, for messages.
        backward: whether its VJP is recorded as well, where something wants a gradient.
        may_write: whether it may write to inputs whose gradient is not wanted.
        may_collect: whether it may call `backward` itself; its gradients are then among those
            found.

    Attributes:
        subtrace: what was recorded.
        inputs: the slot of each input.
        wanted: whether the gradient of each input is wanted.
        input_avals: the aval of each input.
        results: the slot of each result.
        avals: the aval of each result.
        differentiable: numbers of the results that have a gradient.
        border: the first slot of the backward part.
        given: the slot of the gradient of each differentiable result.
        gradients: for each input, and then for each alias, the slot of its gradient; None where it
            has none.
        written: memory from before that the code writes to, and the slot of what it writes.
        changed: numbers of the inputs that the code writes to, and the slot of what it writes.

    Raises:
        TypeError: a result is no tensor on the `jax` device.
        ValueError: the code writes to an argument, calls `backward`, or uses a tensor in a way that
            hides its gradient.
    """

    def __init__(
        self,
        code: Code,
        inputs: Sequence[CapturedInput],
        what: str,
        *,
        backward: bool = True,
        may_write: bool = False,
        may_collect: bool = False,
    ):
        """Run the code."""
        self.subtrace = subtrace = SubTrace()
        self._what, self._may_write, self._may_collect = what, may_write, may_collect
        tensors = [
            subtrace.input(Aval.contiguous(one.aval.meta.size, one.aval.meta.dtype))
            for one in inputs
        ]
        for one, tensor in zip(inputs, tensors, strict=True):
            tensor.requires_grad_(one.wanted)
        self._tensors = tensors
        subtrace.refuse_gradients_behind(
            [one for one, given in zip(tensors, inputs, strict=True) if given.carried], what
        )
        self.wanted = [one.wanted for one in inputs]
        self.input_avals = [tensor._aval for tensor in tensors]
        wants = any(one.wanted for one in inputs) or (backward and torch.is_grad_enabled())
        try:
            with subtrace:
                self.inputs = subtrace.slots(tensors)
                with torch.set_grad_enabled(wants):
                    results = list(code(tensors))
                self._note(results)
                if backward and self.differentiable:
                    self._differentiate(results)
        finally:
            subtrace.put_back()

    def _note(self, results: list[Any]) -> None:
        for result in results:
            if not isinstance(result, lazy_tensor.LazyTensor):
                kind = f"on {result.device}" if isinstance(result, torch.Tensor) else repr(result)
                raise TypeError(
                    f"{self._what} must return tensors on the {naming.current().type} device, "
                    f"and returned one {kind}"
                )
        results[:] = [self.subtrace.alias(result) for result in results]
        collected = [one for one in self._leaves() if one.grad is not None]
        if collected and not self._may_collect:
            raise ValueError(
                f"{self._what} calls backward(), whose gradient for a tensor of shape "
                f"{tuple(collected[0].shape)} would be lost; return the loss, and call backward() "
                "on what comes out"
            )
        self.results = self.subtrace.slots(results)
        self.avals = [Aval.contiguous(tuple(one.shape), one.dtype) for one in results]
        self.annotations = [None if one._chain.ops else one._storage.annotation for one in results]
        self.differentiable = [n for n, one in enumerate(results) if one.requires_grad]
        self.written = self.subtrace.written()
        written = {id(tensor) for tensor in self.subtrace.written_inputs()}
        self.changed = [
            (number, self.subtrace.slot(tensor._storage.value))
            for number, tensor in enumerate(self._tensors)
            if id(tensor) in written
        ]
        if self.changed and not self._may_write:
            changed = [self._tensors[number] for number, _ in self.changed]
            sizes = ", ".join(f"{tuple(one.shape)} {one.dtype}" for one in changed)
            raise ValueError(
                f"{self._what} writes to its arguments in place ({sizes}), and would not do so "
                "each time it is used; write to a copy (x.clone()) and return that"
            )
        for storage, _ in self.written:
            for original, alias in self.subtrace.aliases:
                if alias._storage is storage:
                    raise ValueError(
                        f"{self._what} writes in place to a tensor of shape "
                        f"{tuple(original.shape)} that requires a gradient and comes from outside; "
                        "return the new value instead"
                    )

    def _leaves(self) -> list[lazy_tensor.LazyTensor]:
        return [*self._tensors, *(alias for _, alias in self.subtrace.aliases)]

    def _differentiate(self, results: Sequence[lazy_tensor.LazyTensor]) -> None:
        leaves = self._leaves()
        self._check_graph(results, leaves)
        grads = [self.subtrace.input(self.avals[number]) for number in self.differentiable]
        self.given = self.subtrace.slots(grads)
        self.border = min(self.given, default=0)
        with _without_autocast():
            torch.autograd.backward([results[number] for number in self.differentiable], grads)
        self.gradients: list[int | None] = []
        for leaf in leaves:
            grad = leaf.grad
            self.gradients.append(
                self.subtrace.slot(lazy_tensor.read(grad))
                if isinstance(grad, lazy_tensor.LazyTensor)
                else None
            )
            leaf.grad = None

    def _check_graph(
        self, results: Sequence[lazy_tensor.LazyTensor], leaves: Sequence[lazy_tensor.LazyTensor]
    ) -> None:
        """Refuse a graph that ends in a tensor from around."""
        mine = {id(leaf) for leaf in leaves}
        for variable in leaves_of([results[number].grad_fn for number in self.differentiable]):
            if id(variable) in mine:
                continue
            made_here = (
                isinstance(variable, lazy_tensor.LazyTensor)
                and id(variable._storage) in self.subtrace.log.created
            )
            if not made_here:
                raise ValueError(
                    f"{self._what} hands a tensor from outside to a torch.autograd.Function: one "
                    f"of shape {tuple(variable.shape)}, which requires a gradient. Make it an "
                    f"argument of {self._what}."
                )


def aval_of(tensor: Any) -> Aval:
    """Shape and dtype of a tensor, whatever its strides."""
    return Aval.contiguous(tuple(tensor.shape), tensor.dtype)


def _without_autocast() -> contextlib.AbstractContextManager[Any]:
    if is_autocast_enabled("jax"):
        return torch.autocast("jax", enabled=False)
    return contextlib.nullcontext()
