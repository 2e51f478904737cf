"""Recognition of values on a mesh of processes: DTensors, and modules that torch has sharded.

Nothing here imports torch's class: if it is not imported, there are none.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from isoshard.core.errors import ShardingError
from isoshard.torch_bridge.common.argument_types import Leaf

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(x: Leaf) -> TypeGuard[DTensor]:
    """Whether `x` is torch's DTensor.

    Example:
        >>> is_dtensor(torch.ones(3))
        False
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, getattr(module, "DTensor", ()))


def has_dtensors(module: torch.nn.Module) -> bool:
    """Whether a module is sharded over processes, by FSDP2 or with DTensors of its own.

    Returns:
        Whether one of its tensors is a DTensor, or would be after a step.

    Example:
        >>> has_dtensors(torch.nn.Linear(2, 2))
        False
    """
    if "torch.distributed.tensor" not in sys.modules:
        return False
    return any(True for _ in fsdp_modules(module)) or any(
        is_dtensor(tensor) for kind in (module.parameters, module.buffers) for tensor in kind()
    )


def fsdp_modules(module: torch.nn.Module) -> Iterator[Any]:
    """The modules below, and this one, to which `fully_shard` was applied."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    return (child for child in module.modules() if isinstance(child, kind))


def check_shardable(x: Leaf) -> None:
    """Raise ShardingError for a value on a mesh of processes, TypeError for an optimizer.

    Args:
        x: a tensor, module or optimizer.
    """
    if is_dtensor(x):
        raise ShardingError(
            "a DTensor is sharded over a mesh of processes already; change its sharding with "
            "iso.reshard(x, spec), or pass its shards to JAX with iso.to_jax(x)"
        )
    if isinstance(x, torch.nn.Module) and has_dtensors(x):
        raise ShardingError(
            f"{type(x).__name__} is sharded over processes already, by torch; pass its tensors to "
            "JAX with iso.to_jax(module), or shard a module that is not sharded"
        )
    if isinstance(x, torch.optim.Optimizer):
        raise TypeError(
            f"{type(x).__name__} is no array; shard the module before the optimizer is created, "
            "and its state follows; a Plan with memory= offloads it, one with rules for slots "
            "('*.exp_avg*') shards it. iso.to_jax(optimizer) returns its present state."
        )
