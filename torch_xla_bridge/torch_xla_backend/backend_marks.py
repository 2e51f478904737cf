"""Layouts of torch_xla's tensors: written from our specs, and read back as one NamedSharding."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.kit import (
    ShardingError,
    SpecError,
    Tiles,
    UnrepresentableError,
    make_mesh,
    mesh_of,
    named_sharding,
    or_absent,
    parse_op_sharding,
)
from isoshard.core.kit import spec_axis_names as axis_names
from isoshard.torch_bridge.kit import WeakTensorKeyDictionary

from .anonymous import by_itself
from .backend_mesh import any_mesh, device_by_id, device_ids, mesh_from_torch_xla, mesh_to_torch_xla
from .real import execute, is_spmd, load, plain

_meshes: Any = or_absent(WeakTensorKeyDictionary)  # of the tensors that we marked


def mark(tensor: torch.Tensor, mesh: Any, spec: Any = None) -> torch.Tensor:
    """Annotate a tensor of torch_xla.

    Args:
        tensor: on torch_xla's device, SPMD switched on (`torch_xla.runtime.use_spmd()`).
        mesh: a `jax.sharding.Mesh` or one of torch_xla, over all devices; or a `NamedSharding`,
            which is mesh and spec in one.
        spec: every spelling that `isoshard.shard` takes; None for replicated.

    Returns:
        `tensor` itself.

    Raises:
        SpecError: the spec does not fit mesh or rank, or there is one beside a NamedSharding.
        UnevenError: an axis does not divide. (torch_xla would pad; JAX has no such layout.)
        ShardingError: the tensor is not torch_xla's, or is annotated otherwise already; SPMD is
            off.
        DeviceError: the mesh is not over all of torch_xla's devices.
    """
    bare = plain(tensor)
    if not is_spmd():
        raise ShardingError(
            "torch_xla shards nothing before SPMD is switched on: call "
            "torch_xla.runtime.use_spmd() at the start of the program."
        )
    sharding = _sharding(tensor, mesh, spec)
    mesh = mesh_of(sharding)
    theirs = mesh_to_torch_xla(mesh)
    present = annotation(bare)
    if present not in ("", "{replicated}"):
        current, target = _tiles(present, tensor), _target_tiles(sharding, tensor.dim())
        if current != target:
            raise ShardingError(
                f"a tensor of shape {tuple(tensor.shape)} is annotated {present} already and "
                f"cannot be marked {sharding.spec} as well; call "
                "torch_xla.distributed.spmd.clear_sharding(tensor) first"
            )
    else:
        entries = _entries(sharding, tensor.dim())
        load("torch_xla.distributed.spmd").mark_sharding(tensor, theirs, entries)
    _meshes[tensor] = mesh
    return tensor


def sharding_of(tensor: torch.Tensor, mesh: Any = None) -> NamedSharding:
    """Read the layout of a tensor of torch_xla.

    What an operation made has its layout from torch_xla's partitioner, so it is executed first.

    Args:
        tensor: on torch_xla's device.
        mesh: the mesh to name the layout by, of JAX or torch_xla. By default the one it was marked
            with here, else torch_xla's global mesh; where neither has a spec for it, one made for
            the layout, with an axis for each tensor axis that is split (`"dim0"`, ..) and
            `"replica"`.

    Returns:
        The layout. Without SPMD: whole, on the one device of the tensor.

    Raises:
        UnrepresentableError: the layout has no spec over the mesh given, or is none (manual).
        ShardingError: the tensor is not torch_xla's.
        DeviceError: JAX has fewer devices than torch_xla.
    """
    bare = plain(tensor)
    if not is_spmd():
        device = device_by_id(bare.device.index or 0)
        return NamedSharding(make_mesh((1,), ("device",), devices=[device]), P())
    text = annotation(bare)
    if not text:
        execute(bare)
        text = annotation(bare) or "{replicated}"
    tiles = _tiles(text, tensor)
    if mesh is not None:
        return _over(any_mesh(mesh), tiles)
    for candidate in _candidate_meshes(tensor):
        with contextlib.suppress(UnrepresentableError):
            return _over(candidate, tiles)
    return by_itself(tiles)


def annotation(bare: torch.Tensor) -> str:
    """The OpSharding string that torch_xla has for a tensor; empty if none."""
    return load("torch_xla.distributed.spmd").XLAShardedTensor(bare).sharding_spec


def _entries(sharding: NamedSharding, ndim: int) -> tuple[Any, ...]:
    """A layout in torch_xla's words: an entry for every axis, mesh axes by their index.

    By index, as torch_xla's `placements` are wrong for names.
    """
    axis_ids = {name: index for index, name in enumerate(sharding.mesh.axis_names)}
    groups = [tuple(axis_ids[name] for name in axis_names(entry)) for entry in sharding.spec]
    entries = [group if len(group) > 1 else group[0] if group else None for group in groups]
    return (*entries, *(None,) * (ndim - len(entries)))


def _sharding(tensor: torch.Tensor, mesh: Any, spec: Any) -> NamedSharding:
    if isinstance(mesh, NamedSharding):
        if spec is not None:
            raise SpecError(
                f"a NamedSharding has its own spec, {mesh.spec}, and the spec {spec} was passed as "
                "well. Pass the NamedSharding alone, or a mesh and the spec."
            )
        mesh, spec = mesh_of(mesh), mesh
    else:
        mesh = any_mesh(mesh)
    return named_sharding(spec, mesh, tensor.dim(), shape=tuple(tensor.shape))


def _candidate_meshes(tensor: torch.Tensor) -> Iterator[Mesh]:
    if tensor in _meshes:
        yield _meshes[tensor]
    theirs = load("torch_xla.distributed.spmd").get_global_mesh()
    if theirs is not None:
        yield mesh_from_torch_xla(theirs)


def _over(mesh: Mesh, tiles: Tiles) -> NamedSharding:
    """Name a layout over torch_xla's device numbers by a mesh."""
    if mesh.size == tiles.num_devices:
        position = np.argsort(device_ids(mesh))  # of each number in the mesh
        tiles = Tiles(position[tiles.grid], tiles.num_devices)
    return named_sharding(tiles.to_spec(mesh), mesh, tiles.ndim)


def _tiles(text: str, tensor: torch.Tensor) -> Tiles:
    """A layout over torch_xla's device numbers."""
    count = load("torch_xla.runtime").global_runtime_device_count()
    return parse_op_sharding(text, tensor.dim(), num_devices=count)


def _target_tiles(sharding: NamedSharding, ndim: int) -> Tiles:
    tiles = Tiles.from_sharding(sharding, ndim)
    return Tiles(np.array(device_ids(mesh_of(sharding)))[tiles.grid])
