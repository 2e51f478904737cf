"""Placements over a `DeviceMesh` or submesh as shardings; and those of tensors.

A placement per mesh dimension becomes a spec over the axes of the root's mesh; a tensor is
replicated over the axes that are not in a submesh.

>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from torch.distributed.tensor import Replicate, Shard
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> layout((8, 8), mesh["tp"], [Shard(1)]).sharding.spec
P(None, 'tp')
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import axis_names
from isoshard.torch_bridge._torch_internals.dtensor_fields import DTENSOR_SPEC, TENSOR_META
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import (
    DeviceTensor,
    MeshLike,
    Opaque,
    PlacementLike,
)
from isoshard.torch_bridge.engine.compiling.result_meshes import meshes_behind
from isoshard.torch_bridge.engine.recording.tape import Tape, materialize
from isoshard.torch_bridge.engine.values.value import Storage
from isoshard.torch_bridge.layout import marks, view_layouts
from isoshard.torch_bridge.layout.graph_calls import is_traced
from isoshard.torch_bridge.layout.layout_methods import body_of
from isoshard.torch_bridge.placements.translation import placements_of, spec_of
from isoshard.torch_bridge.spmd.manual_recipes import spec_along
from isoshard.torch_bridge.spmd.marking import layout_for, mark_sharding

from .device_mesh import DeviceMesh, device_mesh_of
from .nested_chunks import nested_chunks

Sharding = jax.sharding.NamedSharding


class MeshPlacements(NamedTuple):
    """A layout as placements and as a sharding.

    Args:
        mesh: the mesh or submesh of the placements.
        placements: one per mesh dimension, tensor axes counted from the left.
        sharding: over the root's mesh.
        chunks: sizes of the shards along axes that several mesh dimensions split and that they do
            not divide: those of torch.chunk, applied for each mesh dimension.
        is_open: whether the partitioner chooses the sharding over the axes of the root's mesh that
            are not in `mesh`; `sharding` has what is known. Otherwise it is replicated over them.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    sharding: Sharding
    chunks: marks.Chunks = ()
    is_open: bool = False

    def along(self) -> jax.sharding.PartitionSpec:
        """The sharding of a tensor over the axes of `mesh`; the others are unconstrained."""
        return spec_along(self.sharding.spec, self.mesh.all_axis_names())


def layout(
    shape: Sequence[int], device_mesh: MeshLike, placements: Sequence[Any] | None
) -> MeshPlacements:
    """The layout that placements mean for a shape; axes need not divide.

    Args:
        shape: global.
        device_mesh: a mesh in any form; the current one for None.
        placements: one per mesh dimension; replicated for None.

    Raises:
        ValueError: there are more or fewer placements than mesh dimensions.
        IndexError: a `Shard` names an axis that the tensor does not have.
        NotImplementedError: a placement is `Partial`.
        UnevenError: a `_StridedShard` splits an axis that its mesh dimensions do not divide.
        RuntimeError: no mesh is passed, and none is current.
    """
    mesh = device_mesh_of(device_mesh)
    normal_placements = normalized(placements, mesh, len(shape))
    entries = spec_of(normal_placements, len(shape), mesh.shape)
    spec = tuple(_names(mesh, entry) for entry in entries)
    sharding = layout_for(tuple(shape), mesh.get_jax_mesh(), spec)
    return MeshPlacements(
        mesh, normal_placements, sharding, nested_chunks(shape, entries, mesh.shape)
    )


def normalized(placements: Sequence[Any] | None, mesh: DeviceMesh, ndim: int) -> tuple[Any, ...]:
    """Placements with tensor axes counted from the left; replicated for None.

    Args:
        placements: one per mesh dimension, or None.
        mesh: the mesh.
        ndim: rank of the tensor.

    Raises:
        ValueError: there are more or fewer placements than mesh dimensions.
    """
    from torch.distributed.tensor import Replicate

    if placements is None:
        return (Replicate(),) * mesh.ndim
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{len(placements)} placements {tuple(placements)} for {mesh}, which has {mesh.ndim} "
            "dimensions, and they must have the same length; give one Shard(dim) or Replicate() "
            "per dimension (for one dimension of a mesh, pass mesh['name'])"
        )
    return tuple(with_dim(p, lambda n: n + ndim if -ndim <= n < 0 else n) for p in placements)


