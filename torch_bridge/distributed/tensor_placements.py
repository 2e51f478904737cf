"""Placements over a `DeviceMesh`, or a part of one, as layouts; and what a tensor was given.

A placement per mesh dimension becomes a spec over the axes of the root's mesh: what a part of a
mesh does not name stays whole.

>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from torch.distributed.tensor import Replicate, Shard
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> layout((8, 8), mesh["tp"], [Shard(1)]).sharding.spec
P(None, 'tp')
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import torch

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import axis_names
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import Sizes
from isoshard.torch_bridge import naming
from isoshard.torch_bridge._torch_internals.dtensor_fields import DTENSOR_SPEC, TENSOR_META
from isoshard.torch_bridge.argument_types import DeviceTensor, MeshLike, Opaque
from isoshard.torch_bridge.dtensor.translation import placements_of, spec_of
from isoshard.torch_bridge.engine.compiling.result_meshes import meshes_behind
from isoshard.torch_bridge.engine.recording.tape import Tape, materialize
from isoshard.torch_bridge.engine.values.value import Storage
from isoshard.torch_bridge.layout import marks, view_layouts
from isoshard.torch_bridge.layout.graph_calls import is_traced
from isoshard.torch_bridge.layout.method_bodies import body_of
from isoshard.torch_bridge.spmd.marking import layout_for, mark_sharding
from isoshard.torch_bridge.spmd.uneven import laid_out

from .device_mesh import DeviceMesh, device_mesh_of
from .gradient_scale import with_scaled_gradient
from .nested_chunks import nested_chunks

Sharding = jax.sharding.NamedSharding


class MeshPlacements(NamedTuple):
    """A layout in both ways of saying it.

    Args:
        mesh: the mesh, or part of one, that the placements are for.
        placements: one per mesh dimension, tensor axes counted from the left.
        sharding: over the root's mesh.
        chunks: sizes of the pieces along axes that several mesh dimensions split and that they do
            not divide: those of torch.chunk, of each piece again.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    sharding: Sharding
    chunks: marks.Chunks = ()


def layout(
    shape: Sequence[int], device_mesh: MeshLike, placements: Sequence[Any] | None
) -> MeshPlacements:
    """The layout that placements mean for a shape; axes need not divide.

    Args:
        shape: of the whole tensor.
        device_mesh: a mesh in any form; the current one for None.
        placements: one per mesh dimension; whole on every device for None.

    Raises:
        ValueError: there are more or fewer placements than mesh dimensions.
        IndexError: a `Shard` names an axis that the tensor does not have.
        NotImplementedError: a placement is `Partial`.
        UnevenError: a `_StridedShard` splits an axis that its mesh dimensions do not divide.
        RuntimeError: no mesh is given, and none is current.
    """
    mesh = device_mesh_of(device_mesh)
    given = normalized(placements, mesh, len(shape))
    entries = spec_of(given, len(shape), mesh.shape)
    spec = tuple(_names(mesh, entry) for entry in entries)
    sharding = layout_for(tuple(shape), mesh.get_jax_mesh(), spec)
    return MeshPlacements(mesh, given, sharding, nested_chunks(shape, entries, mesh.shape))


