"""Automatic shardings of a module's parameters: by a rule first, later by a search.

torch_xla runs XLA's auto-sharding pass, which JAX does not offer. Here the first compiled step that
uses the module is planned, and its parameters are sharded by that plan (`request_plan`). Until
then, and where nothing is compiled, there is a deterministic rule:

1. A tensor is split along its largest axis that all devices together divide.
2. If there is none, along the largest axis that one mesh axis divides; the largest mesh axis first.
3. If there is none either, it is replicated.

Of axes of equal size the first is taken. Activations are left to XLA's partitioner.
"""

from __future__ import annotations

import math
import os
from typing import Any

import jax
import torch

from isoshard.core.errors import ShardingError
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .first_layouts import mark_for_now, request_plan
from .mesh import Mesh, get_1d_mesh, get_global_mesh, mesh_from


def auto_policy(mod_name: str, mod: torch.nn.Module, mesh: MeshLike = None) -> None:
    """Mark the parameters and buffers of one module, without its children, by the rule above.

    Pass it to `xla_distribute_module(module, mesh, auto_policy)`. Tensors that are split already
    are not changed. The first compiled step that uses the module finds a plan for it.

    Args:
        mod_name: of the module, for messages.
        mod: on the `jax` device.
        mesh: in any form; if not given the global mesh, else all devices in the shape of the
            environment variable `XLA_AUTO_SPMD_MESH` (such as `2,4`), else of one axis.

    Raises:
        ShardingError: a tensor is on another device.

    >>> import isoshard.torch_bridge as xs
    >>> layer = torch.nn.Linear(16, 64).to("jax")
    >>> auto_policy("layer", layer, xs.Mesh(range(8), (2, 4), ("x", "y")))
    >>> layer.weight.partition_spec, layer.bias.partition_spec
    (P(('x', 'y'),), P(('x', 'y'),))
    """
    mesh = auto_mesh(mesh)
    tensors = [*mod.named_parameters(recurse=False), *mod.named_buffers(recurse=False)]
    for name, tensor in tensors:
        if not isinstance(tensor, XLAShardedTensor):
            raise ShardingError(
                f"{mod_name}.{name} is on {tensor.device}; move the module with "
                f"{naming.moving()} first"
            )
        if not marks.marked(tensor) or not tensor.sharding_type:
            mark_for_now(tensor, mesh, auto_spec(tuple(tensor.shape), mesh.mesh_shape))
    request_plan(mod, mesh)


def auto_spec(shape: tuple[int, ...], mesh_shape: tuple[int, ...]) -> tuple[Any, ...]:
    """The spec that the rule gives for a tensor.

    Args:
        shape: of the tensor.
        mesh_shape: devices along each mesh axis.

    >>> auto_spec((16, 64), (2, 4)), auto_spec((12, 6), (2, 4)), auto_spec((3,), (2, 4))
    ((None, (0, 1)), (1, None), (None,))
    """
    spec: list[Any] = [None] * len(shape)
    everything = list(range(len(mesh_shape)))
    by_size = sorted(everything, key=lambda axis: -mesh_shape[axis])
    for axes in [everything, *([axis] for axis in by_size)]:
        count = math.prod(mesh_shape[axis] for axis in axes)
        fitting = [dim for dim, extent in enumerate(shape) if extent and extent % count == 0]
        if count > 1 and fitting:
            largest = max(fitting, key=lambda dim: shape[dim])
            spec[largest] = tuple(axes) if len(axes) > 1 else axes[0]
            break
    return tuple(spec)


def auto_mesh(mesh: MeshLike = None) -> Mesh:
    """The mesh for `auto_policy`, see there.

    Raises:
        ShardingError: `XLA_AUTO_SPMD_MESH` is no shape of all devices.
    """
    if mesh is not None:
        return mesh_from(mesh)
    if (global_mesh := get_global_mesh()) is not None:
        return global_mesh
    text = os.environ.get("XLA_AUTO_SPMD_MESH", "")
    if not text:
        return get_1d_mesh()
    count = len(jax.devices())
    shape = tuple(int(size) if size.strip().isdecimal() else 0 for size in text.split(","))
    if math.prod(shape) != count:
        raise ShardingError(
            f"XLA_AUTO_SPMD_MESH is {text!r}, and there are {count} devices; set the devices "
            f"along each axis, such as {count} or 2,{count // 2}"
        )
    return Mesh(range(count), shape)
