"""DTensor's verbs, by torch_xla's names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from isoshard.torch_bridge.kit import (
    Mesh,
    ShardingType,
    XLAShardedTensor,
    auto_policy,
    convert_to_xla_mesh,
    convert_to_xla_partition_spec,
    mark_sharding,
    xla_distribute_module,
    xla_distribute_tensor,
)
from isoshard.torch_xla_bridge.torch_xla import runtime

__all__ = [
    "Mesh",
    "ShardingType",
    "XLAShardedTensor",
    "auto_policy",
    "convert_to_xla_mesh",
    "convert_to_xla_partition_spec",
    "mark_sharding",
    "with_xla",
    "xla_distribute_module",
    "xla_distribute_tensor",
]


def with_xla(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function (or method) so that SPMD is switched on before it runs.

    Args:
        func: any function.

    Returns:
        The same function, after `torch_xla.runtime.use_spmd()`.
    """

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        runtime.use_spmd()
        return func(*args, **kwargs)

    return wrapper