def normalized(placements: Sequence[Any] | None, mesh: DeviceMesh, ndim: int) -> tuple[Any, ...]:
    """Placements with tensor axes counted from the left; whole on every device for None.

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
            "dimensions; give one Shard(dim) or Replicate() per dimension (for one dimension of a "
            "mesh, pass mesh['name'])"
        )
    return tuple(_from_left(p, ndim) for p in placements)


def _from_left(placement: Any, ndim: int) -> Any:
    dim = getattr(placement, "dim", 0)
    if not -ndim <= dim < 0:
        return placement
    strided = hasattr(placement, "split_factor")
    extra = {"split_factor": placement.split_factor} if strided else {}
    return type(placement)(dim + ndim, **extra)


def _names(mesh: DeviceMesh, entry: Any) -> tuple[str, ...] | None:
    if entry is None:
        return None
    dims = entry if isinstance(entry, tuple) else (entry,)
    return tuple(name for dim in dims for name in mesh.axis_names(dim))


_GIVEN: weakref.WeakKeyDictionary[Storage, MeshPlacements] = weakref.WeakKeyDictionary()


def remember(tensor: DeviceTensor, laid: MeshPlacements) -> Any:
    """Note what a tensor was laid out by, so that it says the same; returns the tensor."""
    if is_traced(tensor):
        tensor._laid = laid
    elif not tensor._chain.ops:
        _GIVEN[tensor._storage] = laid
        marks.note_chunks(tensor, laid.chunks)
        if naming.is_torch_xla():  # scripts of torch_xla read mesh axes by number
            written = spec_of(laid.placements, tensor.dim(), laid.mesh.shape)
            marks.note_written(tensor, written)
    return tensor


def unknown(tensor: DeviceTensor) -> str:
    """The message for a layout that nobody can tell yet."""
    return (
        f"a tensor of shape {tuple(tensor.shape)} has no mesh_shape and no partition_spec: it is "
        "on no mesh, or its value is not computed yet and nobody marked it. Mark it with "
        "xs.mark_sharding(t, mesh, spec), or execute it with sync()"
    )


@body_of("_spec")
def dtensor_spec(tensor: DeviceTensor, cached: Opaque = None) -> Any:
    """The layout of a tensor as torch's `DTensorSpec`.

    Args:
        tensor: on the `jax` device.
        cached: one made before; it is the result if it still says how the tensor lies.

    Raises:
        ValueError: the layout is not known.

    >>> from isoshard.torch_bridge.distributed.tensor import Shard, distribute_tensor
    >>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
    >>> t = distribute_tensor(torch.ones(8, 2), init_device_mesh("jax", (8,)), [Shard(0)])
    >>> t._spec.placements, t._spec is t._spec
    ((Shard(dim=0),), True)
    """
    laid = found(tensor)
    if laid is None and _is_computed(tensor):
        laid = found(tensor)
    if laid is None:
        raise ValueError(unknown(tensor))
    meta = TENSOR_META.found()(tensor.shape, tensor.stride(), tensor.dtype)
    if cached is not None and cached.mesh == laid.mesh and cached.tensor_meta == meta:
        if cached.placements == laid.placements:
            return cached
    return DTENSOR_SPEC.found()(laid.mesh, laid.placements, tensor_meta=meta)


def found(tensor: DeviceTensor) -> MeshPlacements | None:
    """The layout of a tensor by the mesh it was given, else by the whole mesh; None if unknown.

    A view that shows a part of a split axis, as `t[:4]`, is gathered along that axis, as DTensor
    gathers it; nothing moves before somebody uses it.
    """
    if is_traced(tensor):
        return getattr(tensor, "_laid", None)
    asked = view_layouts.sharding_of_view(tensor, gathered=True)
    if asked is None:
        return None
    laid = None if tensor._chain.ops else _GIVEN.get(tensor._storage)
    if laid is not None and laid.sharding == asked:
        return laid
    return MeshPlacements(device_mesh_of(mesh_of(asked)), placements_of(asked), asked)


_KEYS: dict[Any, int] = {}


@body_of("_layout_key")
def layout_key(tensor: DeviceTensor) -> int:
    """What `tensor._layout_key` is: equal for equal layouts, or for equal meshes of programs."""
    said = found(tensor) or mesh_of_program(tensor)
    return -1 if said is None else _KEYS.setdefault(said, len(_KEYS))


@body_of("placements")
def placements_of_tensor(tensor: DeviceTensor) -> tuple[Any, ...] | None:
    """What `tensor.placements` is."""
    laid = found(tensor)
    if laid is None and _is_computed(tensor):
        laid = found(tensor)
    if laid is None and naming.is_torch_xla():
        raise ValueError(f"placements: {unknown(tensor)}")
    if laid is not None and naming.is_torch_xla():
        return tensor._spec.placements  # which keeps the layout, as torch_xla's does
    return laid.placements if laid else None


@body_of("device_mesh")
def mesh_of_tensor(tensor: DeviceTensor) -> DeviceMesh | None:
    """What `tensor.device_mesh` is."""
    laid = found(tensor)
    if laid is not None:
        return laid.mesh
    if is_traced(tensor):
        return None
    if (mesh := mesh_of_program(tensor)) is not None:
        return mesh
    laid = found(tensor) if _is_computed(tensor) else None
    return laid.mesh if laid else None


def is_placed(tensor: DeviceTensor) -> bool:
    """Whether a tensor lies on a mesh, or will by the program that computes it."""
    if found(tensor) is not None:
        return True
    return marks.is_recorded(tensor) and mesh_of_program(tensor) is not None


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
    """The only mesh that what a tensor is made of lies on; None if it is not one."""
    meshes = meshes_behind(tensor._storage.value)
    return device_mesh_of(meshes.pop()) if len(meshes) == 1 else None


def mark(tensor: DeviceTensor, laid: MeshPlacements) -> Any:
    """Lay a tensor's own memory out; returns the tensor."""
    mark_sharding(tensor, mesh_of(laid.sharding), laid.sharding.spec)
    return remember(tensor, laid)


