"""Manual regions by XLA's names: full shape to shard shape, and back.

`enable_manual_sharding` and `disable_manual_sharding` take a spec and a mesh; these two take the
sharding that a tensor has, and an `OpSharding`, which has no mesh.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> t = xs.mark_sharding(torch.ones(4, 8).to("jax"), mesh, ("x", "y"))
>>> shard = full_to_shard_shape(t)
>>> shard.shape
torch.Size([2, 2])
>>> full = shard_to_full_shape(shard * 2, mesh.get_op_sharding(("x", "y")), t.shape, t.dtype)
>>> full.sum()
tensor(64., device='jax:0')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .manual import disable_manual_sharding, enable_manual_sharding
from .manual_tensor import ManualTensor
from .mark_errors import UnmarkableError
from .op_sharding import OpSharding


def full_to_shard_shape(t: torch.Tensor) -> ManualTensor:
    """Each device's shard of a tensor, as a manual tensor.

    Returns:
        A tensor of the shape of one shard.

    Raises:
        ShardingError: a `RuntimeError` as well; `t` is not marked.
        UnevenError: its shards differ in size.
    """
    sharding = marks.requested_sharding(t) if isinstance(t, XLAShardedTensor) else None
    if sharding is None:
        raise UnmarkableError(
            f"a tensor of shape {tuple(t.shape)} on {t.device} is not marked, so it has no shard "
            "shape; mark it first: xs.mark_sharding(t, mesh, spec)"
        )
    return enable_manual_sharding(t, sharding.spec, mesh=sharding.mesh)


def shard_to_full_shape(
    t: torch.Tensor, sharding: OpSharding, shape: Sequence[int], dtype: torch.dtype
) -> XLAShardedTensor:
    """The global tensor of the shards of a manual tensor.

    Raises:
        ShardingError: a `RuntimeError` as well where `t` is not manual; its shards have other
            shapes.
    """
    if not isinstance(t, ManualTensor):
        raise UnmarkableError(
            f"a tensor of shape {tuple(t.shape)} on {t.device} is in no manual region, so it has "
            "no shards; begin one with full_to_shard_shape or enable_manual_sharding"
        )
    spec = sharding.spec_over(t.mesh, len(shape))
    full: Any = disable_manual_sharding(t, spec, shape, mesh=t.mesh)
    return full if full.dtype == dtype else full.to(dtype)
