"""DTensor's words for a layout and JAX's: placements per mesh axis, a spec per tensor axis.

>>> import torch
>>> from torch.distributed.device_mesh import DeviceMesh
>>> from torch.distributed.tensor import Partial, Replicate, Shard
>>> mesh = DeviceMesh("xla", torch.arange(8).reshape(2, 4), mesh_dim_names=("dp", "tp"))
>>> layout_of((Shard(0), Shard(1)), mesh, (4, 8)).sharding.spec
P('dp', 'tp')
>>> layout_of((Replicate(), Shard(0)), mesh, (5, 8)).sizes          # blocks as torch.chunk's
((2, 2, 1, 0), None)
>>> layout_of((Shard(0), Partial()), mesh, (4, 8)).sharding.spec.unreduced    # sums to be taken
frozenset({'tp'})

Where several mesh axes split one tensor axis, `Shard` takes them from the left. In another order
DTensor writes `_StridedShard`, whose split factor is the number of parts that mesh axes further
right have made before; every order of a spec is one of placements:

>>> placements = placements_of(NamedSharding(jax_mesh(mesh), P(("tp", "dp"))))
>>> placements
(_StridedShard(dim=0, sf=4), Shard(dim=0))
>>> spec_of(placements, 2, (2, 4))
((1, 0), None)

The rank `r` of a torch mesh is the one device of JAX's process `r`; where one process drives all
devices, it is `jax.devices()[r]`. Of torch's private names only `_StridedShard` is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.errors import UnrepresentableError
from isoshard.core.layout.axis_types import same_grid
from isoshard.core.layout.mesh import as_mesh, mesh_of
from isoshard.core.layout.partial_sums import open_spec, reduction, stored, unreduced
from isoshard.core.layout.spec import axis_names, named_sharding
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.tiles import Tiles
from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge._torch_internals.dtensor_fields import STRIDED_SHARD
from isoshard.torch_bridge.common.argument_types import MeshLike

from .chunked_axes import block_sizes
from .chunked_axes import local_shape_and_offset as local_shape_and_offset
from .meshes import device_mesh_of as device_mesh_of
from .meshes import jax_mesh, of_type
from .meshes import rank_mesh_of as rank_mesh_of
from .placement_kinds import kind_of, orders_of, reduction_of

Entry = int | tuple[int, ...] | None


def spec_of(
    placements: Sequence[Any], ndim: int, mesh_shape: Sequence[int] | None = None
) -> tuple[Entry, ...]:
    """The partition spec, by mesh axis indices, of placements.

    Args:
        placements: one `Shard`, `_StridedShard` or `Replicate` per mesh axis.
        ndim: rank of the tensor; a negative dimension counts from its end.
        mesh_shape: devices along each mesh axis; needed where there is a `_StridedShard`.

    Returns:
        One entry per tensor axis: None, a mesh axis, or several, outermost first.

    Raises:
        IndexError: a dimension is out of range.
        NotImplementedError: a placement is `Partial`: sums that were not taken yet, which a tensor
            global never is.
        SpecError: a placement is none of torch's, or there are several for one mesh axis.
        UnrepresentableError: a split factor is that of no order of the mesh axes.
        ValueError: there are more or fewer placements than mesh axes.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> spec_of((Shard(0), Shard(0), Replicate()), 2)
        ((0, 1), None)
    """
    for axis, placement in enumerate(placements):
        if kind_of(axis, placement) == "Partial":
            raise NotImplementedError(
                f"mesh axis {axis} has the placement {placement!r}, which is not supported: a "
                "tensor here is global, so sums over devices are reduced already. Use "
                "Shard(dim) or Replicate()."
            )
    orders = orders_of(placements, ndim, mesh_shape)
    return tuple(
        tuple(order) if len(order) > 1 else order[0] if order else None for order in orders
    )


@cached(8192)
def placements_of(sharding: NamedSharding) -> tuple[Any, ...]:
    """The placements of a layout, one per mesh axis. Cached.

    Args:
        sharding: the layout. A `reduced` axis is one whose gradient is partial, and reads as
            `Replicate`.

    Returns:
        `Shard`, `_StridedShard`, `Replicate`, or `Partial` for an unreduced axis, with the op that
        reduces it.

    Raises:
        UnrepresentableError: an entry is UNCONSTRAINED, or the sharding is no NamedSharding.
    """
    from torch.distributed.tensor import Partial, Replicate

    _check_named(sharding)
    names = sharding.mesh.axis_names
    sizes = [sharding.mesh.shape[name] for name in names]
    placements: list[Any] = [Replicate() for _ in names]
    for name in unreduced(sharding):
        placements[names.index(name)] = Partial(reduction(sharding))
    for dim, entry in enumerate(entries_of(sharding.spec)):
        if entry is P.UNCONSTRAINED:
            raise UnrepresentableError(
                f"{sharding.spec} leaves tensor axis {dim} open (UNCONSTRAINED), and a placement "
                "describes where data is; use the array's own sharding"
            )
        order = [names.index(name) for name in axis_names(entry)]
        for at, axis in enumerate(order):
            before = [sizes[other] for other in order[:at] if other > axis]
            placements[axis] = _shard(dim, math.prod(before))
    return tuple(placements)


@cached(8192)
def placements_on(sharding: NamedSharding, device_mesh: MeshLike, ndim: int) -> tuple[Any, ...]:
    """The placements of a layout over another mesh of the same devices. Cached.

    Args:
        sharding: the layout, over a mesh of any shape and order.
        device_mesh: the mesh the placements are for, in any form that `jax_mesh` takes.
        ndim: rank of the tensor.

    Returns:
        One placement per axis of `device_mesh`.

    Raises:
        UnrepresentableError: the devices are others, or no placements over that mesh give every
            device the block it has.

    Example:
        >>> import torch
        >>> from torch.distributed.device_mesh import DeviceMesh
        >>> from isoshard.core.layout.mesh import make_mesh
        >>> rows = NamedSharding(make_mesh((8,), ("x",)), P("x"))
        >>> placements_on(rows, DeviceMesh("xla", torch.arange(8).reshape(2, 4)), 1)
        (Shard(dim=0), Shard(dim=0))
    """
    _check_named(sharding)
    ours, theirs = mesh_of(sharding), jax_mesh(device_mesh)
    if same_grid(ours, theirs):
        return placements_of(sharding)
    if set(ours.devices.flat) != set(theirs.devices.flat):
        raise UnrepresentableError(
            f"the layout {sharding.spec} is on devices {_ids(ours)}, and the requested mesh has "
            f"{_ids(theirs)}: placements move nothing. Reshard onto that mesh first: "
            "iso.reshard(x, mesh, spec)."
        )
    position = {device: at for at, device in enumerate(theirs.devices.flat)}
    renamed = np.array([position[device] for device in ours.devices.flat])
    spec = Tiles(renamed[Tiles.from_sharding(stored(sharding), ndim).grid]).to_spec(theirs)
    partial = _partial_axes(sharding, renamed, theirs)
    return placements_of(_named(spec, theirs, partial, ndim, reduction(sharding)))


def layout_of(
    placements: Sequence[Any], device_mesh: MeshLike, shape: Sequence[int]
) -> BlockLayout:
    """A DTensor's layout as a sharding of a physical array. Cached.

    Args:
        placements: one per mesh axis. `Partial("sum")` makes the axis unreduced, which JAX has on
            Explicit meshes only: the sharding's mesh is Explicit then, and Auto otherwise. From
            JAX 0.12 on so do `Partial("max")` and `Partial("min")`.
        device_mesh: torch's mesh.
        shape: the tensor's true global shape.

    Returns:
        The sharding and shape of the physical array, the true shape, and the valid sizes of blocks
        where an axis does not divide.

    Raises:
        UnrepresentableError: JAX has no such `Partial`, several differ, a split factor is that of
            no order of mesh axes, or uneven strided blocks are not consecutive.
        IndexError, SpecError, ValueError: as `spec_of`.

    Example:
        >>> import torch
        >>> from torch.distributed.device_mesh import DeviceMesh
        >>> from torch.distributed.tensor import Shard
        >>> mesh = DeviceMesh("xla", torch.arange(4).reshape(2, 2))
        >>> layout = layout_of((Shard(0), Shard(0)), mesh, (5,))
        >>> layout.sizes, layout.padded
        (((2, 1, 1, 1),), (8,))
    """
    return _layout(tuple(placements), device_mesh, tuple(shape))


@cached(8192)
def _layout(placements: tuple[Any, ...], device_mesh: Any, shape: tuple[int, ...]) -> BlockLayout:
    mesh = jax_mesh(device_mesh)
    check_count(placements, mesh)
    kinds = [kind_of(axis, placement) for axis, placement in enumerate(placements)]
    partial = [axis for axis, kind in enumerate(kinds) if kind == "Partial"]
    by = reduction_of({mesh.axis_names[axis]: placements[axis] for axis in partial})
    orders = orders_of(placements, len(shape), mesh.axis_sizes)
    sizes = tuple(
        block_sizes(dim, extent, order, placements, mesh)
        for dim, (extent, order) in enumerate(zip(shape, orders, strict=True))
    )
    padded = tuple(
        extent if size is None else max(size) * len(size)
        for extent, size in zip(shape, sizes, strict=True)
    )
    entries = [tuple(mesh.axis_names[axis] for axis in order) for order in orders]
    while entries and not entries[-1]:
        entries.pop()
    spec = P(*(names[0] if len(names) == 1 else names or None for names in entries))
    names = [mesh.axis_names[axis] for axis in partial]
    return BlockLayout(_named(spec, mesh, names, len(shape), by), shape, padded, sizes)


def check_count(placements: Sequence[Any], mesh: MeshLike) -> None:
    """Raise ValueError unless there is one placement per mesh axis."""
    names = as_mesh(mesh).axis_names
    if len(placements) != len(names):
        raise ValueError(
            f"{len(placements)} placements for a mesh of {len(names)} axes {names}; give one "
            "Shard(dim) or Replicate() per mesh axis"
        )


def _check_named(sharding: Any) -> None:
    if not isinstance(sharding, NamedSharding):
        raise UnrepresentableError(
            f"a {type(sharding).__name__} names no mesh axes, and placements are for "
            "each; reshard the array with iso.reshard(x, mesh, spec) first"
        )


def _named(
    spec: P, mesh: Mesh, partial: Iterable[str], ndim: int, by: str = "sum"
) -> NamedSharding:
    """The sharding of a canonical spec whose values are still to be reduced over axes `partial`."""
    if not (names := frozenset(partial)):
        return named_sharding(spec, mesh, ndim)
    spec = open_spec(entries_of(spec), names, by)
    return NamedSharding(of_type(mesh, AxisType.Explicit), spec)


def _partial_axes(sharding: NamedSharding, renamed: np.ndarray, theirs: Mesh) -> list[str]:
    """The axes of another mesh along which the same sums are to be taken."""
    names, ours = unreduced(sharding), mesh_of(sharding)
    if math.prod(ours.shape[name] for name in names) == 1:
        return []
    group_of = np.empty(ours.size, np.int64)
    group_of[renamed] = _groups(ours, names).ravel()
    group_of = group_of.reshape(theirs.devices.shape)
    axes = []
    for axis, name in enumerate(theirs.axis_names):
        step = (0,) * axis + (slice(None),) + (0,) * (group_of.ndim - axis - 1)
        if theirs.shape[name] > 1 and group_of[step][1] == group_of[step][0]:
            axes.append(name)
    if _partition(group_of) != _partition(_groups(theirs, axes)):
        raise UnrepresentableError(
            f"{sharding.spec} sums over groups of devices that are no axes of the mesh "
            f"{dict(theirs.shape)}; reduce it first: iso.to_dtensor(jax.sharding.reshard(x, P()))"
        )
    return axes


def _groups(mesh: Mesh, names: Iterable[str]) -> np.ndarray:
    """A group id per device of a mesh, equal along the named axes."""
    shape = [1 if name in names else size for name, size in mesh.shape.items()]
    return np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), mesh.devices.shape)


def _partition(group_of: np.ndarray) -> set[frozenset[int]]:
    """The sets of devices that share a group id."""
    flat = group_of.ravel()
    return {frozenset(np.flatnonzero(flat == group).tolist()) for group in np.unique(flat)}


def _ids(mesh: Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


def _shard(dim: int, factor: int) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(dim) if factor == 1 else STRIDED_SHARD.resolve()(dim, split_factor=factor)
