"""Modules and optimizers whose tensors are DTensors: to JAX as trees by name, and back.

For modules under FSDP2 (`fully_shard`), under `parallelize_module`, or both:

    params = iso.to_jax(model)                            # {"layers.0.weight": jax.Array, ..}
    momentum = iso.to_jax(optimizer)["momentum_buffer"]   # {"layers.0.weight": jax.Array, ..}
    ..                                                    # some steps of JAX
    iso.checkpoint.load_arrays(model, params)
    iso.checkpoint.load_arrays(optimizer, {"momentum_buffer": momentum})

Both ways share each rank's memory. An optimizer's state is called by the names of its parameters
if it was made with `model.named_parameters()`, and by their positions otherwise.

All arrays of a tree lie on one mesh. A tensor on a slice of a larger mesh that others are on, such
as `mesh["tp"]`, counts as replicated along the rest of it. A plain tensor beside DTensors (a buffer
under FSDP2) counts as replicated over the mesh: each rank gives what it has.

Of torch's private names `DTensor._local_tensor` is used here: it is how memory is put under a
parameter that optimizers and hooks hold on to, and how FSDP2 itself does it.
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
        module: sharded over processes. FSDP2 modules are resharded if a forward left them whole.
        sharding: another layout for every array; None keeps each one's own.
        copy: as for `iso.to_jax`.
        reduce: likewise.

    Returns:
        The arrays by name; a tied tensor once.

    Raises:
        ShardingError: the faults of all tensors, see `iso.to_jax`.
        DistributedError: the ranks mean different things.
    """
    reshard(module)
    found = dict(modules.tensors(module))
    if reduce:
        found = {name: dtensor_exchange.reduced(tensor) for name, tensor in found.items()}
    arrays = _convert(held(found), copy)
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
        ShardingError: JAX has no words for a layout, or the DTensors lie on unrelated meshes.
    """
    reshard(module)
    return {one.name: one.route().layout.sharding for one in held(dict(modules.tensors(module)))}


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
        ShardingError: the faults of all tensors, see `iso.to_jax`.
        DistributedError: the ranks mean different things.
    """
    params = named_params(optimizer)
    whole = largest_mesh(params.values(), type(optimizer).__name__)
    result: dict[str, dict[str, Any]] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, param in params.items():
        for kind, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{kind}.{name}"] = value
            if value is not None:
                result.setdefault(kind, {})[name] = value
    arrays = _convert([held_on(name, tensor, whole) for name, tensor in tensors.items()], copy)
    return {
        kind: {name: arrays.get(f"{kind}.{name}", value) for name, value in values.items()}
        for kind, values in result.items()
    }


def held(tensors: Mapping[str, torch.Tensor]) -> list[routes.RankShard]:
    """What this rank holds of each of a module's tensors, all on one mesh.

    Args:
        tensors: DTensors, and plain tensors beside them, by name.

    Returns:
        One for each tensor.

    Raises:
        ShardingError: the DTensors lie on meshes of which none contains the others.
    """
    whole = largest_mesh(tensors.values(), "the module")
    return [held_on(name, tensor, whole) for name, tensor in tensors.items()]


def _convert(found: Iterable[routes.RankShard], copy: bool | None) -> dict[str, Any]:
    found = list(found)
    routes.settle(routes.TO_JAX, [routes.outbound(one) for one in found])
    arrays, faults = {}, []
    for one in found:
        route = routes.known(one.key)
        try:
            arrays[one.name] = dtensor_exchange.along(route, one.local, copy=copy, name=one.name)
        except ShardingError as error:
            faults.append(error)
    raise_collected(faults)
    return arrays


def held_on(name: str, tensor: torch.Tensor, whole: DeviceMesh) -> routes.RankShard:
    """What this rank holds of a tensor, said of another mesh.

    Args:
        name: of the tensor.
        tensor: a DTensor on `whole` or a slice of it, or a plain tensor.
        whole: the mesh.

    Returns:
        The tensor as one over `whole`.

    Raises:
        ShardingError: it lies on a mesh that is no slice of `whole`.
    """
    from torch.distributed.tensor import Replicate

    if tensor.grad_fn is not None:
        raise CopyError(f"{name} was computed from tensors that require grad; pass it detached")
    if not is_dtensor(tensor):
        local = shard_memory.plain(tensor.detach(), name)
        return routes.RankShard(name, local, whole, (Replicate(),) * whole.ndim, tensor.shape)
    own = routes.RankShard.of(tensor, name)
    if own.mesh == whole:
        return own
    if not _is_slice(own.mesh, whole):
        raise ShardingError(
            f"{name} lies on {own.mesh}, and others on {whole}, of which it is no slice: no one "
            "program can take both. Hand them over one by one: iso.to_jax(tensor)."
        )
    by_axis = dict(zip(own.mesh.mesh_dim_names or (), own.placements, strict=True))
    placements = tuple(by_axis.get(axis, Replicate()) for axis in whole.mesh_dim_names or ())
    return routes.RankShard(name, own.local, whole, placements, own.shape)


def largest_mesh(tensors: Iterable[Any], owner: str) -> DeviceMesh:
    """The mesh that a module's arrays all lie on.

    Args:
        tensors: of which some are DTensors.
        owner: of the tensors, for messages.

    Returns:
        The mesh of most ranks, and of most axes among those.

    Raises:
        ShardingError: there is no DTensor.
    """
    meshes = [tensor.device_mesh for tensor in tensors if is_dtensor(tensor)]
    if not meshes:
        raise ShardingError(
            f"{owner} has no DTensor, so there is no mesh of processes to lie on; shard it first "
            "(fully_shard, parallelize_module, distribute_module)"
        )
    return max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim))


def _is_slice(mesh: DeviceMesh, whole: DeviceMesh) -> bool:
    """Whether `mesh` is `whole[names]` as this rank sees it."""
    names, axes = mesh.mesh_dim_names, whole.mesh_dim_names
    coordinate = whole.get_coordinate()
    if not names or not axes or not set(names) <= set(axes) or coordinate is None:
        return False
    index = tuple(
        slice(None) if axis in names else at for axis, at in zip(axes, coordinate, strict=True)
    )
    kept = [axis for axis in axes if axis in names]
    ranks = whole.mesh[index].permute([kept.index(name) for name in names])
    return torch.equal(ranks, mesh.mesh)


def named_params(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """An optimizer's parameters by name, or by position where it knows no names.

    Args:
        optimizer: any.

    Returns:
        The parameters of all its groups.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> list(named_params(torch.optim.SGD(layer.named_parameters(), lr=1.0)))
        ['weight', 'bias']
    """
    found: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        names = group.get("param_names") or map(str, range(len(found), sys.maxsize))
        found.update(zip(names, group["params"], strict=False))
    return found


def reshard(module: torch.nn.Module) -> None:
    """Free the whole parameters that FSDP2 may have kept after a forward."""
    for child in fsdp_modules(module):
        child.reshard()