def with_dim(placement: PlacementLike, changed: Callable[[int], int]) -> Any:
    """The placement that splits another axis; one that splits none as it is."""
    dim = getattr(placement, "dim", None)
    if dim is None or changed(dim) == dim:
        return placement
    strided = hasattr(placement, "split_factor")
    extra = {"split_factor": placement.split_factor} if strided else {}
    return type(placement)(changed(dim), **extra)


def _names(mesh: DeviceMesh, entry: Any) -> tuple[str, ...] | None:
    if entry is None:
        return None
    dims = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for dim in dims for name in mesh.axis_names(dim))


_PLACEMENTS: weakref.WeakKeyDictionary[Storage, MeshPlacements] = weakref.WeakKeyDictionary()


def remember(tensor: DeviceTensor, mesh_placements: MeshPlacements) -> Any:
    """Record the placements of a tensor, which it then reports; returns the tensor."""
    if is_traced(tensor):
        tensor._placed = mesh_placements
    elif not tensor._chain.ops:
        _PLACEMENTS[tensor._storage] = mesh_placements
        marks.note_chunks(tensor, mesh_placements.chunks)
        if naming.is_torch_xla():  # scripts of torch_xla read mesh axes by number
            written = spec_of(mesh_placements.placements, tensor.dim(), mesh_placements.mesh.shape)
            marks.note_written(tensor, written)
    return tensor


def unknown(tensor: DeviceTensor) -> str:
    """The message for an unknown sharding."""
    return (
        f"a tensor of shape {tuple(tensor.shape)} has no mesh_shape and no partition_spec: it is "
        "on no mesh, or its value is not computed yet and it is not marked. Mark it with "
        "xs.mark_sharding(t, mesh, spec), or execute it with sync()"
    )


@body_of("_spec")
def dtensor_spec(tensor: DeviceTensor, cached: Opaque = None) -> Any:
    """The layout of a tensor as torch's `DTensorSpec`.

    Args:
        tensor: on the `jax` device.
        cached: a previous result; it is returned if it is still valid.

    Raises:
        ValueError: the sharding is unknown.

    >>> import torch
    >>> from isoshard.torch_bridge.distributed.tensor import Shard, distribute_tensor
    >>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
    >>> t = distribute_tensor(torch.ones(8, 2), init_device_mesh("jax", (8,)), [Shard(0)])
    >>> t._spec.placements, t._spec is t._spec
    ((Shard(dim=0),), True)
    """
    mesh_placements = mesh_placements_of(tensor)
    if mesh_placements is None and _is_computed(tensor):
        mesh_placements = mesh_placements_of(tensor)
    if mesh_placements is None:
        raise ValueError(unknown(tensor))
    meta = TENSOR_META.resolve()(tensor.shape, tensor.stride(), tensor.dtype)
    if cached is not None and cached.mesh == mesh_placements.mesh and cached.tensor_meta == meta:
        if cached.placements == mesh_placements.placements:
            return cached
    return DTENSOR_SPEC.resolve()(
        mesh_placements.mesh, mesh_placements.placements, tensor_meta=meta
    )


def mesh_placements_of(tensor: DeviceTensor) -> MeshPlacements | None:
    """The placements of a tensor on the mesh it was placed on, else on its root; or None.

    A view of a slice of a split axis, as `t[:4]`, is reported as gathered along that axis, as
    DTensor gathers it; nothing moves before it is used.
    """
    if is_traced(tensor):
        return getattr(tensor, "_placed", None)
    sharding = view_layouts.sharding_of_view(tensor, gathered=True)
    mesh_placements = None if tensor._chain.ops else _PLACEMENTS.get(tensor._storage)
    if mesh_placements is not None and mesh_placements.is_open:
        if sharding is None:
            return mesh_placements
        updated = mesh_placements._replace(sharding=sharding)
        if mesh_of(sharding) == mesh_of(mesh_placements.sharding) and _same(
            updated.along(), mesh_placements.along()
        ):
            return updated
    if sharding is None:
        return None
    if mesh_placements is not None and mesh_placements.sharding == sharding:
        return mesh_placements
    return MeshPlacements(device_mesh_of(mesh_of(sharding)), placements_of(sharding), sharding)


