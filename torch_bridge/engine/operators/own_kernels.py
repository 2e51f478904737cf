"""Operators with a kernel of their own: a user's `torch.library` operators, and some of torch's.

Where an operator has neither a JAX lowering nor a decomposition, but a kernel written in terms of
other operators, that kernel is run on the `jax` tensors, and what it calls is recorded.

>>> @torch.library.custom_op("doc::cubed", mutates_args=())
... def cubed(x: torch.Tensor) -> torch.Tensor:
...     return x * x * x
>>> cubed(torch.tensor([2.0, 3.0], device="jax"))
tensor([ 8., 27.], device='jax:0')

A kernel made for this device alone is given with `cubed.register_kernel("jax")`, and a JAX function
instead of a kernel with `isoshard.torch_bridge.register_lowering`. A kernel that a script of
torch_xla registers for the key `XLA` serves too. One that goes through NumPy or the CPU waits for
its inputs; its results return to the device, and the call is counted as one of `fallbacks`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from isoshard.core.runtime import metrics
from isoshard.torch_bridge._torch_internals import OpOverload, pytree
from isoshard.torch_bridge._torch_internals.dispatcher import (
    DispatchKey,
    DispatchKeySet,
    has_kernel,
)
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.lowerings import registry

from . import decompose

_KEYS = {"XLA": "XLA", "PrivateUse1": "PrivateUse1", "CompositeExplicitAutograd": "Lazy"}
"""The kinds of kernels that an operator may have of its own, and the key that calls each."""


def find(op: OpOverload) -> Callable[..., Any] | None:
    """A handler that runs the operator's own kernel; None if it has none, or something better."""
    if registry.find(op) is not None or decompose.find(op) is not None:
        return None
    with_kernel = {name: key for name, key in _KEYS.items() if has_kernel(op.name(), name)}
    if op.namespace == "aten":
        with_kernel.pop("XLA", None)  # what makes tensors there (`xla_alias`) is no operator's own
    if not with_kernel:
        return None
    keys = DispatchKeySet(getattr(DispatchKey, next(iter(with_kernel.values()))))

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _returned(op, op.redispatch(keys, *args, **kwargs))

    return handler


def _returned(op: OpOverload, outputs: Any) -> Any:
    """Results that a kernel left on the CPU, brought back to the device and counted."""
    leaves, structure = pytree.tree_flatten(outputs)
    if not any(_elsewhere(leaf) for leaf in leaves):
        return outputs
    metrics.count("fallbacks")
    metrics.count(f"fallbacks.{op.name()}")
    moved = [leaf.to("jax") if _elsewhere(leaf) else leaf for leaf in leaves]
    return pytree.tree_unflatten(moved, structure)


def _elsewhere(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, lazy_tensor.LazyTensor)
