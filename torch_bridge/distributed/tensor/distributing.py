"""`distribute_tensor` and `distribute_module` for one process that drives all devices.

>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from torch.distributed.tensor import Replicate, Shard
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> t = distribute_tensor(torch.ones(8, 6), mesh, [Replicate(), Shard(-2)])
>>> t.placements, t.device_mesh
((Replicate(), Shard(dim=0)), DeviceMesh((dp=2, tp=4), 'jax'))
>>> distribute_module(torch.nn.Linear(8, 8), mesh["tp"]).weight.placements
(Replicate(),)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import same_layout
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.distributed import tensor_placements
from isoshard.torch_bridge.distributed.device_mesh import device_mesh_of
from isoshard.torch_bridge.distributed.redistribution import moved
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.layout.graph_calls import is_traced
from isoshard.torch_bridge.spmd.distribute import with_module
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: MeshLike = None,
    placements: Sequence[Any] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> XLAShardedTensor:
    """Shard a tensor over a mesh.

    A CPU tensor goes to the devices shard by shard. One on the `jax` device is not modified: the
    result has memory of its own, and a gradient of its own, as DTensor's has. So one tensor can be
    laid out in several ways. A meta tensor becomes an `empty` one, made in pieces.

    Args:
        tensor: a leaf, on any device.
        device_mesh: a mesh in any form; by default the current one.
        placements: one `Shard` or `Replicate` per mesh dimension; replicated if not
            given.
        src_data_rank: makes no difference: one process has the data.

    Returns:
        A new leaf, which requires a gradient if `tensor` does; `tensor` itself if it is sharded
        so already, as DTensor gives back a DTensor.

    Raises:
        RuntimeError: `tensor` is no leaf, or a tensor of `to_local()`; there is no mesh.
        ValueError: `tensor` is sharded otherwise, or there is not one placement per dimension.
        IndexError: a `Shard` names an axis that the tensor does not have.
        NotImplementedError: a placement is `Partial`: a global tensor has no partial sums.
        ShardingError: `tensor` is a DTensor of several processes.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from torch.distributed.tensor import Shard
        >>> t = distribute_tensor(torch.ones(8, 6), init_device_mesh("jax", (4,)), [Shard(0)])
        >>> t.placements, t.shape, t.to_local().shape
        ((Shard(dim=0),), torch.Size([8, 6]), torch.Size([2, 6]))
    """
    _check_tensor(tensor)
    mesh_placements = tensor_placements.layout(tuple(tensor.shape), device_mesh, placements)
    if isinstance(tensor, XLAShardedTensor) and (present := marks.marked(tensor)) is not None:
        if not _same(present, mesh_placements.sharding, tensor.dim()):
            raise ValueError(
                f"this tensor of shape {tuple(tensor.shape)} is sharded already, by "
                f"{present.spec} over {device_mesh_of(mesh_of(present))}, and cannot be "
                f"distributed {_elsewhere(present, mesh_placements)}; use "
                "tensor.redistribute(mesh, placements)"
            )
        return tensor_placements.remember(tensor, mesh_placements)
    if tensor.is_meta:
        on_device = torch.empty(tensor.shape, dtype=tensor.dtype, device="jax")
    elif isinstance(tensor, XLAShardedTensor):
        on_device = tensor.detach().clone()
    else:
        on_device = tensor.to("jax").detach()  # in this order, as only inputs may come to a graph
    if is_traced(on_device):
        return moved(on_device, mesh_placements)
    result = tensor_placements.mark(on_device, mesh_placements).requires_grad_(tensor.requires_grad)
    marks.keep_gradient_layout(result)
    return result


def _check_tensor(tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"distribute_tensor takes a tensor, and this is a {type(tensor).__name__}")
    if type(tensor).__name__ == "DTensor":
        raise ShardingError(
            "distribute_tensor takes a global tensor, and this DTensor is one process's part of "
            "one; pass tensor.full_tensor()"
        )
    if isinstance(tensor, ManualTensor):
        raise RuntimeError(
            "this is each device's local tensor, of to_local(); make it global with "
            "DTensor.from_local(t, mesh, placements)"
        )
    if not tensor.is_leaf:
        raise RuntimeError(
            "distribute_tensor should be used to distribute leaf tensors, and this one of shape "
            f"{tuple(tensor.shape)} was computed ({type(tensor.grad_fn).__name__}); use "
            "tensor.redistribute(..) on the jax device, or tensor.detach()"
        )


def _same(a: Any, b: Any, ndim: int) -> bool:
    mesh_a, mesh_b = mesh_of(a), mesh_of(b)
    return list(mesh_a.devices.flat) == list(mesh_b.devices.flat) and same_layout(a, b, ndim)


def _elsewhere(present: Any, mesh_placements: Any) -> str:
    if mesh_of(present) == mesh_of(mesh_placements.sharding):
        return f"to a different placements, {mesh_placements.placements}"
    return (
        f"to a different device mesh, as {mesh_placements.placements} over {mesh_placements.mesh}"
    )


def distribute_module(
    module: torch.nn.Module,
    device_mesh: MeshLike = None,
    partition_fn: Callable[[str, torch.nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> torch.nn.Module:
    """Shard a module's parameters and buffers over a mesh.

    Args:
        module: changed in place; on any device.
        device_mesh: a mesh in any form, handed to the functions as it is; the current one if not
            given.
        partition_fn: called as `partition_fn(name, submodule, device_mesh)` for every submodule,
            the module itself first (its name is empty). What it leaves becomes whole on every
            device.
        input_fn: called as `input_fn(module, inputs, device_mesh)` before each forward pass; what
            it returns, unless None, takes the place of the inputs.
        output_fn: called as `output_fn(module, outputs, device_mesh)` after it.

    Returns:
        `module`.

    Raises:
        RuntimeError: it was distributed before; no mesh is passed or current.
        ValueError: `input_fn` or `output_fn` takes another number of arguments.

    Example:
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from torch.distributed.tensor import Shard
        >>> def rows(name, module, mesh):
        ...     weight = distribute_tensor(module.weight, mesh, [Shard(0)])
        ...     module.weight = torch.nn.Parameter(weight)
        >>> linear = distribute_module(torch.nn.Linear(4, 8), init_device_mesh("jax", (8,)), rows)
        >>> linear.weight.placements, linear.bias.placements
        ((Shard(dim=0),), (Replicate(),))
    """
    if getattr(module, "_distribute_module_applied", False):
        raise RuntimeError(
            f"this {type(module).__name__} was distributed before, and distribute_module should "
            "only be called once on a module; reshard single parameters with "
            "parameter.redistribute(..)"
        )
    before = input_fn and with_module("input_fn", input_fn)
    after = output_fn and with_module("output_fn", output_fn)
    mesh_like = device_mesh_of(None) if device_mesh is None else device_mesh
    mesh = device_mesh_of(mesh_like)
    new: dict[torch.Tensor, Any] = {}  # a tensor that two modules share remains shared
    for name, child in list(module.named_modules()):
        if partition_fn is not None:
            partition_fn(name, child, mesh_like)
        _replicate(child, mesh, new)
    if before is not None:
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs, mesh_like))
    if after is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs, mesh_like))
    module._distribute_module_applied = True  # pyrefly: ignore[bad-argument-type]
    return module


def _replicate(module: torch.nn.Module, mesh: Any, new: dict[torch.Tensor, Any]) -> None:
    """Replicate what is not sharded yet."""
    for key, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
        if not _is_distributed(parameter):
            if parameter not in new:
                replicated = distribute_tensor(parameter.detach(), mesh)
                new[parameter] = torch.nn.Parameter(replicated, parameter.requires_grad)
            module.register_parameter(key, new[parameter])
    for key, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
        if not _is_distributed(buffer):
            if buffer not in new:
                new[buffer] = distribute_tensor(buffer, mesh)
            setattr(module, key, new[buffer])


def _is_distributed(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, XLAShardedTensor) and marks.marked(tensor) is not None
