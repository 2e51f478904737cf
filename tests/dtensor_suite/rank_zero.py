"""Rank 0 stands for "this rank", inside the suite only.

Tests written for ranks ask a mesh where they stand, and a tensor for their own piece, also where
pieces differ in size. On one process isoshard refuses both, as there is no "this process"; here
the answers are those that rank 0 would get.
"""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.utils import _pytree as pytree

from isoshard.core.errors import UnevenError
from isoshard.torch_bridge.distributed import tensor_placements
from isoshard.torch_bridge.distributed.device_mesh import DeviceMesh, device_mesh_of
from isoshard.torch_bridge.distributed.tensor import DTensor, Replicate, parallel
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .settings import Settings


class _Group(ModuleType):
    """`torch.distributed` with a world of which this is rank 0; what exchanges is torch's own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    get_rank = staticmethod(lambda *_: 0)
    get_world_size = staticmethod(lambda *_: Settings.devices)
    barrier = staticmethod(lambda *_, **__: None)
    broadcast = staticmethod(lambda *_, **__: None)


GROUP = _Group("torch.distributed")


def parallelize_module(module: Any, mesh: Any = None, *plan: Any, **named: Any) -> Any:
    """As isoshard's; what goes into the module and lies on no mesh is each rank's own tensor."""
    mesh = device_mesh_of(mesh)
    made: Any = parallel.parallelize_module(module, mesh, *plan, **named)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        is_whole = isinstance(tensor, XLAShardedTensor) and not isinstance(tensor, ManualTensor)
        if not is_whole or not tensor.is_leaf or tensor._storage in tensor_placements._PLACEMENTS:
            return tensor
        return DTensor.from_local(tensor, mesh, [Replicate()]).to_local()

    def enter(_: Any, *given: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, own, given)

    made.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    return made


def install() -> None:
    """Answer as rank 0."""
    meshes: Any = DeviceMesh
    meshes._is_current_rank_part_of_mesh = lambda mesh: True
    meshes._sym_get_coordinate = lambda mesh, index: 0
    meshes.get_rank = lambda mesh: 0
    meshes.get_local_rank = lambda mesh, mesh_dim=None: 0
    meshes.get_coordinate = lambda mesh: [0] * mesh.ndim
    tensors: Any = XLAShardedTensor
    whole = tensors.to_local

    def to_local(tensor: Any, **options: Any) -> torch.Tensor:
        with contextlib.suppress(UnevenError):
            return whole(tensor, **options)
        return tensor.local_shards[0].unpadded_data.to("jax")

    pieces: Any = ManualTensor
    pieces.item = lambda piece: piece.stacked[0].item()
    DTensor._op_dispatcher = MagicMock()  # pyright: ignore[reportAttributeAccessIssue]
    tensors.to_local = to_local
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor.to("jax")  # pyright: ignore
    tensors._local_tensor = property(to_local)
