"""A tensor in another layout: `redistribute` and `full_tensor`.

>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import Replicate, Shard, distribute_tensor
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> t = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0), Replicate()])
>>> t.redistribute(placements=[Shard(0), Shard(1)]).placements
(Shard(dim=0), Shard(dim=1))
>>> t.full_tensor().placements
(Replicate(), Replicate())
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import axis_names
from isoshard.core.layout.spec_entries import entries_of
from isoshard.core.layout.uneven import Sizes
from isoshard.torch_bridge.common.argument_types import DeviceTensor, MeshLike
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.layout.graph_calls import is_traced
from isoshard.torch_bridge.layout.method_bodies import body_of
from isoshard.torch_bridge.spmd.manual_recipes import spec_along
from isoshard.torch_bridge.spmd.marking import mark_sharding
from isoshard.torch_bridge.spmd.uneven import laid_out

from .along import AlongAxes, constrain_over_axes
from .device_mesh import DeviceMesh
from .gradient_scale import with_scaled_gradient
from .tensor_placements import (
    MeshPlacements,
    layout,
    mesh_of_tensor,
    mesh_placements_of,
    normalized,
    remember,
)

Sharding = jax.sharding.NamedSharding


def moved(
    tensor: DeviceTensor,
    mesh_placements: MeshPlacements,
    back: Sharding | None = None,
    dtype: torch.dtype | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> Any:
    """The same elements in another layout, as a new tensor; twice differentiable.

    Args:
        tensor: on the `jax` device; it is not modified.
        mesh_placements: the layout.
        back: that of the gradient; by default that of `tensor`, if over the same devices.
        dtype: what to cast to before anything moves.
        gradient_dtype: what the gradient is cast to before it moves.
    """
    traced = is_traced(tensor)
    have = (
        (mesh_placements_of(tensor) or mesh_placements).sharding if traced else marks.asked(tensor)
    )
    sizes = None if traced else _kept_blocks(tensor, mesh_placements)
    if sizes is not None and back is None and gradient_dtype in (None, tensor.dtype):
        cast = dtype not in (None, tensor.dtype)
        if _is_sharded_as(tensor, mesh_placements):
            return tensor.to(dtype) if cast else tensor.view_as(tensor)
        unmoved = tensor.to(dtype) if cast else tensor.clone()
        mark_sharding(
            unmoved, mesh_of(mesh_placements.sharding), mesh_placements.sharding.spec, sizes=sizes
        )
        return remember(unmoved, mesh_placements)
    there, source = mesh_placements.sharding, back or _same_devices(have, mesh_placements.sharding)
    result: Any = _Moved.apply(
        tensor,
        _along(there, mesh_placements) if mesh_placements.is_open else there,
        _along(source, mesh_placements) if mesh_placements.is_open else source,
        dtype or tensor.dtype,
        gradient_dtype or tensor.dtype,
    )
    return remember(result, mesh_placements)


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
            f"Can not redistribute to Partial, as {[*placements]} requires: a tensor on the jax "
            "device is global, so sums over devices are reduced already. Use Shard(dim) "
            "or Replicate()."
        )
    if device_mesh is None:
        device_mesh = mesh_of_tensor(tensor)
    mesh_placements = _opened(tensor, layout(tuple(tensor.shape), device_mesh, placements))
    return moved(tensor, mesh_placements, None, dtype, gradient_dtype)


def _opened(tensor: DeviceTensor, mesh_placements: MeshPlacements) -> MeshPlacements:
    """A layout over a tensor's submesh; the other axes of the mesh are unconstrained."""
    own = mesh_placements_of(tensor)
    return mesh_placements._replace(
        is_open=own is not None and own.is_open and own.mesh == mesh_placements.mesh
    )


