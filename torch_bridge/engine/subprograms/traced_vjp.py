"""Torch code recorded together with its VJP.

The code runs once, on placeholder tensors; then torch's own autograd runs backward from its
results. One `SubTrace` records both, and is split into subprograms: the function, then its VJP.
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
from isoshard.torch_bridge.engine.values.value import Aval

from .subtrace import SubTrace, leaves_of

Code = Callable[[list[Any]], Sequence[lazy_tensor.LazyTensor]]


@dataclasses.dataclass(frozen=True)
class CapturedInput:
    """One argument of the recorded code.

    Attributes:
        aval: its size, stride and dtype.
        needs_grad: whether it needs a gradient.
        carried: whether it comes from the run of the same code before.
    """

    aval: Aval
    needs_grad: bool
    carried: bool = False


class TracedVjp:
    """One run of some code, recorded with its VJP.

    Args:
        code: takes one tensor for each of `inputs`, and returns tensors.
        inputs: the slots of its arguments.
        what: what the code is, for messages.
        backward: whether its VJP is recorded as well, where something requires a gradient.
        may_write: whether it may write to inputs that need no gradient.
        may_collect: whether it may call `backward` itself; its gradients are then among those
            found.

    Attributes:
        subtrace: what was recorded.
        inputs: the slot of each input.
        needs_grad: whether each input needs a gradient.
        input_avals: the aval of each input.
        results: the slot of each result.
        avals: the aval of each result.
        differentiable: numbers of the results that have a gradient.
        border: the first slot of the backward part.
        cotangents: the slot of the gradient of each differentiable result.
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
            subtrace.input(Aval.contiguous(input_.aval.meta.size, input_.aval.meta.dtype))
            for input_ in inputs
        ]
        for input_, tensor in zip(inputs, tensors, strict=True):
            tensor.requires_grad_(input_.needs_grad)
        self._tensors = tensors
        subtrace.refuse_gradients_behind(
            [input_ for input_, source in zip(tensors, inputs, strict=True) if source.carried], what
        )
        self.needs_grad = [input_.needs_grad for input_ in inputs]
        self.input_avals = [tensor._aval for tensor in tensors]
        grad_enabled = any(self.needs_grad) or (backward and torch.is_grad_enabled())
        try:
            with subtrace:
                self.inputs = subtrace.slots(tensors)
                with torch.set_grad_enabled(grad_enabled):
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
        collected = [leaf for leaf in self._leaves() if leaf.grad is not None]
        if collected and not self._may_collect:
            raise ValueError(
                f"{self._what} calls backward(), whose gradient for a tensor of shape "
                f"{tuple(collected[0].shape)} would be lost; return the loss, and call backward() "
                "on what comes out"
            )
        self.results = self.subtrace.slots(results)
        self.avals = [Aval.contiguous(tuple(result.shape), result.dtype) for result in results]
        self.annotations = [
            None if result._chain.ops else result._storage.annotation for result in results
        ]
        self.differentiable = [n for n, result in enumerate(results) if result.requires_grad]
        self.written = self.subtrace.written()
        written = {id(tensor) for tensor in self.subtrace.written_inputs()}
        self.changed = [
            (index, self.subtrace.slot(tensor._storage.value))
            for index, tensor in enumerate(self._tensors)
            if id(tensor) in written
        ]
        if self.changed and not self._may_write:
            changed = [self._tensors[index] for index, _ in self.changed]
            sizes = ", ".join(f"{tuple(tensor.shape)} {tensor.dtype}" for tensor in changed)
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
        grads = [self.subtrace.input(self.avals[index]) for index in self.differentiable]
        self.cotangents = self.subtrace.slots(grads)
        self.border = min(self.cotangents, default=0)
        with _without_autocast():
            torch.autograd.backward([results[index] for index in self.differentiable], grads)
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
        own_leaves = {id(leaf) for leaf in leaves}
        for variable in leaves_of([results[index].grad_fn for index in self.differentiable]):
            if id(variable) in own_leaves:
                continue
            is_own = (
                isinstance(variable, lazy_tensor.LazyTensor)
                and id(variable._storage) in self.subtrace.log.created
            )
            if not is_own:
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
