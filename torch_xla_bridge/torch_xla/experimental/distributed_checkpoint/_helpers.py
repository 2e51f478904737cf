"""What scripts and tests import from `torch_xla.experimental.distributed_checkpoint._helpers`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan

from isoshard.torch_bridge.kit import HostShards as _CpuShards
from isoshard.torch_bridge.kit import Path as OBJ_PATH
from isoshard.torch_bridge.kit import XLAShardedTensor, is_sharded, set_element
from isoshard.torch_bridge.kit import flatten as flatten_state_dict
from isoshard.torch_bridge.kit import sharded_cpu_state_dict as _sharded_cpu_state_dict

__all__ = [
    "FLATTEN_MAPPING",
    "OBJ_PATH",
    "_CpuShards",
    "_is_sharded_tensor",
    "_sharded_cpu_state_dict",
    "_unwrap_xla_sharded_tensor",
    "dedup_tensors",
    "flatten_state_dict",
    "narrow_tensor_by_index",
    "set_element",
]

FLATTEN_MAPPING = dict[str, OBJ_PATH]
"""The path of every flat name."""


def dedup_tensors(all_plans: list[SavePlan]) -> list[SavePlan]:
    """Leave what is planned more than once to the plan that names it first.

    Args:
        all_plans: one per process.
    """
    seen: set[Any] = set()
    plans = []
    for plan in all_plans:
        items = []
        for item in plan.items:
            if item.index not in seen:
                seen.add(item.index)
                items.append(item)
        plans.append(dataclasses.replace(plan, items=items))
    return plans


def narrow_tensor_by_index(
    tensor: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]
) -> torch.Tensor:
    """A view of a block of a tensor.

    Args:
        tensor: any.
        offsets: where the block begins, per axis.
        sizes: its extents.

    >>> narrow_tensor_by_index(torch.arange(6).reshape(2, 3), (1, 0), (1, 2))
    tensor([[3, 4]])
    """
    for axis, (offset, size) in enumerate(zip(offsets, sizes, strict=False)):
        if size < tensor.shape[axis]:
            tensor = tensor.narrow(axis, offset, size)
    return tensor


def _is_sharded_tensor(x: Any) -> bool:
    """Whether `x` is a tensor whose parts are on different devices."""
    return isinstance(x, XLAShardedTensor) and is_sharded(x)


def _unwrap_xla_sharded_tensor(x: Any) -> Any:
    """A tensor on the device is its own global tensor here, so this is `x`."""
    return x
