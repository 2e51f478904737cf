"""What a captured program depends on in the arguments of its step.

Two calls use one program if their arguments have the same shapes, dtypes and layouts, view their
memory in the same way, share memory with each other in the same way, and if everything that is no
tensor is equal.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from isoshard.core.errors import CaptureError
from isoshard.core.runtime.exact_keys import exact
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.engine.recording import lazy_tensor

from .dropped_gradients import held
from .scope import is_open_kind
from .tensor_guard import gradient_state


def signature(leaves: list[Any], arguments: list[lazy_tensor.LazyTensor]) -> tuple[Any, ...]:
    """Describe the arguments of a call.

    Args:
        leaves: every argument, flattened.
        arguments: those that are tensors on the `jax` device.

    Returns:
        A hashable description.

    Raises:
        CaptureError: an argument is a CPU tensor, or neither a tensor nor hashable.
    """
    storages = [id(argument._storage) for argument in arguments]
    return (
        tuple([_described(leaf) for leaf in leaves]),
        tuple([storages.index(storage) for storage in storages]),
    )


def has_gradient(argument: torch.Tensor) -> bool:
    """Whether backward may give an argument a gradient."""
    return argument.requires_grad and argument.is_leaf


def _described(leaf: Any) -> Any:
    if isinstance(leaf, lazy_tensor.LazyTensor):
        known = (leaf._aval, leaf._chain, leaf._storage.value.layout, leaf.requires_grad)
        return (*known, gradient_state(held(leaf))) if has_gradient(leaf) else known
    if isinstance(leaf, torch.Tensor):
        raise CaptureError(
            f"a compiled step got a CPU tensor of shape {tuple(leaf.shape)} as an argument; move "
            f"it with {naming.moving()} or isoshard.shard(tensor, mesh, spec) before the call"
        )
    try:
        hash(leaf)
    except TypeError:
        raise CaptureError(
            f"a compiled step got an argument of type {type(leaf).__name__}, which is neither a "
            "tensor nor hashable; pass tensors, numbers, strings, or nestings of them (a dataclass "
            "becomes one with torch.utils._pytree.register_dataclass)"
        ) from None
    return _valued(leaf)


def _valued(leaf: Any) -> Any:
    """A description that two leaves share if code cannot tell them apart.

    A program's own objects are compared by identity: what equal ones hold may differ.
    """
    kind = type(leaf)
    if dataclasses.is_dataclass(leaf) and getattr(kind, "__dataclass_params__").frozen:  # noqa: B009
        return (kind, *(_valued(getattr(leaf, one.name)) for one in dataclasses.fields(leaf)))
    return (kind, id(leaf)) if is_open_kind(kind) else exact(leaf)