def over(mesh_placements: MeshPlacements, mesh: DeviceMesh) -> MeshPlacements:
    """A layout restated on another submesh of the same mesh; another mesh changes nothing.

    Args:
        mesh_placements: the layout.
        mesh: the submesh, or the mesh.

    Raises:
        ShardingError: a flattened dimension of the submesh splits two axes of the tensor.

    >>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Replicate, Shard
    >>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
    >>> over(layout((8, 8), mesh, [Shard(0), Shard(1)]), mesh["tp"]).placements
    (Shard(dim=1),)
    """
    if mesh_placements.mesh == mesh or mesh_placements.mesh.root != mesh.root:
        return mesh_placements
    spec = spec_along(mesh_placements.sharding.spec, mesh.all_axis_names())
    by_axis = placements_of(Sharding(mesh.get_jax_mesh(), spec))
    dims_by_axis = [{by_axis[axis] for axis in axes} for axes in mesh.root_axes]
    if any(len(each) > 1 for each in dims_by_axis):
        raise ShardingError(
            f"a tensor sharded as {mesh_placements.placements} on {mesh_placements.mesh} would "
            f"have several placements along a dimension of {mesh}; redistribute it on that "
            "mesh first"
        )
    placements = tuple(each.pop() for each in dims_by_axis)
    return MeshPlacements(mesh, placements, mesh_placements.sharding, is_open=mesh.is_part())


def _same(a: Any, b: Any) -> bool:
    """Whether two specs are equal but for None at the end."""
    pairs = itertools.zip_longest(a, b)
    return all(axis_names(a) == axis_names(b) for a, b in pairs)


_KEYS: dict[Any, int] = {}


@body_of("_layout_key")
def layout_key(tensor: DeviceTensor) -> int:
    """`tensor._layout_key`: equal for equal layouts, or for equal meshes of programs."""
    mesh_placements = mesh_placements_of(tensor) or mesh_of_program(tensor)
    return -1 if mesh_placements is None else _KEYS.setdefault(mesh_placements, len(_KEYS))


@body_of("placements")
def placements_of_tensor(tensor: DeviceTensor) -> tuple[Any, ...] | None:
    """`tensor.placements`."""
    mesh_placements = mesh_placements_of(tensor)
    if mesh_placements is None and _is_computed(tensor):
        mesh_placements = mesh_placements_of(tensor)
    if mesh_placements is None and naming.is_torch_xla():
        raise ValueError(f"placements: {unknown(tensor)}")
    if mesh_placements is not None and naming.is_torch_xla():
        return tensor._spec.placements  # which keeps the layout, as torch_xla's does
    return mesh_placements.placements if mesh_placements else None


@body_of("device_mesh")
def mesh_of_tensor(tensor: DeviceTensor) -> DeviceMesh | None:
    """`tensor.device_mesh`."""
    mesh_placements = mesh_placements_of(tensor)
    if mesh_placements is not None:
        return mesh_placements.mesh
    if is_traced(tensor):
        return None
    if (mesh := mesh_of_program(tensor)) is not None:
        return mesh
    mesh_placements = mesh_placements_of(tensor) if _is_computed(tensor) else None
    return mesh_placements.mesh if mesh_placements else None


def is_placed(tensor: DeviceTensor) -> bool:
    """Whether a tensor is on a mesh, or will be by the program that computes it."""
    if mesh_placements_of(tensor) is not None:
        return True
    return marks.is_recorded(tensor) and mesh_of_program(tensor) is not None


def is_on_no_mesh(tensor: DeviceTensor) -> bool:
    """Whether a tensor is certainly on no mesh, nor computed from one that is."""
    if is_traced(tensor):
        return False
    if not marks.is_recorded(tensor):
        return mesh_placements_of(tensor) is None
    value = tensor._storage.value
    return isinstance(value.tape, Tape) and not meshes_behind(value)


def _is_computed(tensor: DeviceTensor) -> bool:
    """Compute a value whose layout the partitioner chooses, if a program over a mesh can be run.

    It cannot while a step is captured or traced, where nothing has a layout before the end.
    """
    tape = tensor._storage.value.tape
    if naming.is_torch_xla() or not isinstance(tape, Tape) or tape.plans or tape.capture:
        return False
    if not meshes_behind(tensor._storage.value):
        return False
    materialize([tensor._storage.value])
    return True


def mesh_of_program(tensor: DeviceTensor) -> DeviceMesh | None:
    """The single mesh of a tensor's inputs; None if there is not exactly one."""
    meshes = meshes_behind(tensor._storage.value)
    return device_mesh_of(meshes.pop()) if len(meshes) == 1 else None


def mark(tensor: DeviceTensor, mesh_placements: MeshPlacements) -> Any:
    """Mark a tensor with a layout; returns the tensor."""
    sharding = mesh_placements.sharding
    mark_sharding(tensor, mesh_of(sharding), sharding.spec)
    return remember(tensor, mesh_placements)
