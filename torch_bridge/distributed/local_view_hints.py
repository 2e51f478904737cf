"""The hint for a view of a global tensor by a local shape.

A script of torchrun writes `view(batch, length, heads // tp, head_size)`, where a rank has its own
heads. A global tensor has all heads.

>>> import torch
>>> from isoshard.torch_bridge.distributed import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import Shard, distribute_tensor
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> t = distribute_tensor(torch.ones(6, 8), mesh["tp"], [Shard(1)])
>>> local_heads_hint(t, (6, 2)) is not None
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from isoshard.core.layout.mesh import mesh_of
from isoshard.torch_bridge.common.argument_types import DeviceTensor
from isoshard.torch_bridge.engine.compiling.result_meshes import meshes_behind
from isoshard.torch_bridge.engine.operators.error_hints import hint_for
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from . import tensor_placements


def local_heads_hint(tensor: DeviceTensor, shape: Sequence[int]) -> str | None:
    """The hint for a view with as many elements as one shard; None for other views.

    Args:
        tensor: the global tensor.
        shape: of the view.
    """
    num_requested = math.prod(shape)
    if num_requested <= 0 or tensor.numel() % num_requested:
        return None
    times = tensor.numel() // num_requested
    mesh_placements = tensor_placements.mesh_placements_of(tensor)
    meshes = (
        meshes_behind(tensor._storage.value)
        if mesh_placements is None
        else {mesh_of(mesh_placements.sharding)}
    )
    sizes = [pair for mesh in meshes for pair in mesh.shape.items() if pair[1] == times > 1]
    if not sizes:
        return None
    name, is_named = sizes[0][0], len(next(iter(meshes)).shape) > 1
    mesh_text = f"mesh[{name!r}]" if is_named else "mesh"
    return (
        f"this tensor is global, of {times} times as many elements, and its mesh has {times} "
        f"devices along {name!r}: is this the shape of one device's shard? Write -1, or the number "
        f"of all heads, for heads // {times}; or pass local tensors to the module, of to_local(): "
        f"DTensor.from_local(x, {mesh_text}, [Replicate()]).to_local()"
    )


@hint_for("aten::view")
@hint_for("aten::_unsafe_view")
def _of_view(args: tuple[Any, ...]) -> str | None:
    tensor = args[0]
    if not isinstance(tensor, XLAShardedTensor) or isinstance(tensor, ManualTensor):
        return None
    return local_heads_hint(tensor, args[1])
