"""The tensor methods `from_local` and `to_local`, with their checks; see `local_tensors`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from isoshard.core.errors import ShardingError, UnevenError
from isoshard.core.layout.axis_types import same_devices, same_grid
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import axis_names, check_even
from isoshard.torch_bridge.common.argument_types import DeviceTensor, MeshLike
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.layout import graph_calls, marks
from isoshard.torch_bridge.layout.layout_methods import body_of
from isoshard.torch_bridge.spmd.manual_recipes import spec_along
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.spmd.marking import mark_sharding
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from . import local_tensors, tensor_placements
from .device_mesh import DeviceMesh, device_mesh_of
from .redistribution import moved, with_scaled_gradient
from .tensor_placements import MeshPlacements


@body_of("to_local")
def to_local(tensor: DeviceTensor, grad_placements: Sequence[Any] | None) -> Any:
    """Each device's local tensor.

    Args:
        tensor: on the `jax` device, sharded evenly.
        grad_placements: as for `XLAShardedTensor.to_local`.
    """
    mesh_placements = tensor_placements.mesh_placements_of(tensor)
    if mesh_placements is None and marks.is_recorded(tensor):
        tapes.materialize([lazy_tensor.read(tensor)])
        mesh_placements = tensor_placements.mesh_placements_of(tensor)
    if mesh_placements is None:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that is on no mesh has no local tensors; "
            "shard it first: distribute_tensor(t, mesh, placements), or t.redistribute(..)"
        )
    return local_tensor_of(tensor, mesh_placements, grad_placements)


def local_tensor_of(
    tensor: DeviceTensor, mesh_placements: MeshPlacements, grad_placements: Sequence[Any] | None
) -> Any:
    """Each device's local tensor over the dimensions of a mesh, or of a submesh.

    Args:
        tensor: on the `jax` device.
        mesh_placements: of the tensor.
        grad_placements: as for `XLAShardedTensor.to_local`.
    """
    if not graph_calls.is_traced(tensor) and tensor.block_sizes is not None:
        raise UnevenError(
            f"a tensor of shape {tuple(tensor.shape)} in blocks {tensor.block_sizes} has shards of "
            "several shapes, and to_local() is one tensor of one shape; take tensor.local_shards, "
            "isoshard.local_shards(tensor), or write a handler: docs/own_operators.md"
        )
    check_even(mesh_placements.along(), mesh_of(mesh_placements.sharding), tuple(tensor.shape))
    back: list[tuple[str, str]] = []
    pairs = _pairs(mesh_placements, grad_placements, tensor.dim())
    for dim, (tensor_placement, grad_placement) in enumerate(pairs):
        if grad_placement.is_partial() and tensor_placement.is_replicate():
            reduction = _reduction(grad_placement)
            back += [(axis, reduction) for axis in mesh_placements.mesh.axis_names(dim)]
        elif grad_placement != tensor_placement:
            _raise_gradient_error(tensor_placement, grad_placement)
    axes = mesh_placements.mesh.all_axis_names()
    order = _order_in_memory(tensor)
    if order is None:
        return local_tensors.split(tensor, mesh_placements.sharding, axes, tuple(back))
    turned, placements, _ = _permuted(
        order, tensor, mesh_placements.mesh, mesh_placements.placements, None
    )
    turned_layout = tensor_placements.layout(tuple(turned.shape), mesh_placements.mesh, placements)
    local: Any = local_tensors.split(turned, turned_layout.sharding, axes, tuple(back))
    return local.permute(_inverse(order))


@body_of("from_local")
def from_local(
    local: DeviceTensor,
    device_mesh: MeshLike,
    placements: Sequence[Any] | None,
    run_check: bool,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    grad_placements: Sequence[Any] | None,
) -> Any:
    """The global tensor of local tensors.

    Args:
        local: as for `XLAShardedTensor.from_local`, and so all others.
        device_mesh: the mesh.
        placements: one per mesh dimension.
        run_check: whether copies become those of the first device.
        shape: global.
        stride: global.
        grad_placements: of the gradient.
    """
    mesh = device_mesh_of(device_mesh)
    if (shape is None) != (stride is None):
        raise RuntimeError(
            "Please pass both shape and stride at the same time, or neither; got "
            f"{shape} and {stride}"
        )
    local = (
        [_materialized(tensor) for tensor in local]
        if isinstance(local, list | tuple)
        else _materialized(local)
    )
    order = _order_in_memory(local)
    args = (
        (local, placements, grad_placements)
        if order is None
        else _permuted(order, local, mesh, placements, grad_placements)
    )
    full, mesh_placements, partial = _full_tensor(args[0], mesh, args[1], run_check, args[2])
    full = tensor_placements.remember(full, mesh_placements._replace(placements=partial))
    if order is not None:
        full = full.permute(_inverse(order))
    if shape is not None:
        _check_shape(full, tuple(shape), tuple(stride or ()))
    return full


def _materialized(local: Any) -> Any:
    """A meta tensor as an `empty` one, as in `distribute_tensor`."""
    if not isinstance(local, torch.Tensor) or not local.is_meta:
        return local
    return torch.empty_like(local, device="jax").requires_grad_(local.requires_grad)


def _order_in_memory(local: Any) -> list[int] | None:
    """The axes of dense tensors from the outermost in memory; None for row-major and other ones."""
    several = isinstance(local, list | tuple)
    orders: set[tuple[int, ...] | None] = set()
    for tensor in local if several else [local]:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            return None
        if tensor.is_contiguous():
            orders.add(None)
            continue
        order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
        orders.add(tuple(order) if tensor.permute(order).is_contiguous() else None)
    return list(orders.pop() or ()) or None if len(orders) == 1 else None


def _inverse(order: list[int]) -> list[int]:
    return [order.index(axis) for axis in range(len(order))]


def _permuted(
    order: list[int], tensors: Any, mesh: DeviceMesh, placements: Any, grads: Any
) -> tuple[Any, Any, Any]:
    """Tensors and placements with their axes in another order."""
    positions = {axis: position for position, axis in enumerate(order)}

    def moved(old_placements: Any) -> Any:
        if old_placements is None:
            return None
        from_left = tensor_placements.normalized(old_placements, mesh, len(order))
        return [
            tensor_placements.with_dim(placement, lambda axis: positions.get(axis, axis))
            for placement in from_left
        ]

    if isinstance(tensors, list | tuple):
        return [tensor.permute(order) for tensor in tensors], moved(placements), moved(grads)
    return tensors.permute(order), moved(placements), moved(grads)


def _full_tensor(
    local: Any, mesh: DeviceMesh, placements: Any, run_check: bool, grad_placements: Any
) -> tuple[Any, MeshPlacements, tuple[Any, ...]]:
    from torch.distributed.tensor import Replicate

    several = isinstance(local, list | tuple)
    _check_local(local, several, mesh)
    ndim = local[0].dim() if several else local.dim()
    normalized = tensor_placements.normalized(placements, mesh, ndim)
    reductions = {dim: _reduction(p) for dim, p in enumerate(normalized) if p.is_partial()}
    reduced = tuple(Replicate() if p.is_partial() else p for p in normalized)
    if isinstance(local, ManualTensor):
        full, mesh_placements = _joined(
            local, mesh, normalized, reduced, run_check, grad_placements
        )
        return full, mesh_placements, reduced
    if grad_placements is not None:
        raise ShardingError(
            "grad_placements defines how gradients of local tensors are combined, and these "
            "are plain tensors, whose gradients are global; leave it out, or pass a tensor of "
            "to_local()"
        )
    if several:
        full = _assembled(local, mesh, reduced, reductions)
    else:
        full = _repeated(local, mesh, reduced, reductions)
    mesh_placements = tensor_placements.layout(tuple(full.shape), mesh, reduced)
    sizes = _unequal(local, mesh, reduced) if several else {}
    if sizes:
        full = full if isinstance(full, XLAShardedTensor) else full.to("jax")
        sharding = mesh_placements.sharding
        return (
            mark_sharding(full, sharding.mesh, sharding.spec, sizes=sizes),
            mesh_placements,
            reduced,
        )
    if not isinstance(full, XLAShardedTensor) and not graph_calls.is_traced(full):
        full = tensor_placements.mark(full.to("jax"), mesh_placements)
        return (
            (moved(full, mesh_placements) if full.requires_grad else full),
            mesh_placements,
            reduced,
        )
    is_open = mesh.is_part() and not tensor_placements.is_on_no_mesh(full)
    mesh_placements = mesh_placements._replace(is_open=is_open)
    return moved(full, mesh_placements, mesh_placements.sharding), mesh_placements, reduced


def _unequal(locals_: Sequence[Any], mesh: DeviceMesh, reduced: Any) -> dict[int, tuple[int, ...]]:
    """The sizes of the blocks, by tensor axis, where one mesh dimension has unequal shards."""
    grid = np.arange(mesh.size()).reshape(mesh.shape)
    sizes_by_axis = {}
    for dim, placement in enumerate(reduced):
        line = np.moveaxis(grid, dim, 0).reshape(mesh.shape[dim], -1)[:, 0]
        if not placement.is_replicate():
            sizes_by_axis[placement.dim] = tuple(locals_[n].shape[placement.dim] for n in line)
    return {axis: sizes for axis, sizes in sizes_by_axis.items() if len(set(sizes)) > 1}


def _check_local(local: Any, several: bool, mesh: DeviceMesh) -> None:
    tensors = list(local) if several else [local]
    if several and len(tensors) != mesh.size():
        raise ShardingError(
            f"{len(tensors)} local tensors for {mesh} of {mesh.size()} devices; pass one per device"
        )
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"from_local takes tensors, and this is a {type(tensor).__name__}")
        if isinstance(tensor, ManualTensor):
            if several:
                raise ShardingError(
                    "a tensor of to_local() is one per device already; pass it alone"
                )
            continue
        if type(tensor).__name__ == "DTensor":
            raise RuntimeError(
                "from_local takes a local tensor, and this is a DTensor of another process mesh; "
                "pass its .to_local()"
            )
        sharding = marks.marked(tensor) if isinstance(tensor, XLAShardedTensor) else None
        names = mesh.all_axis_names()
        if sharding is not None and any(map(axis_names, spec_along(sharding.spec, names))):
            raise RuntimeError(
                f"from_local takes the shard of one device, and this tensor of shape "
                f"{tuple(tensor.shape)} is global and sharded as {sharding.spec}; use "
                "tensor.redistribute(mesh, placements), or tensor.to_local() first"
            )


def _joined(
    local: ManualTensor, mesh: DeviceMesh, normalized: Any, reduced: Any, check: bool, grads: Any
) -> tuple[Any, MeshPlacements]:
    outside = _outside(local, mesh)
    for dim in outside:
        if not normalized[dim].is_replicate():
            raise ShardingError(
                f"these local tensors are over {local.axes} of {mesh.root}, and replicated over "
                f"dimension {dim} of {mesh}, so Replicate() is possible there, and "
                f"{normalized[dim]} is not; redistribute the result"
            )
    counts = [mesh.size(dim) if p.is_shard() else 1 for dim, p in enumerate(normalized)]
    shape = list(local.shape)
    for placement, count in zip(reduced, counts, strict=True):
        if not placement.is_replicate():
            shape[placement.dim] *= count
    mesh_placements = tensor_placements.layout(tuple(shape), mesh, reduced)
    how: list[tuple[str, str]] = []
    divisor = 1
    for dim, (tensor_placement, grad_placement) in enumerate(
        _pairs(mesh_placements, grads, local.dim())
    ):
        is_copied = tensor_placement.is_replicate() and dim not in outside
        kind = "first" if check and is_copied else None
        kind = _reduction(normalized[dim]) if normalized[dim].is_partial() else kind
        how += [(axis, kind) for axis in mesh.axis_names(dim) if kind]
        if grad_placement.is_partial() and tensor_placement.is_replicate():
            is_sum = _reduction(grad_placement) == "sum" and dim not in outside
            divisor *= mesh.size(dim) if is_sum else 1
        elif grad_placement != tensor_placement:
            _raise_gradient_error(tensor_placement, grad_placement)
    full = local_tensors.join(local, mesh_placements.sharding, tuple(how), divisor)
    if outside:
        return moved(full, mesh_placements, mesh_placements.sharding), mesh_placements
    return full, mesh_placements._replace(is_open=mesh.is_part())


def _outside(local: ManualTensor, mesh: DeviceMesh) -> list[int]:
    """The dimensions of a mesh that local tensors are not over."""
    root = mesh.get_jax_mesh()
    is_all = local.axes == local.mesh.axis_names
    if is_all and not mesh.is_part() and same_devices(local.mesh, root):
        return []
    if not same_grid(local.mesh, root):
        raise ShardingError(f"these local tensors are on {local.mesh}, and the mesh is {mesh}")
    if not set(local.axes) <= set(mesh.all_axis_names()):
        raise ShardingError(
            f"{mesh} is a submesh, and these local tensors are over {local.axes} of {mesh.root}, "
            "so they may differ along other dimensions: pass placements for the root, or local "
            "tensors over the submesh only: DTensor.from_local(t, part, [Replicate()]).to_local()"
        )
    return [dim for dim in range(mesh.ndim) if not set(mesh.axis_names(dim)) <= set(local.axes)]


def _repeated(local: Any, mesh: DeviceMesh, reduced: Any, reductions: dict[int, str]) -> Any:
    """The global tensor where every device has this local tensor."""
    if not isinstance(local, XLAShardedTensor) and not graph_calls.is_traced(local):
        local = local.to("jax")
    times = [1] * local.dim()
    for dim, placement in enumerate(reduced):
        if not placement.is_replicate():
            times[placement.dim] *= mesh.size(dim)
    sums = math.prod(mesh.size(dim) for dim, kind in reductions.items() if kind == "sum")
    if local.requires_grad and (copies := sums * math.prod(times)) > 1:
        local = with_scaled_gradient(local, 1 / copies)  # the mean of what the copies get
    full = local.repeat(times) if math.prod(times) > 1 else local
    return full * sums if sums > 1 else full


def _assembled(
    locals_: Sequence[Any], mesh: DeviceMesh, reduced: Any, reductions: dict[int, str]
) -> Any:
    """The global tensor of one tensor per device, in the order of the mesh."""
    grid = np.empty(mesh.shape, object)
    for position, tensor in zip(np.ndindex(*mesh.shape), locals_, strict=True):
        grid[position] = tensor
    entries = tensor_placements.spec_of(reduced, locals_[0].dim(), mesh.shape)
    inner = {
        dim: at for entry in entries if isinstance(entry, tuple) for at, dim in enumerate(entry)
    }
    # Of the mesh dimensions that split one axis, the innermost is put together first.
    for dim in sorted(range(mesh.ndim), key=lambda dim: -inner.get(dim, 0)):
        result = np.empty([1 if n == dim else size for n, size in enumerate(grid.shape)], object)
        for position in itertools.product(*map(range, result.shape)):
            line = [
                grid[(*position[:dim], k, *position[dim + 1 :])] for k in range(grid.shape[dim])
            ]
            result[position] = _combined(line, reduced[dim], reductions.get(dim))
        grid = result
    return grid.ravel()[0]


def _combined(line: list[Any], placement: Any, reduction: str | None) -> Any:
    if not placement.is_replicate():
        return torch.cat(line, placement.dim)
    if reduction is None:
        return line[0]
    stacked = torch.stack(line)
    if reduction in ("sum", "avg"):
        return stacked.sum(0) if reduction == "sum" else stacked.mean(0)
    return stacked.amin(0) if reduction == "min" else stacked.amax(0)


def _pairs(
    mesh_placements: MeshPlacements, grads: Sequence[Any] | None, ndim: int
) -> list[tuple[Any, Any]]:
    """Each mesh dimension's placement, and that of the gradient."""
    grad_placements = (
        mesh_placements.placements
        if grads is None
        else tensor_placements.normalized(grads, mesh_placements.mesh, ndim)
    )
    return list(zip(mesh_placements.placements, grad_placements, strict=True))


def _reduction(placement: Any) -> str:
    if placement.reduce_op not in local_tensors.REDUCTIONS:
        raise NotImplementedError(
            f"{placement!r} is not supported; the reductions are "
            + ", ".join(local_tensors.REDUCTIONS)
        )
    return placement.reduce_op


def _raise_gradient_error(tensor_placement: Any, grad_placement: Any) -> None:
    raise ValueError(
        f"the gradient of a local tensor placed {tensor_placement} has its shape, so "
        f"{grad_placement} is not possible; a Shard keeps its axis, and a Replicate may become "
        "Partial()"
    )


def _check_shape(full: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    if tuple(full.shape) != shape:
        raise ShardingError(
            f"the local tensors make a tensor of shape {tuple(full.shape)}, and shape={shape} was "
            "passed; for shards of unequal size pass a list with one tensor per device"
        )
    if tuple(full.stride()) != stride:
        raise ShardingError(
            f"the local tensors make a tensor of shape {shape} with strides "
            f"{tuple(full.stride())}, and stride={stride} was passed"
        )
