"""Where a manual region begins and ends, by XLA's words: full shape to shard shape, and back.

`enable_manual_sharding` and `disable_manual_sharding` name a spec and a mesh; these two take the
layout that a tensor has, and a layout without a mesh.

>>> import torch, isoshard.torch_bridge as xs
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> t = xs.mark_sharding(torch.ones(4, 8).to("jax"), mesh, ("x", "y"))
>>> piece = full_to_shard_shape(t)
>>> piece.shape
torch.Size([2, 2])
>>> whole = shard_to_full_shape(piece * 2, mesh.get_op_sharding(("x", "y")), t.shape, t.dtype)
>>> whole.sum()
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
    """What each device holds of a tensor, as a manual tensor.

    Args:
        t: on the device, marked.

    Returns:
        A tensor of the shape of one piece.

    Raises:
        ShardingError: a `RuntimeError` as well; nobody has marked `t`.
        UnevenError: its pieces differ in size.
    """
    sharding = marks.asked(t) if isinstance(t, XLAShardedTensor) else None
    if sharding is None:
        raise UnmarkableError(
            f"a tensor of shape {tuple(t.shape)} on {t.device} is not laid out, so it has no shard "
            "shape; mark it first: xs.mark_sharding(t, mesh, spec)"
        )
    return enable_manual_sharding(t, sharding.spec, mesh=sharding.mesh)


def shard_to_full_shape(
    t: torch.Tensor, sharding: OpSharding, shape: Sequence[int], dtype: torch.dtype
) -> XLAShardedTensor:
    """The whole that the pieces of a manual tensor make.

    Args:
        t: manual.
        sharding: how the pieces lie in the whole.
        shape: of the whole.
        dtype: of the whole.

    Raises:
        ShardingError: a `RuntimeError` as well where `t` is not manual; its pieces do not make the
            whole.
    """
    if not isinstance(t, ManualTensor):
        raise UnmarkableError(
            f"a tensor of shape {tuple(t.shape)} on {t.device} is in no manual region, so it has "
            "no pieces; begin one with full_to_shard_shape or enable_manual_sharding"
        )
    spec = sharding.spec_over(t.home, len(shape))
    whole: Any = disable_manual_sharding(t, spec, shape, mesh=t.home)
    return whole if whole.dtype == dtype else whole.to(dtype)
