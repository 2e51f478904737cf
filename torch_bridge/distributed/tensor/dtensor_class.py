"""`DTensor`: the tensors of the `jax` device that lie on a mesh.

Every tensor there is an `XLAShardedTensor`, on a mesh or not. Scripts ask `isinstance(t, DTensor)`
to tell those that are distributed, so the class answers by the layout.
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.torch_bridge.distributed import tensor_placements
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensor import XLAShardedTensor


class _OnMesh(type(torch.Tensor)):
    """Whether a tensor is an instance goes by where it lies."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, XLAShardedTensor) or isinstance(instance, ManualTensor):
            return False
        return tensor_placements.is_placed(instance)


class DTensor(XLAShardedTensor, metaclass=_OnMesh):
    """A tensor on a mesh: laid out on one, or to be computed by a program over one.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor import distribute_tensor
        >>> plain = torch.ones(8).to("jax")
        >>> isinstance(plain, DTensor)
        False
        >>> isinstance(distribute_tensor(plain, init_device_mesh("jax", (8,))), DTensor)
        True
    """
