"""Shardings of tensors as torch_xla's internal functions report them."""

from __future__ import annotations

import torch

from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.layout.marks import ShardingType
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor


def sharding_spec_of(t: torch.Tensor) -> str:
    """The sharding as torch_xla writes it; empty if the tensor is not marked, or not on the device.

    >>> import isoshard.torch_bridge as xs
    >>> mesh = xs.Mesh(range(8), (8,), ("x",))
    >>> sharding_spec_of(xs.mark_sharding(torch.ones(8).to("jax"), mesh, ("x",)))
    '{devices=[8]0,1,2,3,4,5,6,7}'
    >>> sharding_spec_of(torch.ones(8))
    ''
    """
    return t.sharding_spec if isinstance(t, XLAShardedTensor) else ""


def sharding_type_of(t: torch.Tensor) -> ShardingType | None:
    """How the sharding divides the tensor; None if it is not marked, or not on the device."""
    return t.sharding_type if isinstance(t, XLAShardedTensor) else None


def buffers_spec_of(t: torch.Tensor) -> str:
    """As `sharding_spec_of`; in a script of torch_xla also of buffers that are not marked.

    A tensor in device memory without a mark is `{replicated}`, as XLA writes the sharding of an
    array on one device as well. Host memory, and a value that is still to be computed, have none.
    """
    return sharding_spec_of(t) or ("{replicated}" if _is_replicated(t) else "")


def buffers_type_of(t: torch.Tensor) -> ShardingType | None:
    """As `sharding_type_of`, of the shardings of `buffers_spec_of`."""
    kind = sharding_type_of(t)
    return ShardingType.REPLICATED if kind is None and _is_replicated(t) else kind


def _is_replicated(t: torch.Tensor) -> bool:
    """Whether a tensor of a script of torch_xla is in device memory and has no sharding."""
    if not isinstance(t, XLAShardedTensor) or not naming.is_torch_xla():
        return False
    if t.named_sharding is not None or marks.is_recorded(t) or marks.is_cleared(t):
        return False
    return not marks.is_on_host(t)
