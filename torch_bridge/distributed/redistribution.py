"""`redistribute` and `full_tensor`: a tensor in another layout.

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
from isoshard.torch_bridge.layout.layout_methods import body_of
from isoshard.torch_bridge.spmd.manual_recipes import spec_along
from isoshard.torch_bridge.spmd.marking import mark_sharding
from isoshard.torch_bridge.spmd.uneven import constrained_evenly

from .along import AlongAxes, constrain_over_axes
from .device_mesh import DeviceMesh
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
        (mesh_placements_of(tensor) or mesh_placements).sharding
        if traced
        else marks.requested_sharding(tensor)
    )
    sizes = None if traced else _unchanged_blocks(tensor, mesh_placements)
    if sizes is not None and back is None and gradient_dtype in (None, tensor.dtype):
        cast = dtype not in (None, tensor.dtype)
        if _is_sharded_as(tensor, mesh_placements):
            return tensor.to(dtype) if cast else tensor.view_as(tensor)
        unmoved = tensor.to(dtype) if cast else tensor.clone()
        mark_sharding(
            unmoved, mesh_of(mesh_placements.sharding), mesh_placements.sharding.spec, sizes=sizes
        )
        return remember(unmoved, mesh_placements)
    target, source = mesh_placements.sharding, back or _same_devices(have, mesh_placements.sharding)
    result: Any = _Moved.apply(
        tensor,
        _along(target, mesh_placements) if mesh_placements.is_open else target,
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
    """`tensor.redistribute(..)`: see there, and `moved`."""
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
    present = mesh_placements_of(tensor)
    return mesh_placements._replace(
        is_open=present is not None and present.is_open and present.mesh == mesh_placements.mesh
    )


@body_of("full_tensor")
def full_tensor(tensor: DeviceTensor) -> Callable[..., Any]:
    """`tensor.full_tensor`."""
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


def _unchanged_blocks(tensor: Any, mesh_placements: MeshPlacements) -> Sizes | None:
    """The blocks of the axes that a layout splits as before; None without any."""
    sizes, have = tensor.block_sizes, marks.requested_sharding(tensor)
    if sizes is None or have is None or mesh_of(have) != mesh_of(mesh_placements.sharding):
        return None
    before, after = _names_of(have, len(sizes)), _names_of(mesh_placements.sharding, len(sizes))
    axes = zip(sizes, before, after, strict=True)
    block_sizes = tuple(
        blocks if names and names == target_names else None for blocks, names, target_names in axes
    )
    return block_sizes if any(block_sizes) else None


def _is_sharded_as(tensor: Any, mesh_placements: MeshPlacements) -> bool:
    """Whether a tensor is split as a layout over its mesh says, in whatever blocks."""
    count = tensor.dim()
    return _names_of(marks.requested_sharding(tensor), count) == _names_of(
        mesh_placements.sharding, count
    )


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
    def forward(ctx: Any, t: Any, target: Any, back: Any, dtype: Any, gradient_dtype: Any) -> Any:
        ctx.how = t.dtype, target, back, dtype, gradient_dtype
        if isinstance(target, AlongAxes):
            return constrain_over_axes(t.to(dtype), target)
        return constrained_evenly(t.to(dtype), target)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        dtype, target, back, moved_in, gradient_dtype = ctx.how
        moved: Any = _Moved.apply(gradient[0], back, target, gradient_dtype, moved_in)
        return moved.to(dtype), None, None, None, None


def with_scaled_gradient(tensor: torch.Tensor, scale: float) -> torch.Tensor:
    """A tensor whose gradient is `scale` times that of the result.

    One tensor here may represent those of many devices, whose gradients are added.

    >>> x = torch.ones(2, requires_grad=True)
    >>> with_scaled_gradient(x, 4).sum().backward()
    >>> x.grad
    tensor([4., 4.])
    """
    result: Any = _Scaled.apply(tensor, scale)
    return result


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, scale: float) -> Any:
        ctx.scale = scale
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return gradient[0] * ctx.scale, None
