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

from .along import AlongAxes, laid_along
from .device_mesh import DeviceMesh
from .gradient_scale import with_scaled_gradient
from .tensor_placements import MeshPlacements, found, layout, mesh_of_tensor, normalized, remember

Sharding = jax.sharding.NamedSharding


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
    there, source = laid.sharding, back or _same_devices(have, laid.sharding)
    result: Any = _Moved.apply(
        tensor,
        _along(there, laid) if laid.is_open else there,
        _along(source, laid) if laid.is_open else source,
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
    laid = _opened(tensor, layout(tuple(tensor.shape), device_mesh, placements))
    return moved(tensor, laid, None, dtype, gradient_dtype)


def _opened(tensor: DeviceTensor, laid: MeshPlacements) -> MeshPlacements:
    """A layout over the part of a mesh that a tensor lies on: the other axes stay open."""
    own = found(tensor)
    return laid._replace(is_open=own is not None and own.is_open and own.mesh == laid.mesh)


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
    whole = moved(tensor, _opened(tensor, layout(shape, mesh, None)), back)
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


def _along(sharding: Sharding, laid: MeshPlacements) -> AlongAxes:
    """What a sharding says of the part of a mesh that a layout is for."""
    names = laid.mesh.all_axis_names()
    return AlongAxes(mesh_of(laid.sharding), names, spec_along(sharding.spec, names))


class _Moved(torch.autograd.Function):
    """`apply(tensor, sharding, that of the gradient, dtype, dtype while the gradient moves)`."""

    @staticmethod
    def forward(ctx: Any, t: Any, there: Any, back: Any, dtype: Any, gradient_dtype: Any) -> Any:
        ctx.how = t.dtype, there, back, dtype, gradient_dtype
        if isinstance(there, AlongAxes):
            return laid_along(t.to(dtype), there)
        return laid_out(t.to(dtype), there)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        dtype, there, back, moved_in, gradient_dtype = ctx.how
        moved: Any = _Moved.apply(gradient[0], back, there, gradient_dtype, moved_in)
        return moved.to(dtype), None, None, None, None
