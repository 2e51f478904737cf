"""`to_local` and `from_local`: between a global tensor and each device's shard.

`to_local` returns a tensor of one device's shard, on which operations act on every device by
itself (see `isoshard.torch_bridge.spmd.manual`); `from_local` joins such shards to a global tensor.

>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import DTensor, Replicate, Shard
>>> from isoshard.torch_bridge.distributed.tensor import Partial, distribute_tensor
>>> mesh = init_device_mesh("jax", (4,))
>>> t = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
>>> local = t.to_local()
>>> local.shape
torch.Size([2])
>>> DTensor.from_local(local.sum(0, keepdim=True), mesh, [Shard(0)])        # one sum per device
tensor([ 1.,  5.,  9., 13.], device='jax:0', sharding=P('0',))
>>> DTensor.from_local(local.sum(), mesh, [Partial()])                      # their sum
tensor(28., device='jax:0', sharding=P())

Gradients follow DTensor's rule: shards of a split tensor get their shards of the gradient; each
copy of a replicated one gets the full gradient; and the copies' gradients are assumed to be equal,
unless `grad_placements` declares them partial sums. Neither direction communicates, but for
the sums of `Partial`, which are taken at once.
"""

from __future__ import annotations

from typing import Any

import jax
import torch

from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import axis_names
from isoshard.torch_bridge.common.argument_types import DeviceTensor
from isoshard.torch_bridge.spmd.manual_operations import joined
from isoshard.torch_bridge.spmd.manual_recipes import Axes, Reductions, split_recipe, stacked_shape
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor, ShardKind

Sharding = jax.sharding.NamedSharding
P = jax.sharding.PartitionSpec


def split(
    full: DeviceTensor, sharding: Sharding, axes: Axes, back: Reductions = ()
) -> ManualTensor:
    """The local shards of a global tensor over some axes of its mesh.

    Args:
        full: on the `jax` device; the axes divide it.
        sharding: of the global tensor; its other axes are ignored.
        axes: those that the shards are over, in the order of the mesh.
        back: how the gradients of copies become one.
    """
    result: Any = _ToLocal.apply(full, sharding, axes, back, 1)
    return result


def join(shards: ManualTensor, sharding: Sharding, how: Reductions = (), divisor: int = 1) -> Any:
    """The global tensor of local shards.

    Args:
        shards: over the mesh of `sharding`, or some axes of it.
        sharding: of the global tensor.
        how: see `Reductions`.
        divisor: what the gradient of every shard is divided by.
    """
    result: Any = _Join.apply(shards, sharding, how, divisor)
    return result


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Any, sharding: Any, axes: Axes, back: Any, divisor: int) -> Any:
        ctx.how = sharding, axes, back, divisor
        mesh = mesh_of(sharding)
        recipe = split_recipe(mesh, axes, sharding.spec, divisor=divisor)
        split = {name for entry in sharding.spec for name in axis_names(entry)}
        like = ShardKind(mesh, axes, frozenset(axes) - split)
        return ManualTensor.recorded(recipe, full, like, stacked_shape, mesh, axes, sharding.spec)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        sharding, axes, back, divisor = ctx.how
        shards = gradient[0]
        if not isinstance(shards, ManualTensor):  # the value that all devices have was used
            shards = split(shards, Sharding(mesh_of(sharding), P()), axes)
        return _Join.apply(shards, sharding, back, divisor), None, None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shards: Any, sharding: Any, how: Any, divisor: int) -> Any:
        is_over_all_axes = shards.axes == shards.mesh.axis_names
        axes = mesh_of(sharding).axis_names if is_over_all_axes else shards.axes
        ctx.how = sharding, axes, how, divisor
        return joined(shards, sharding, how)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _ToLocal.apply(gradient[0], *ctx.how), None, None, None


REDUCTIONS = ("sum", "avg", "min", "max")
"""The reductions of `Partial` that can be taken here."""