def moved(
    tensor: DeviceTensor,
    laid: MeshPlacements,
    back: Sharding | None = None,
    dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> Any:
    """The same elements in another layout, as a new tensor; twice differentiable.

    Args:
        tensor: on the `jax` device; it stays as it is.
        laid: the layout.
        back: that of the gradient; if not given, the one `tensor` has, if over the same devices.
        dtype: what to cast to before anything moves.
        gradient_dtype: what the gradient is cast to before it moves.
    """
    traced = is_traced(tensor)
    have = (found(tensor) or laid).sharding if traced else marks.asked(tensor)
    sizes = None if traced else _kept_blocks(tensor, laid)
    if sizes is not None and back is None and gradient_dtype in (None, tensor.dtype):
        cast = dtype not in (None, tensor.dtype)
        if _is_laid(tensor, laid):
            return tensor.to(dtype) if cast else tensor.view_as(tensor)
        kept = tensor.to(dtype) if cast else tensor.clone()
        mark_sharding(kept, mesh_of(laid.sharding), laid.sharding.spec, sizes=sizes)
        return remember(kept, laid)
    result: Any = _Moved.apply(
        tensor,
        laid.sharding,
        back or _same_devices(have, laid.sharding),
        dtype or tensor.dtype,
        gradient_dtype or tensor.dtype,
    )
    return remember(result, laid)


@body_of("redistribute")
def redistributed(
    tensor: DeviceTensor,
    device_mesh: MeshLike,
    placements: Sequence[Any] | None,
    dtype: torch.dtype | None,
    gradient_dtype: torch.dtype | None,
) -> Any:
    """What `tensor.redistribute(..)` gives: see there, and `moved`."""
    if placements is None:
        raise RuntimeError(
            "redistribute needs placements: t.redistribute(mesh, [Shard(0)]), or "
            "t.redistribute(placements=[Shard(0)]) over its own mesh"
        )
    if any(getattr(placement, "is_partial", bool)() for placement in placements):
        raise NotImplementedError(
            f"Can not redistribute to Partial, as {[*placements]} asks: a tensor here is seen as a "
            "whole, so sums over devices are taken already. Use Shard(dim) or Replicate()."
        )
    if device_mesh is None:
        device_mesh = mesh_of_tensor(tensor)
    laid = layout(tuple(tensor.shape), device_mesh, placements)
    return moved(tensor, laid, None, dtype, gradient_dtype)


@body_of("full_tensor")
def full_tensor(tensor: DeviceTensor) -> Callable[..., Any]:
    """What `tensor.full_tensor` is."""
    mesh = mesh_of_tensor(tensor)
    if mesh is None:
        raise AttributeError(
            f"a tensor of shape {tuple(tensor.shape)} on no mesh has no full_tensor(): it is "
            "whole. Lay it out with isoshard.shard(t, mesh, spec) or xs.mark_sharding"
        )
    return functools.partial(gathered, tensor, mesh)


def gathered(
    tensor: DeviceTensor, mesh: DeviceMesh, *, grad_placements: Sequence[Any] | None = None
) -> Any:
    """The same elements whole on every device of a mesh, as a new tensor; twice differentiable.

    Args:
        tensor: on the `jax` device.
        mesh: the mesh.
        grad_placements: the layout of the gradient as it comes back; that of `tensor` if not given.
            Where it is `Partial()`, each device's copy has the gradient that comes back, and the
            tensor gets their sum.
    """
    shape, back, times = tuple(tensor.shape), None, 1
    if grad_placements is not None:
        wanted = normalized(grad_placements, mesh, len(shape))
        sums = [dim for dim, placement in enumerate(wanted) if _is_sum(placement)]
        times = math.prod(mesh.size(dim) for dim in sums)
        back = None if sums else layout(shape, mesh, wanted).sharding
    whole = moved(tensor, layout(shape, mesh, None), back)
    return with_scaled_gradient(whole, times) if times > 1 else whole


def _is_sum(placement: Any) -> bool:
    return placement.is_partial() and placement.reduce_op == "sum"


def _kept_blocks(tensor: Any, laid: MeshPlacements) -> Sizes | None:
    """The blocks of the axes that a layout splits as before; None without any."""
    sizes, have = tensor.block_sizes, marks.asked(tensor)
    if sizes is None or have is None or mesh_of(have) != mesh_of(laid.sharding):
        return None
    before, after = _names_of(have, len(sizes)), _names_of(laid.sharding, len(sizes))
    kept = zip(sizes, before, after, strict=True)
    found = tuple(own if names and names == wanted else None for own, names, wanted in kept)
    return found if any(found) else None


def _is_laid(tensor: Any, laid: MeshPlacements) -> bool:
    """Whether a tensor is split as a layout over its mesh says, in whatever blocks."""
    count = tensor.dim()
    return _names_of(marks.asked(tensor), count) == _names_of(laid.sharding, count)


def _names_of(sharding: Any, count: int) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis."""
    names = [axis_names(entry) for entry in entries_of(sharding.spec)]
    return names + [()] * (count - len(names))


def _same_devices(have: Sharding | None, want: Sharding) -> Sharding:
    if have is None or list(mesh_of(have).devices.flat) != list(mesh_of(want).devices.flat):
        return want
    return have


class _Moved(torch.autograd.Function):
    """`apply(tensor, sharding, that of the gradient, dtype, dtype while the gradient moves)`."""

    @staticmethod
    def forward(ctx: Any, t: Any, there: Any, back: Any, dtype: Any, gradient_dtype: Any) -> Any:
        ctx.how = t.dtype, there, back, dtype, gradient_dtype
        return laid_out(t.to(dtype), there)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        dtype, there, back, moved_in, gradient_dtype = ctx.how
        moved: Any = _Moved.apply(gradient[0], back, there, gradient_dtype, moved_in)
        return moved.to(dtype), None, None, None, None
