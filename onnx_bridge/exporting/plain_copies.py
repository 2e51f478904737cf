"""Plain copies: a module of DTensors or `jax` tensors, copied with plain tensors in host memory.

torch's exporter takes plain tensors only. A module of DTensors, or one on the device `jax`, is
copied with each such tensor replaced by its gathered, plain one; its class remains the same.

>>> import torch
>>> plain = torch.nn.Linear(4, 2)
>>> plain_copy(plain) is plain
True
>>> layouts_of(plain)
{}

The shardings are read from the tensors themselves: the placements of a DTensor, and for other
tensors `sharding_of` of core's registry.
"""

from __future__ import annotations

import copy
import sys
from typing import Any, TypeGuard

import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    ShardingError,
    UnrepresentableError,
    framework_of,
    make_mesh,
    metrics,
    raise_collected,
)

from ..errors import ModelError

# Hooks that shard values; a plain copy has nothing to shard.
_LAYOUT_HOOKS = ("torch.distributed", "isoshard")


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """List a module's parameters and buffers, a tied one once under its first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def first_names(module: torch.nn.Module) -> dict[str, str]:
    """Map each name of a tensor to the first name of that tensor.

    Example:
        >>> tied = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
        >>> tied[1].weight = tied[0].weight
        >>> first_names(tied)
        {'0.weight': '0.weight', '0.bias': '0.bias', '1.weight': '0.weight'}
    """
    every = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in every}


def plain_copy(module: torch.nn.Module) -> torch.nn.Module:
    """Copy a module with plain tensors in host memory; one that has only such is returned itself.

    Args:
        module: of DTensors, on the device `jax`, or plain. Each tensor that is not plain is
            gathered (counted as "gathers" in `isoshard.metrics`): the file needs all of it.
            With DTensors over several processes, all of them must call this.

    Example:
        >>> plain_copy(torch.nn.Linear(4, 2)).weight.device
        device(type='cpu')
    """
    tensors = named_tensors(module)
    if all(map(_is_plain, tensors.values())):
        return module
    memo: dict[int, Any] = {}
    for name, tensor in tensors.items():
        gathered = _gathered(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            gathered = torch.nn.Parameter(gathered, requires_grad=tensor.requires_grad)
        memo[id(tensor)] = gathered
        if not _is_plain(gathered.data):
            raise ModelError(f"{name}: gathering a {type(tensor).__name__} gave no plain tensor")
    try:
        copied = copy.deepcopy(module, dict(memo))
    except Exception as error:
        raise ModelError(
            f"{type(module).__name__} cannot be copied as a plain module ({error}). Build one that "
            "is not sharded, and pass it: export_torch(module, .., twin=plain_module)"
        ) from error
    for child in copied.modules():
        _drop_layout_hooks(child)
    return copied


def filled_copy(module: torch.nn.Module, copied: torch.nn.Module) -> torch.nn.Module:
    """Put a module's gathered weights into a plain module of the same names."""
    state = {name: _gathered(tensor) for name, tensor in module.state_dict().items()}
    missing, unknown = copied.load_state_dict(state, strict=False, assign=True)
    if missing or unknown:
        raise ModelError(
            f"the twin {type(copied).__name__} and {type(module).__name__} are not the same "
            f"module: the twin alone has {missing}, the module alone {unknown}"
        )
    return copied


def layouts_of(module: torch.nn.Module) -> dict[str, NamedSharding | P]:
    """Read how a module's tensors are sharded over devices.

    Raises:
        ShardingError: a DTensor is partial, split unevenly inside, or its mesh has no names; all
            errors are collected.
    """
    shardings, errors = {}, []
    for name, tensor in named_tensors(module).items():
        if _is_plain(tensor):
            continue
        try:
            shardings[name] = (
                _spec_of(tensor, name) if _is_dtensor(tensor) else _sharding_of(tensor)
            )
        except ShardingError as error:
            errors.append(error)
    raise_collected(errors)
    return {name: layout for name, layout in shardings.items() if layout is not None}


def mesh_for(module: torch.nn.Module) -> Mesh:
    """The mesh of a module's tensors.

    Returns:
        That of the tensors; for DTensors one of JAX's devices with the same names and shape.
    """
    for name, tensor in named_tensors(module).items():
        if _is_dtensor(tensor):
            mesh = tensor.device_mesh
            return make_mesh(tuple(mesh.shape), _axis_names(mesh, name))
        sharding = None if _is_plain(tensor) else _sharding_of(tensor)
        if sharding is not None and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    raise ShardingError(
        f"{type(module).__name__} is on no mesh of its own; pass one: export_torch(module, args, "
        "iso.make_mesh(shape, names), plan)"
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    module_name = type(tensor).__module__
    return module_name in ("torch", "torch.nn.parameter") and tensor.device.type != "jax"


def _is_dtensor(tensor: torch.Tensor) -> TypeGuard[Any]:
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return isinstance(tensor, kind)


def _gathered(tensor: torch.Tensor) -> torch.Tensor:
    if _is_plain(tensor):
        return tensor.detach()
    if _is_dtensor(tensor):
        metrics.count("gathers")
        return tensor.detach().full_tensor().cpu()
    return tensor.detach().cpu()


def _sharding_of(tensor: torch.Tensor) -> NamedSharding | None:
    framework = framework_of(tensor)
    sharding = None if framework is None else framework.sharding_of(tensor)
    return sharding if isinstance(sharding, NamedSharding) else None


def _spec_of(tensor: Any, name: str) -> P:
    """The spec of a DTensor: mesh axes that split one tensor axis, the first outermost."""
    names = _axis_names(tensor.device_mesh, name)
    entries: list[list[str]] = [[] for _ in range(tensor.dim())]
    for axis, placement in zip(names, tensor.placements, strict=True):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise UnrepresentableError(
                f"{name}: {type(placement).__name__} over {axis!r} cannot be written into a file; "
                "redistribute it to Shard or Replicate first, or give the export a plan"
            )
        entries[placement.dim % tensor.dim()].append(axis)
    return P(*(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in entries))


def _axis_names(mesh: Any, name: str) -> tuple[str, ...]:
    if not mesh.mesh_dim_names:
        raise ShardingError(
            f"{name}: its DeviceMesh of shape {tuple(mesh.shape)} has no names, which the file's "
            "mesh needs; make it with init_device_mesh(.., mesh_dim_names=('dp', 'tp'))"
        )
    return tuple(mesh.mesh_dim_names)


def _drop_layout_hooks(module: torch.nn.Module) -> None:
    framework = framework_of(module)
    for hooks in framework.forward_hooks(module) if framework else ():
        for key, hook in list(hooks.items()):
            hook_module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
            if hook_module.startswith(_LAYOUT_HOOKS):
                del hooks[key]
