"""Modules: parameters and buffers by name, sharded all or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from jax.sharding import Mesh, NamedSharding

from isoshard.core.errors import ShardingError, raise_collected
from isoshard.core.layout.spec import named_sharding
from isoshard.core.plan import Plan
from isoshard.core.plan.model_leaves import ModelLeaf
from isoshard.core.plan.replication_warning import warn_replicated
from isoshard.core.plan.resolving import resolve_leaves
from isoshard.core.plan.unused_rules import warn_unused

from ..loops.by_layer import ByLayer
from ..loops.stacked import StackedLayers
from ..overrides import swap_parameters

Placer = Callable[[torch.Tensor, NamedSharding, bool | None, str], torch.Tensor]


def tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and buffer with its first name; a tied one once."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def named_arrays(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer under the name that plans match; see `ByLayer`."""
    return ByLayer(module).tensors


def layout(
    module: torch.nn.Module, mesh: Mesh, spec: Any, name: str | None = None, *, warn: bool = False
) -> dict[str, NamedSharding]:
    """The sharding of every parameter and buffer of a module.

    Args:
        module: on any device.
        mesh: the mesh.
        spec: a Plan, a dictionary of specs by name, or one spec for all.
        name: of the module, put before the names of its tensors in messages.
        warn: whether to warn of rules that decide nothing.

    Returns:
        A sharding for each name.

    Raises:
        ShardingError: listing every tensor whose spec does not fit, or that has none.
    """
    if any(isinstance(child, StackedLayers) for child in module.modules()):
        layers = ByLayer(module)
        return layers.stack_shardings(_decided(module, layers.tensors, mesh, spec, name, warn))
    return _decided(module, dict(tensors(module)), mesh, spec, name, warn)


def _decided(
    module: torch.nn.Module,
    named: Mapping[str, torch.Tensor],
    mesh: Mesh,
    spec: Any,
    name: str | None,
    warn: bool,
) -> dict[str, NamedSharding]:
    """The shardings of named tensors by a spec."""
    if isinstance(spec, Plan):
        resolved = resolve_leaves(spec, [_leaf(*entry) for entry in named.items()], mesh)
        if warn:
            warn_replicated(spec, resolved)
        if warn and resolved.unused:
            warn_unused(spec, module)
        return {leaf.name: leaf.sharding for leaf in resolved.leaves}
    if isinstance(spec, dict):
        unknown = [key for key in spec if key not in named]
        if unknown:
            raise ShardingError(
                f"{type(module).__name__} has no tensors called {', '.join(unknown)}; its names "
                f"are {', '.join(list(named)[:20])}{', ..' if len(named) > 20 else ''}"
            )
    prefix = f"{name}." if name else ""
    shardings, errors = {}, []
    for key, tensor in named.items():
        entry = spec.get(key) if isinstance(spec, dict) else spec
        try:
            shardings[key] = named_sharding(
                entry, mesh, tensor.dim(), shape=tuple(tensor.shape), name=prefix + key
            )
        except ShardingError as error:
            errors.append(error)
    if errors:
        raise_collected(errors)
    return shardings


def _leaf(name: str, tensor: torch.Tensor) -> ModelLeaf:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ModelLeaf(name, tuple(tensor.shape), dtype, itemsize=tensor.dtype.itemsize)


def shard_module(
    module: torch.nn.Module,
    mesh: Mesh,
    spec: Any,
    place: Placer,
    *,
    copy: bool | None = None,
    name: str | None = None,
) -> torch.nn.Module:
    """Shard every parameter and buffer of a module; on an error nothing is changed.

    Four steps: the tensors by name, a sharding for each, each sharded so, and each put back.

    Args:
        module: changed in place.
        mesh: the mesh.
        spec: as for `layout`.
        place: returns a tensor in its sharding.
        copy: as for `shard`.
        name: of the module, for messages.

    Returns:
        `module`. Its parameters remain the same objects, see
        `isoshard.torch_bridge.overrides.swap_parameters`.
    """
    named = list(tensors(module))
    shardings = layout(module, mesh, spec, name, warn=True)
    moved: dict[int, Any] = {}
    for key, tensor in named:
        new = place(tensor, shardings[key], copy, key)
        if tensor.grad is not None:
            new.grad = place(tensor.grad, shardings[key], copy, f"{key}.grad")
        moved[id(tensor)] = new
    swap_parameters.replace(
        [(parameter, moved[id(parameter[2])]) for parameter in swap_parameters.parameters(module)]
    )
    for child in module.modules():
        for key, buffer in list(child.named_buffers(recurse=False, remove_duplicate=False)):
            setattr(child, key, moved[id(buffer)])
    return module
