"""Modules and optimizers whose tensors are DTensors: to JAX as trees by name, and back.

For modules under FSDP2 (`fully_shard`), under `parallelize_module`, or both:

    params = iso.to_jax(model)                            # {"layers.0.weight": jax.Array, ..}
    momentum = iso.to_jax(optimizer)["momentum_buffer"]   # {"layers.0.weight": jax.Array, ..}
    ..                                                    # some steps of JAX
    iso.checkpoint.load_arrays(model, params)
    iso.checkpoint.load_arrays(optimizer, {"momentum_buffer": momentum})

Both ways share each rank's memory. An optimizer's state is called by the names of its parameters
if it was made with `model.named_parameters()`, and by their positions otherwise.

All arrays of a tree are on one mesh. A tensor on a slice of a larger mesh that others are on, such
as `mesh["tp"]`, is taken to be replicated along its other axes. A plain tensor among DTensors (a
buffer under FSDP2) is taken to be replicated over the mesh.

Of torch's private names `DTensor._local_tensor` is used here: setting it replaces the memory of a
parameter that optimizers and hooks refer to, as FSDP2 itself does it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import torch
from jax.sharding import NamedSharding

from isoshard.core.errors import CopyError, ShardingError, raise_collected
from isoshard.core.layout.uneven import UnevenArray
from isoshard.core.transfer.exchange import reshard_array
from isoshard.torch_bridge.modules import modules

from . import dtensor_exchange, routes, shard_memory
from .recognition import fsdp_modules, is_dtensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def to_jax(
    module: torch.nn.Module,
    sharding: NamedSharding | None = None,
    *,
    copy: bool | None = None,
    reduce: bool = False,
) -> dict[str, jax.Array | UnevenArray]:
    """Give a module's parameters and buffers as arrays.

    Args:
        module: sharded over processes. FSDP2 modules are resharded if a forward left them gathered.
        sharding: another layout for every array; None keeps each one's own.
        copy: as for `iso.to_jax`.
        reduce: likewise.

    Returns:
        The arrays by name; a tied tensor once.

    Raises:
        ShardingError: the errors of all tensors, see `iso.to_jax`.
        DistributedError: the ranks exchange different tensors.
    """
    reshard(module)
    tensors = dict(modules.tensors(module))
    if reduce:
        tensors = {name: dtensor_exchange.reduced(tensor) for name, tensor in tensors.items()}
    arrays = _convert(rank_shards(tensors), copy)
    if sharding is None:
        return arrays
    return {name: reshard_array(a, sharding, copy=copy, name=name) for name, a in arrays.items()}


def sharding_of(module: torch.nn.Module) -> dict[str, NamedSharding]:
    """The layouts that `to_jax` gives a module's tensors; of padded arrays where shards differ.

    Args:
        module: sharded over processes.

    Returns:
        The shardings by name.

    Raises:
        ShardingError: JAX has no such sharding, or the DTensors are on unrelated meshes.
    """
    reshard(module)
    return {
        shard.name: shard.route().layout.sharding
        for shard in rank_shards(dict(modules.tensors(module)))
    }


def state_to_jax(
    optimizer: torch.optim.Optimizer, *, copy: bool | None = None
) -> dict[str, dict[str, Any]]:
    """Give an optimizer's state as arrays.

    Args:
        optimizer: of a module that is sharded over processes.
        copy: as for `iso.to_jax`.

    Returns:
        For each kind of state a dictionary by parameter, e.g. `{"exp_avg": {"weight": ..}, ..}`.
        Numbers stay numbers; what is None is left out.

    Raises:
        ShardingError: the errors of all tensors, see `iso.to_jax`.
        DistributedError: the ranks exchange different tensors.
    """
    params = named_params(optimizer)
    mesh = largest_mesh(params.values(), type(optimizer).__name__)
    result: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        for kind, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{kind}.{name}"] = value
            if value is not None:
                result.setdefault(kind, {})[name] = value
    arrays = _convert([rank_shard_on(name, tensor, mesh) for name, tensor in tensors.items()], copy)
    return {
        kind: {name: arrays.get(f"{kind}.{name}", value) for name, value in values.items()}
        for kind, values in result.items()
    }


def rank_shards(tensors: Mapping[str, torch.Tensor]) -> list[routes.RankShard]:
    """This rank's shard of each of a module's tensors, all on one mesh.

    Raises:
        ShardingError: the DTensors are on meshes of which none contains the others.
    """
    mesh = largest_mesh(tensors.values(), "the module")
    return [rank_shard_on(name, tensor, mesh) for name, tensor in tensors.items()]


def _convert(shards: Iterable[routes.RankShard], copy: bool | None) -> dict[str, Any]:
    shards = list(shards)
    routes.resolve(routes.TO_JAX, [routes.outbound(shard) for shard in shards])
    arrays, errors = {}, []
    for shard in shards:
        route = routes.resolved(shard.key)
        try:
            arrays[shard.name] = dtensor_exchange.array_of_local(
                route, shard.local, copy=copy, name=shard.name
            )
        except ShardingError as error:
            errors.append(error)
    raise_collected(errors)
    return arrays


def rank_shard_on(name: str, tensor: torch.Tensor, mesh: DeviceMesh) -> routes.RankShard:
    """This rank's shard of a tensor, with placements on a larger mesh.

    Args:
        name: of the tensor.
        tensor: a DTensor on `mesh` or a slice of it, or a plain tensor.
        mesh: the mesh.

    Returns:
        The tensor as one over `mesh`.

    Raises:
        ShardingError: it is on a mesh that is no slice of `mesh`.
    """
    from torch.distributed.tensor import Replicate

    if tensor.grad_fn is not None:
        raise CopyError(f"{name} was computed from tensors that require grad; pass it detached")
    if not is_dtensor(tensor):
        local = shard_memory.plain(tensor.detach(), name)
        return routes.RankShard(name, local, mesh, (Replicate(),) * mesh.ndim, tensor.shape)
    shard = routes.RankShard.of(tensor, name)
    if shard.mesh == mesh:
        return shard
    if not _is_slice(shard.mesh, mesh):
        raise ShardingError(
            f"{name} is on {shard.mesh}, which is no slice of {mesh}, the mesh of other tensors: "
            "no program can take both. Convert them one by one: iso.to_jax(tensor)."
        )
    by_axis = dict(zip(shard.mesh.mesh_dim_names or (), shard.placements, strict=True))
    placements = tuple(by_axis.get(axis, Replicate()) for axis in mesh.mesh_dim_names or ())
    return routes.RankShard(name, shard.local, mesh, placements, shard.shape)


def largest_mesh(tensors: Iterable[Any], owner: str) -> DeviceMesh:
    """The mesh of all of a module's arrays: that of most ranks, and of most axes among those.

    Raises:
        ShardingError: there is no DTensor.
    """
    meshes = [tensor.device_mesh for tensor in tensors if is_dtensor(tensor)]
    if not meshes:
        raise ShardingError(
            f"{owner} has no DTensor, so it has no mesh of processes; shard it first (fully_shard, "
            "parallelize_module, distribute_module)"
        )
    return max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim))


def _is_slice(mesh: DeviceMesh, parent: DeviceMesh) -> bool:
    """Whether `mesh` is `parent[names]` as this rank sees it."""
    names, axes = mesh.mesh_dim_names, parent.mesh_dim_names
    coordinate = parent.get_coordinate()
    if not names or not axes or not set(names) <= set(axes) or coordinate is None:
        return False
    index = tuple(
        slice(None) if axis in names else position
        for axis, position in zip(axes, coordinate, strict=True)
    )
    remaining = [axis for axis in axes if axis in names]
    ranks = parent.mesh[index].permute([remaining.index(name) for name in names])
    return torch.equal(ranks, mesh.mesh)


def named_params(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An optimizer's parameters by name, or by position if it has no names.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> list(named_params(torch.optim.SGD(layer.named_parameters(), lr=1.0)))
        ['weight', 'bias']
    """
    params: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        names = group.get("param_names") or map(str, range(len(params), sys.maxsize))
        params.update(zip(names, group["params"], strict=False))
    return params


def reshard(module: torch.nn.Module) -> None:
    """Free the gathered parameters that FSDP2 may have kept after a forward."""
    for child in fsdp_modules(module):
        child.reshard()
