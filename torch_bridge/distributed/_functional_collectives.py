"""torch.distributed._functional_collectives' functions for local tensors of `to_local`.

A group is a mesh or submesh, or a mesh and the index or name of a dimension.

>>> import torch
>>> from isoshard.torch_bridge.distributed import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import Shard, distribute_tensor
>>> mesh = init_device_mesh("jax", (2, 4), mesh_dim_names=("dp", "tp"))
>>> local = distribute_tensor(torch.arange(8.0), mesh, [Shard(0), Shard(0)]).to_local()
>>> [shard.data.item() for shard in all_reduce(local, "sum", mesh["tp"]).local_shards]
[6.0, 6.0, 6.0, 6.0, 22.0, 22.0, 22.0, 22.0]
>>> [shard.data.tolist() for shard in all_gather_tensor(local, 0, (mesh, "dp")).local_shards][:2]
[[0.0, 4.0], [1.0, 5.0]]

They are recorded as every operation is, and `wait()` of a result is the result. Gradients go back
as torch's: those of a sum are summed, those of gathered shards summed and scattered. A tensor on no
mesh, as one made inside `local_map`, counts as replicated. A global tensor on a mesh has nothing to
exchange: `redistribute` it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import torch
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import same_grid
from isoshard.core.runtime.caches import cached
from isoshard.torch_bridge.common.argument_types import Opaque
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.spmd.manual_recipes import Axes, devices_along, mapped, summable
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor, ShardKind
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from . import local_tensors, tensor_placements
from .device_mesh import DeviceMesh, device_mesh_of

__all__ = [
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "wait_tensor",
]


def all_reduce(self: torch.Tensor, reduceOp: str, group: Opaque, tag: str = "") -> Any:
    """The reduction of a group's shards, on each of its devices.

    Args:
        self: each device's shard.
        reduceOp: `"sum"`, `"avg"`, `"min"` or `"max"`.
        group: see the module's description.
        tag: makes no difference.

    Raises:
        ShardingError: the tensor is global; the group is of another mesh, or is none.
        ValueError: the operation is another.
    """
    return _exchanged(self, "all_reduce", _operation(reduceOp), 0, group)


def all_gather_tensor(self: torch.Tensor, gather_dim: int, group: Opaque, tag: str = "") -> Any:
    """The concatenation of a group's shards, on each of its devices.

    Raises:
        ShardingError: the tensor is global; the group is of another mesh, or is none.
    """
    return _exchanged(self, "all_gather", "sum", gather_dim % self.dim(), group)


def reduce_scatter_tensor(
    self: torch.Tensor, reduceOp: str, scatter_dim: int, group: Opaque, tag: str = ""
) -> Any:
    """The reduction of a group's shards, scattered over its devices.

    Args:
        self: each device's shard.
        reduceOp: `"sum"` or `"avg"`.
        scatter_dim: the axis that is split.
        group: see the module's description.
        tag: makes no difference.

    Raises:
        ShardingError: the tensor is global; the group is of another mesh, or is none; its devices
            do not divide the axis.
        ValueError: the operation is another.
    """
    if reduceOp not in ("sum", "avg"):
        raise ValueError(f"reduce_scatter_tensor takes 'sum' or 'avg', got {reduceOp!r}")
    return _exchanged(self, "reduce_scatter", reduceOp, scatter_dim % self.dim(), group)


def all_to_all_single(
    self: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Opaque,
    tag: str = "",
) -> Any:
    """Each device's n-th part of axis 0 goes to the n-th device of the group.

    Args:
        self: each device's shard.
        output_split_sizes: None, or equal sizes: all devices run one program.
        input_split_sizes: must be None or equal.
        group: see the module's description.
        tag: makes no difference.

    Raises:
        ShardingError: the tensor is global; the group is of another mesh, or is none; its devices
            do not divide axis 0; the sizes differ.
    """
    for sizes in (output_split_sizes, input_split_sizes):
        if sizes is not None and len(set(sizes)) > 1:
            raise ShardingError(
                f"all_to_all_single with parts of {list(sizes)} rows: every device runs the same "
                "program here, so parts are of one size; give None, and pad what is smaller"
            )
    return _exchanged(self, "all_to_all", "sum", 0, group)


def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A result of these functions, as it is: JAX waits where a value is read."""
    return tensor


all_gather_tensor_autograd = all_gather_tensor
reduce_scatter_tensor_autograd = reduce_scatter_tensor
all_to_all_single_autograd = all_to_all_single


def _exchanged(shards: Any, kind: str, how: str, dim: int, group: Any) -> Any:
    if _is_replicated(shards):
        mesh, _ = _mesh(kind, group)
        copies = jax.sharding.NamedSharding(mesh.get_jax_mesh(), P())
        axes = mesh.all_axis_names()
        shards = local_tensors.split(shards, copies, axes, tuple((axis, "sum") for axis in axes))
    if not isinstance(shards, ManualTensor):
        raise ShardingError(
            f"{kind} takes what each device has, of to_local() or inside local_map, and this "
            f"{type(shards).__name__} of shape {tuple(shards.shape)} is global: use "
            "tensor.redistribute(mesh, placements)"
        )
    axes, count = _axes(shards, kind, group)
    if kind in ("reduce_scatter", "all_to_all") and shards.shape[dim] % count:
        raise ShardingError(
            f"{kind} over {count} devices splits axis {dim} of a shard of shape "
            f"{tuple(shards.shape)}, which they do not divide; pad it"
        )
    return _Exchange.apply(shards, kind, how, dim, axes, count)


