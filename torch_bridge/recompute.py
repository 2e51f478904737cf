"""Activation checkpointing that survives XLA: activations are dropped, and computed again.

In one program, `torch.utils.checkpoint` alone saves no memory: the recomputation is the same
operations on the same inputs, and XLA computes common subexpressions once. Here all that the
recomputation reads, arguments, parameters and buffers, waits behind an optimization barrier for the
gradient that it serves. So a parameter that is split over devices is gathered a second time, and
not stored replicated from forward to backward. XLA's compiler for CPUs drops barriers, so that only
loops over layers save memory (`scan_layers(.., checkpoint=True)`, `xs.compile(step,
repeat="auto")`); so it is with `jax.checkpoint`.

>>> import isoshard.torch_bridge as xs
>>> layer = checkpoint_module(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh()).to("jax"))
>>> layer(torch.ones(1, 2, device="jax")).sum().backward()
>>> layer[0].weight.grad.shape
torch.Size([2, 2])
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge._torch_internals.module_fields import own_buffers, own_parameters
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.spmd import optimization_barrier_


def checkpoint_module(module: torch.nn.Module) -> torch.nn.Module:
    """Let a module save only its inputs for backward, and compute the rest again there.

    Random numbers (dropout) are the same in both passes. Parameters that are split over devices are
    gathered for each pass. Without gradients the module runs as before.

    Args:
        module: its `forward` is replaced, once. It takes tensors anywhere in its arguments and
            keywords; none of them needs to require a gradient. In the second pass it has its
            parameters and buffers as plain tensors that wait for the gradient; those that the first
            pass writes to (running statistics) stay themselves, and are written twice, as by torch.

    Returns:
        `module` itself.

    Raises:
        TypeError: it is no module.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"checkpoint_module takes a module, and got a {type(module).__name__}")
    if getattr(module.forward, "__func__", None) is _forward:
        return module
    changed: Any = module
    changed._xla_checkpointed_forward_original = module.forward
    changed.forward = types.MethodType(_forward, module)
    return module


def checkpoint(
    function: Callable[..., Any], *args: Any, owner: torch.nn.Module | None = None, **kwargs: Any
) -> Any:
    """Call a function so that backward computes its intermediate results again.

    Args:
        function: draws the same random numbers in both calls.
        *args: for the function.
        owner: a module whose parameters and buffers the function reads.
        **kwargs: for the function.

    Returns:
        What the function returns.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    gradients: list[torch.Tensor] = []
    module_tensors = _ModuleTensors(owner)
    calls = 0

    def run(_: Any, *leaves: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            result = function(*args, **kwargs)
            module_tensors.called()
            return result
        late = _after(gradients, (*leaves, *module_tensors.tensors))
        gradients.clear()
        args, kwargs = pytree.tree_unflatten(late[: len(leaves)], structure)
        with module_tensors.replaced(late[len(leaves) :]):
            return function(*args, **kwargs)

    result = torch_checkpoint(run, module_tensors.first, *leaves, use_reentrant=False)
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, lazy_tensor.LazyTensor) and leaf.requires_grad:
            leaf.register_hook(gradients.append)
    return result


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    original = self._xla_checkpointed_forward_original
    if not torch.is_grad_enabled():
        return original(*args, **kwargs)
    return checkpoint(original, *args, owner=self, **kwargs)


class _ModuleTensors:
    """Parameters and buffers that a checkpointed function reads of a module in its first call.

    Args:
        owner: the module, or None.

    Attributes:
        first: a parameter, from which torch infers the device; None if there is none.
        tensors: those on the device, each once.
    """

    def __init__(self, owner: torch.nn.Module | None):
        modules = [] if owner is None else owner.modules()
        self._entries = [
            (table, name, tensor)
            for module in modules
            for table in (own_parameters(module), own_buffers(module))
            for name, tensor in table.items()
            if isinstance(tensor, lazy_tensor.LazyTensor)
        ]
        self._values = [weakref.ref(tensor._storage.value) for _, _, tensor in self._entries]
        self.first = None if owner is None else next(owner.parameters(), None)
        self.tensors: list[Any] = []

    def called(self) -> None:
        """Leave out what the first call has written to: the second one writes to it as well."""
        self._entries = [
            entry
            for entry, value in zip(self._entries, self._values, strict=True)
            if entry[2]._storage.value is value()
        ]
        self._values = []
        self.tensors = list({id(tensor): tensor for _, _, tensor in self._entries}.values())

    @contextlib.contextmanager
    def replaced(self, others: Sequence[Any]) -> Iterator[None]:
        """Context in which the module has others instead of `tensors`, whatever it has now."""
        of = {id(tensor): other for tensor, other in zip(self.tensors, others, strict=True)}
        before = [
            (table, name, table[name], of[id(tensor)])
            for table, name, tensor in self._entries
            if name in table
        ]
        for table, name, _, other in before:
            table[name] = other
        try:
            yield
        finally:
            for table, name, tensor, other in before:
                if table.get(name) is other:
                    table[name] = tensor


def _after(gradients: list[torch.Tensor], leaves: tuple[Any, ...]) -> tuple[Any, ...]:
    """`leaves`, their tensors such that they are computed after `gradients`.

    Indices and masks are as they were: a barrier would keep an array of a mask that is computed by
    tiles. What is computed of these alone is shared with the forward pass.
    """
    positions = [
        n
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, lazy_tensor.LazyTensor)
        and (leaf.is_floating_point() or leaf.is_complex())
    ]
    if not positions:
        return leaves
    late = _After.apply(len(gradients), *gradients, *(leaves[n] for n in positions))
    result = list(leaves)
    for position, tensor in zip(positions, late, strict=True):
        result[position] = tensor
    return tuple(result)


class _After(torch.autograd.Function):
    """Tensors behind a barrier, with the identity as their gradient."""

    @staticmethod
    def forward(ctx: Any, first: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Copies of the tensors from index `first` on."""
        copies = [tensor.clone() for tensor in tensors]
        optimization_barrier_(copies)
        late = zip(copies, ctx.needs_input_grad[1:], strict=True)
        ctx.mark_non_differentiable(*(copy for copy, needed in late if not needed))
        ctx.first = first
        ctx.set_materialize_grads(False)
        return tuple(copies[first:])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        """Pass the gradients on."""
        return (None,) * (1 + ctx.first) + gradients
