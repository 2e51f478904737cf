"""`DTensor`: the tensors of the `jax` device that are on a mesh.

Every tensor there is an `XLAShardedTensor`, on a mesh or not. Scripts test `isinstance(t, DTensor)`
to find distributed tensors, so the class answers by the placements.
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.core.layout.spec import SpecLike
from isoshard.core.runtime.user_warnings import warn_user
from isoshard.torch_bridge._torch_internals.dtensor_fields import DTENSOR_SPEC
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.distributed import tensor_placements
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor


class _OnMesh(type(torch.Tensor)):
    """A tensor is an instance if it is on a mesh."""

    def __instancecheck__(cls, instance: Any) -> bool:
        if not isinstance(instance, XLAShardedTensor) or isinstance(instance, ManualTensor):
            return False
        return tensor_placements.is_placed(instance)


class DTensor(XLAShardedTensor, metaclass=_OnMesh):
    """A tensor on a mesh: sharded over it, or the result of a program over it.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor import distribute_tensor
        >>> plain = torch.ones(8).to("jax")
        >>> isinstance(plain, DTensor)
        False
        >>> isinstance(distribute_tensor(plain, init_device_mesh("jax", (8,))), DTensor)
        True
    """

    def __new__(
        cls,
        elem: torch.Tensor,
        mesh_shape: MeshLike = None,
        partition_spec: SpecLike = None,
        **options: Any,
    ) -> XLAShardedTensor:
        """As `XLAShardedTensor`; a local tensor and torch's `DTensorSpec` make a new leaf of it."""
        if not isinstance(mesh_shape, DTENSOR_SPEC.resolve()):
            return super().__new__(cls, elem, mesh_shape, partition_spec, **options)
        spec, requires_grad = mesh_shape, bool(options.get("requires_grad"))
        if elem.requires_grad and not requires_grad:
            warn_user(
                "To construct a DTensor that takes part in autograd, call DTensor.from_local: this "
                "one is a leaf without a gradient, and the local tensor requires one",
                UserWarning,
            )
        meta = spec.tensor_meta
        shape, stride = (None, None) if meta is None else (meta.shape, meta.stride)
        tensor = cls.from_local(
            elem.detach(), spec.mesh, spec.placements, shape=shape, stride=stride
        )
        return tensor.requires_grad_(requires_grad)