def _is_replicated(tensor: Any) -> bool:
    """Whether it is on no mesh: created inside `local_map`, it is equal on all devices."""
    ours = isinstance(tensor, XLAShardedTensor) and not isinstance(tensor, ManualTensor)
    return ours and not tensor_placements.is_placed(tensor)


def _mesh(kind: str, group: Any) -> tuple[DeviceMesh, Any]:
    """The mesh of a group, and the dimension that was named, if one was."""
    mesh, dim = group if isinstance(group, tuple | list) and len(group) == 2 else (group, None)
    if not isinstance(mesh, DeviceMesh | jax.sharding.Mesh):
        raise ShardingError(
            f"{kind} takes a mesh, or (mesh, dimension), as its group: here are no process groups; "
            f"got {group!r}"
        )
    return device_mesh_of(mesh), dim


def _axes(shards: ManualTensor, kind: str, group: Any) -> tuple[Axes, int]:
    """The mesh axes of a group, and how many devices it has."""
    mesh, dim = _mesh(kind, group)
    if not same_grid(mesh.get_jax_mesh(), shards.mesh):
        raise ShardingError(f"{kind} over {mesh} of local tensors on {shards.mesh}")
    dims = range(mesh.ndim)
    if dim is not None:
        names = mesh.mesh_dim_names or ()
        dims = [names.index(dim) if isinstance(dim, str) else dim]
    axes = tuple(name for dim in dims for name in mesh.axis_names(dim))
    if not set(axes) <= set(shards.axes):
        raise ShardingError(
            f"{kind} over {axes} of local tensors over {shards.axes}: over other axes of "
            f"{mesh.root} they are replicated, and there is nothing to exchange; name one of "
            "these, or take to_local() of a tensor on the mesh of both"
        )
    return axes, devices_along(mesh.get_jax_mesh(), axes)


def _operation(name: str) -> str:
    if name not in _REDUCED:
        raise ValueError(f"all_reduce takes one of {[*_REDUCED]}, got {name!r}")
    return name


class _Exchange(torch.autograd.Function):
    """`apply(shards, kind, how, dim, axes, count)`: one collective."""

    @staticmethod
    def forward(
        ctx: Any, shards: Any, kind: str, how: str, dim: int, axes: Axes, count: int
    ) -> Any:
        ctx.how = kind, how, dim, axes, count
        recipe = _recipe(shards.mesh, shards.axes, kind, how, dim, axes)
        group = frozenset(axes)
        is_same = kind in ("all_reduce", "all_gather")
        replicated_axes = (
            shards.replicated_axes | group if is_same else shards.replicated_axes - group
        )
        like = ShardKind(shards.mesh, shards.axes, replicated_axes)
        return ManualTensor.recorded(recipe, shards.stacked, like, _shape, kind, dim, count)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        kind, how, dim, axes, count = ctx.how
        if how in ("min", "max"):
            raise RuntimeError(
                f"all_reduce({how!r}) has no gradient: which device's shard it is is not stored"
            )
        back = _Exchange.apply(gradient[0], _BACK[kind], "sum", dim, axes, count)
        return back / count if how == "avg" else back, None, None, None, None, None


def _shape(stacked: Any, kind: str, dim: int, count: int) -> Any:
    result = list(stacked)
    if kind == "all_gather":
        result[dim + 1] *= count
    elif kind == "reduce_scatter":
        result[dim + 1] //= count
    return tuple(result)


_BACK = {
    "all_reduce": "all_reduce",
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_to_all": "all_to_all",
}
_REDUCED = {
    "sum": jax.lax.psum,
    "avg": jax.lax.pmean,
    "min": jax.lax.pmin,
    "max": jax.lax.pmax,
}


@cached(1024)
def _recipe(
    mesh: jax.sharding.Mesh, over: Axes, kind: str, how: str, dim: int, axes: Axes
) -> Recipe:
    """One collective over `axes`, of shards over the axes `over`."""
    size = devices_along(mesh, axes)

    def local(stacked: jax.Array) -> jax.Array:
        shard = stacked[0]
        if kind == "all_gather":
            return jax.lax.all_gather(shard, axes, axis=dim, tiled=True)[None]
        if kind == "all_to_all":
            return jax.lax.all_to_all(shard, axes, dim, dim, tiled=True)[None]
        wide = summable(shard, mesh, over)
        if kind == "all_reduce":
            return _REDUCED[how](wide, axes).astype(shard.dtype)[None]
        local_sum = jax.lax.psum_scatter(wide, axes, scatter_dimension=dim, tiled=True)
        return (local_sum / size if how == "avg" else local_sum).astype(shard.dtype)[None]

    run = mapped(local, mesh, over, P(over), P(over))
    return Recipe(kind, lambda arrays, _scalars, _key: [run(arrays[0])], 1)
