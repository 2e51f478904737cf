"""Manual regions: parts of a program in which each device works on its own shard.

Between `enable_manual_sharding` and `disable_manual_sharding` shapes are those of one device's
shard, and an operation is computed on each shard by itself; XLA's partitioner adds nothing.

>>> import torch, isoshard.torch_bridge as xs
>>> from isoshard.torch_bridge.spmd import disable_manual_sharding, enable_manual_sharding
>>> mesh = xs.Mesh(range(8), (2, 4), ("x", "y"))
>>> t = torch.arange(16.0).to("jax").reshape(2, 8)
>>> shard = enable_manual_sharding(t, ("x", "y"), mesh=mesh)
>>> shard.shape
torch.Size([1, 2])
>>> centered = shard - shard.mean()                   # of the device's two elements
>>> disable_manual_sharding(centered, ("x", "y"), t.shape, mesh=mesh)[1].cpu()
tensor([-0.5000,  0.5000, -0.5000,  0.5000, -0.5000,  0.5000, -0.5000,  0.5000])

Both are `jax.shard_map`, so nothing moves where a tensor is sharded as requested already. Both are
differentiable: the gradient of a shard on several devices is the sum of theirs. Where a result is
replicated over devices, that of the first is taken; they should agree, as in torch_xla.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import SpecLike, axis_names, check_even
from isoshard.torch_bridge.common.argument_types import MeshLike
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .manual_operations import joined
from .manual_recipes import Axes, split_recipe, stacked_shape
from .manual_tensor import ManualTensor, ShardKind
from .marking import checked, layout_for
from .mesh import default_mesh, get_1d_mesh, get_global_mesh


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: SpecLike, *, mesh: MeshLike = None
) -> ManualTensor:
    """Begin a manual region for a tensor: the result is each device's shard of it.

    Args:
        t: on the `jax` device; it is not modified.
        partition_spec: how `t` is split, as for `mark_sharding`.
        mesh: the mesh; the global one if not given.

    Returns:
        A tensor of the shape of one shard.

    Raises:
        ShardingError: there is no mesh, `t` is on another device, or is manual already.
        SpecError: the spec does not fit.
        UnevenError: an axis does not divide; shards must have one shape here.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> t = torch.ones(8, 6, device="jax")
        >>> xs.enable_manual_sharding(t, ("x", None), mesh=xs.get_1d_mesh("x"))
        ManualTensor(shape=(1, 6), dtype=torch.float32, one on each of 8 devices)
    """
    if isinstance(t, ManualTensor):
        raise ShardingError("this tensor is in a manual region already; disable that first")
    t, sharding = checked(t, default_mesh(mesh), partition_spec, "enable_manual_sharding")
    check_even(sharding.spec, mesh_of(sharding), tuple(t.shape))
    result: Any = _ToShards.apply(t, sharding, "copy")
    return result


def disable_manual_sharding(
    t: torch.Tensor, partition_spec: SpecLike, full_shape: Sequence[int], *, mesh: MeshLike = None
) -> XLAShardedTensor:
    """End a manual region for a tensor: its shards become a global tensor.

    Args:
        t: a result of operations in a manual region.
        partition_spec: how the global tensor is split, as for `mark_sharding`.
        full_shape: of the global tensor.
        mesh: the mesh; the global one if not given.

    Returns:
        The global tensor, marked with the spec.

    Raises:
        ShardingError: there is no mesh, `t` is not manual, or its shards have other shapes.
        SpecError: the spec does not fit.
        UnevenError: an axis does not divide.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> mesh = xs.get_1d_mesh("x")
        >>> shard = xs.enable_manual_sharding(torch.arange(8.0, device="jax"), ("x",), mesh=mesh)
        >>> xs.disable_manual_sharding(shard * 2, ("x",), (8,), mesh=mesh)
        tensor([ 0.,  2.,  4.,  6.,  8., 10., 12., 14.], device='jax:0', sharding=P('x',))
    """
    if not isinstance(t, ManualTensor):
        raise ShardingError(
            f"disable_manual_sharding takes a tensor of a manual region, and this one of shape "
            f"{tuple(t.shape)} is not in one; begin it with enable_manual_sharding(t, spec)"
        )
    if t.axes != t.mesh.axis_names:
        raise ShardingError(
            f"a manual region is over all devices, and these shards are over {t.axes} of {t.mesh}; "
            "join them with DTensor.from_local(t, mesh, placements)"
        )
    full_shape = tuple(full_shape)
    sharding = layout_for(full_shape, default_mesh(mesh), partition_spec)
    check_even(sharding.spec, mesh_of(sharding), full_shape)
    if list(mesh_of(sharding).devices.flat) != list(t.mesh.devices.flat):
        raise ShardingError(
            "a manual region ends over the mesh it began with, or one of the same devices in the "
            f"same order; it began over {t.mesh}"
        )
    shard_shape = sharding.shard_shape(full_shape)
    if tuple(t.shape) != shard_shape:
        raise ShardingError(
            f"a tensor of shape {full_shape} split by {sharding.spec} has shards of shape "
            f"{shard_shape}, and these have {tuple(t.shape)}"
        )
    result: Any = _ToFull.apply(t, sharding, "first")
    return result


def mark_manual_sharding(t: torch.Tensor) -> ManualTensor:
    """A manual tensor as it is, or a global tensor replicated over the devices of a manual region.

    Args:
        t: on the `jax` device.

    Returns:
        A manual tensor of the same shape, over the global mesh or all devices.
    """
    if isinstance(t, ManualTensor):
        return t
    return enable_manual_sharding(t, (None,) * t.dim(), mesh=get_global_mesh() or get_1d_mesh())


class _ToShards(torch.autograd.Function):
    """Split a global tensor: every device gets its "copy", or only the "first" and others zeros.

    Transpose of `_ToFull`.
    """

    @staticmethod
    def forward(ctx: Any, full: Any, sharding: Any, how: str) -> Any:
        ctx.sharding, ctx.how = sharding, how
        mesh = mesh_of(sharding)
        first = _others(sharding) if how == "first" else ()
        split = mesh, mesh.axis_names, sharding.spec
        like = ShardKind(mesh, mesh.axis_names)
        recipe = split_recipe(*split, first)
        return ManualTensor.recorded(recipe, full, like, stacked_shape, *split)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _ToFull.apply(gradient[0], ctx.sharding, _TRANSPOSE[ctx.how]), None, None


class _ToFull(torch.autograd.Function):
    """Join shards: of replicas the "first", or their "sum". Transpose of `_ToShards`."""

    @staticmethod
    def forward(ctx: Any, shards: Any, sharding: Any, how: str) -> Any:
        ctx.sharding, ctx.how = sharding, how
        return joined(shards, sharding, tuple((name, how) for name in _others(sharding)))

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _ToShards.apply(gradient[0], ctx.sharding, _TRANSPOSE[ctx.how]), None, None


_TRANSPOSE = {"copy": "sum", "sum": "copy", "first": "first"}


def _others(sharding: Any) -> Axes:
    """The mesh axes along which a tensor is replicated."""
    used = {name for entry in sharding.spec for name in axis_names(entry)}
    return tuple(name for name in sharding.mesh.axis_names if name not in used)
