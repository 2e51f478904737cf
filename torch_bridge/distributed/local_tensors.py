"""`to_local` and `from_local`: between a whole tensor and what each device holds of it.

What `to_local` gives is a tensor of one device's piece, on which operations act on every device by
itself (see `isoshard.torch_bridge.spmd.manual`); `from_local` makes such pieces one whole again.

>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import DTensor, Replicate, Shard
>>> from isoshard.torch_bridge.distributed.tensor import Partial, distribute_tensor
>>> mesh = init_device_mesh("jax", (4,))
>>> t = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])
>>> mine = t.to_local()
>>> mine.shape
torch.Size([2])
>>> DTensor.from_local(mine.sum(0, keepdim=True), mesh, [Shard(0)])        # one sum per device
tensor([ 1.,  5.,  9., 13.], device='jax:0', sharding=P('0',))
>>> DTensor.from_local(mine.sum(), mesh, [Partial()])                      # their sum
tensor(28., device='jax:0', sharding=P())

Gradients follow DTensor's rule: pieces of a split tensor get their pieces of the gradient; each
copy of a replicated one gets the whole gradient; and the copies' gradients are taken to be one,
unless `grad_placements` says that they are parts of a sum. Neither direction communicates, but for
the sums of `Partial`, which are taken at once.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import torch

from isoshard.core.layout.axis_types import auto
from isoshard.core.layout.mesh import mesh_of
from isoshard.torch_bridge.argument_types import DeviceTensor
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.layout import graph_calls
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.spmd.stacked_shards import laid_whole, stacked_shape, whole_shape

Sharding = jax.sharding.NamedSharding
P = jax.sharding.PartitionSpec

Reductions = tuple[tuple[str, str], ...]
"""Mesh axes along which pieces are parts of one, each with how: `sum`, `avg`, `min`, `max` or
`first` (one device's piece for all). Along the others that split nothing, pieces are equal."""


def cut(whole: DeviceTensor, sharding: Sharding, back: Reductions = ()) -> ManualTensor:
    """The pieces of a whole.

    Args:
        whole: on the `jax` device; its axes divide.
        sharding: how it is cut.
        back: how the gradients of copies become one.
    """
    result: Any = _ToLocal.apply(whole, sharding, back, 1)
    return result


def join(pieces: ManualTensor, sharding: Sharding, how: Reductions = (), parts: int = 1) -> Any:
    """The whole that pieces make.

    Args:
        pieces: over the mesh of `sharding`.
        sharding: how they lie in the whole.
        how: see `Reductions`.
        parts: what the gradient of every piece is divided by.
    """
    result: Any = _Join.apply(pieces, sharding, how, parts)
    return result


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Any, sharding: Any, back: Any, parts: int) -> Any:
        ctx.how = sharding, back, parts
        stacked = graph_calls.laid_by(_cut, stacked_shape, whole, sharding, parts)
        return ManualTensor.of(stacked, mesh_of(sharding))

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        sharding, back, parts = ctx.how
        pieces = gradient[0]
        if not isinstance(pieces, ManualTensor):  # the value that all devices have was used
            pieces = cut(pieces, Sharding(mesh_of(sharding), P()))
        return _Join.apply(pieces, sharding, back, parts), None, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pieces: Any, sharding: Any, how: Any, parts: int) -> Any:
        ctx.how = sharding, how, parts
        return graph_calls.laid_by(_joined, whole_shape, pieces.stacked, sharding, how)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        sharding, how, parts = ctx.how
        return _ToLocal.apply(gradient[0], sharding, how, parts), None, None, None


def _cut(whole: Any, sharding: Any, parts: int) -> Any:
    (value,) = tapes.recorder().record(_cut_recipe(sharding, parts), [lazy_tensor.read(whole)])
    shape = stacked_shape(tuple(whole.shape), sharding)
    return lazy_tensor.fresh(Aval.contiguous(shape, whole.dtype), value)


def _joined(stacked: Any, sharding: Any, how: Reductions) -> Any:
    (value,) = tapes.recorder().record(_join_recipe(sharding, how), [lazy_tensor.read(stacked)])
    return laid_whole(value, stacked, sharding)


@functools.lru_cache(maxsize=1024)
def _cut_recipe(sharding: Any, parts: int) -> Recipe:
    def local(piece: jax.Array) -> jax.Array:
        return (piece if parts == 1 else piece / parts)[None]

    mesh = auto(mesh_of(sharding))
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=sharding.spec, out_specs=P(mesh.axis_names), check_vma=False
    )
    return Recipe("to_local", lambda arrays, _scalars, _key: [mapped(arrays[0])], 1)


@functools.lru_cache(maxsize=1024)
def _join_recipe(sharding: Any, how: Reductions) -> Recipe:
    def local(stacked: jax.Array) -> jax.Array:
        piece = stacked[0]
        for kind, reduce in _REDUCE.items():
            if axes := tuple(axis for axis, asked in how if asked == kind):
                wide = piece.astype("int32") if piece.dtype == bool else piece
                piece = reduce(wide, axes).astype(piece.dtype)
        return piece

    mesh = auto(mesh_of(sharding))
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=sharding.spec, check_vma=False
    )
    return Recipe("from_local", lambda arrays, _scalars, _key: [mapped(arrays[0])], 1)


def _first(piece: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The piece of the first device along some axes, on all of them."""
    first = functools.reduce(lambda a, b: a & b, [jax.lax.axis_index(axis) == 0 for axis in axes])
    return jax.lax.psum(jax.numpy.where(first, piece, jax.numpy.zeros_like(piece)), axes)


_REDUCE = {
    "first": _first,
    "sum": jax.lax.psum,
    "avg": jax.lax.pmean,
    "min": jax.lax.pmin,
    "max": jax.lax.pmax,
}
REDUCTIONS = ("sum", "avg", "min", "max")
"""The reductions of `Partial` that can be taken here."""