@body_of("full_tensor")
def full_tensor(tensor: DeviceTensor) -> Callable[..., Any]:
    """What `tensor.full_tensor` is."""
    mesh = mesh_of_tensor(tensor)
    if mesh is None:
        raise AttributeError(
            f"a tensor of shape {tuple(tensor.shape)} on no mesh has no full_tensor(): it is "
            "replicated. Shard it with isoshard.shard(t, mesh, spec) or xs.mark_sharding"
        )
    return functools.partial(gathered, tensor, mesh)


def gathered(
    tensor: DeviceTensor, mesh: DeviceMesh, *, grad_placements: Sequence[Any] | None = None
) -> Any:
    """The tensor replicated over a mesh, as a new tensor; twice differentiable.

    Args:
        tensor: on the `jax` device.
        mesh: the mesh.
        grad_placements: of the gradient; by default those of `tensor`.
            Where it is `Partial()`, each device's copy has the gradient that comes back, and the
            tensor gets their sum.
    """
    shape, back, times = tuple(tensor.shape), None, 1
    if grad_placements is not None:
        grads = normalized(grad_placements, mesh, len(shape))
        sums = [dim for dim, placement in enumerate(grads) if _is_sum(placement)]
        times = math.prod(mesh.size(dim) for dim in sums)
        back = None if sums else layout(shape, mesh, grads).sharding
    full = moved(tensor, _opened(tensor, layout(shape, mesh, None)), back)
    return with_scaled_gradient(full, times) if times > 1 else full


def _is_sum(placement: Any) -> bool:
    return placement.is_partial() and placement.reduce_op == "sum"


def _kept_blocks(tensor: Any, mesh_placements: MeshPlacements) -> Sizes | None:
    """The blocks of the axes that a layout splits as before; None without any."""
    sizes, have = tensor.block_sizes, marks.asked(tensor)
    if sizes is None or have is None or mesh_of(have) != mesh_of(mesh_placements.sharding):
        return None
    before, after = _names_of(have, len(sizes)), _names_of(mesh_placements.sharding, len(sizes))
    kept = zip(sizes, before, after, strict=True)
    block_sizes = tuple(
        own if names and names == target_names else None for own, names, target_names in kept
    )
    return block_sizes if any(block_sizes) else None


def _is_sharded_as(tensor: Any, mesh_placements: MeshPlacements) -> bool:
    """Whether a tensor is split as a layout over its mesh says, in whatever blocks."""
    count = tensor.dim()
    return _names_of(marks.asked(tensor), count) == _names_of(mesh_placements.sharding, count)


def _names_of(sharding: Any, count: int) -> list[tuple[str, ...]]:
    """The mesh axes that split each axis."""
    names = [axis_names(entry) for entry in entries_of(sharding.spec)]
    return names + [()] * (count - len(names))


def _same_devices(have: Sharding | None, want: Sharding) -> Sharding:
    if have is None or list(mesh_of(have).devices.flat) != list(mesh_of(want).devices.flat):
        return want
    return have


def _along(sharding: Sharding, mesh_placements: MeshPlacements) -> AlongAxes:
    """A sharding restricted to the submesh of a layout."""
    names = mesh_placements.mesh.all_axis_names()
    return AlongAxes(mesh_of(mesh_placements.sharding), names, spec_along(sharding.spec, names))


class _Moved(torch.autograd.Function):
    """`apply(tensor, sharding, that of the gradient, dtype, dtype while the gradient moves)`."""

    @staticmethod
    def forward(ctx: Any, t: Any, there: Any, back: Any, dtype: Any, gradient_dtype: Any) -> Any:
        ctx.how = t.dtype, there, back, dtype, gradient_dtype
        if isinstance(there, AlongAxes):
            return constrain_over_axes(t.to(dtype), there)
        return laid_out(t.to(dtype), there)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        dtype, there, back, moved_in, gradient_dtype = ctx.how
        moved: Any = _Moved.apply(gradient[0], back, there, gradient_dtype, moved_in)
        return moved.to(dtype), None, None, None, None
