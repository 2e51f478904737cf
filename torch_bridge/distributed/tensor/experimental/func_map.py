"""`local_map`: a function of local tensors, as a function of global tensors.

>>> import torch
>>> from torch.distributed.tensor import Partial, Shard
>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import distribute_tensor
>>> mesh = init_device_mesh("jax", (4,))
>>> w = distribute_tensor(torch.ones(2, 8), mesh, [Shard(1)])
>>> x = distribute_tensor(torch.arange(8.0).reshape(8, 1), mesh, [Shard(0)])
>>> product = local_map(torch.mm, [Partial()], in_placements=([Shard(1)], [Shard(0)]))
>>> product(w, x)                          # of shards (2, 2) and (2, 1); their sum at the end
tensor([[28.],
        [28.]], device='jax:0', sharding=P())

The function gets the results of `to_local()`, and each device computes on its shard alone. Its
outputs become global by `from_local`: shards are joined, and `Partial` outputs are summed.
Inside, collectives of `isoshard.torch_bridge.distributed._functional_collectives` take a mesh as
their group; those of process groups are not possible. What is to be summed at the end is returned
as `Partial()`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax.sharding import NamedSharding
from torch.distributed.tensor import Placement

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import same_grid
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.layout.spec import check_even
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common.argument_types import MeshLike, PlacementLike
from isoshard.torch_bridge.distributed import local_checks, tensor_placements
from isoshard.torch_bridge.distributed.device_mesh import (
    DeviceMesh,
    current_mesh_or_none,
    device_mesh_of,
)
from isoshard.torch_bridge.distributed.redistribution import moved
from isoshard.torch_bridge.spmd.manual_tensor import ManualTensor
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

PlacementType = Sequence[Placement] | None


class _CallError(ShardingError, AssertionError):
    """Placements do not fit the values; DTensor asserts it."""


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: PlacementLike = None,
    in_placements: Sequence[PlacementType] | None = None,
    in_grad_placements: Sequence[PlacementType] | None = None,
    device_mesh: MeshLike = None,
    *,
    redistribute_inputs: bool = False,
) -> Any:
    """A function of local tensors as a function of global tensors.

    Args:
        func: of tensors and other values, in any nesting; without it, the result is a decorator.
        out_placements: of its result, or of each of its results (a tuple, flat); None for what is
            no tensor.
        in_placements: of each positional argument (flat); None for what is no tensor, or is on
            no mesh and is to be whole. If not given, each argument is taken as it lies, and one
            that lies on no mesh is whole on every device.
        in_grad_placements: of the gradients of the arguments, where they are not those of the
            arguments: `Partial()` for a replicated one of which each device uses a part.
        device_mesh: the mesh; by default that of the first argument that is on one.
        redistribute_inputs: whether arguments with other placements are moved; otherwise they are
            refused.

    Returns:
        The function of global tensors. Called with none on the `jax` device, or with none on a mesh
        where no mesh is given or current, it is `func`.

    Raises:
        ValueError: when called, if an argument has other placements than `in_placements`, if that
            has None for one on a mesh, or there are not as many placements as arguments or results
            (all but the first are an AssertionError as well, which DTensor raises).
        UnevenError: when called, if an argument does not divide; shards must be equal.

    Example:
        >>> from torch.distributed.tensor import Partial, Shard
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor import distribute_tensor
        >>> x = distribute_tensor(torch.arange(8.0), init_device_mesh("jax", (4,)), [Shard(0)])
        >>> local_map(torch.sum, [Partial()])(x)                 # of each shard; then their sum
        tensor(28., device='jax:0', sharding=P())
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    return functools.wraps(func, updated=())(
        functools.partial(
            _call,
            func,
            out_placements,
            in_placements,
            in_grad_placements,
            device_mesh,
            redistribute_inputs,
        )
    )


def _call(
    func: Callable[..., Any],
    out_placements: Any,
    in_placements: Any,
    in_grad_placements: Any,
    device_mesh: Any,
    move: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    flat, structure = pytree.tree_flatten(args)
    for option_name, option in (
        ("in_placements", in_placements),
        ("in_grad_placements", in_grad_placements),
    ):
        if option is not None and len(option) != len(flat):
            raise _CallError(
                f"{option_name} of local_map has {len(option)} entries, which does not match the "
                f"number of input args, {len(flat)}; give one each, None for what is no tensor"
            )
    ours = [leaf for leaf in flat if _is_full_tensor(leaf)]
    mesh = _mesh(ours, device_mesh) if ours else None
    if mesh is None:
        return func(*args, **kwargs)
    shards = []
    for index, leaf in enumerate(flat):
        target = in_placements[index] if in_placements is not None else None
        grads = in_grad_placements[index] if in_grad_placements is not None else None
        if not isinstance(leaf, torch.Tensor) and (target is not None or grads is not None):
            raise _CallError(
                f"argument {index} of local_map is a {type(leaf).__name__} and has no placements; "
                f"it expects None placements, not {target if target is not None else grads}"
            )
        if in_placements is not None and target is None and _is_full_tensor(leaf):
            _check_unplaced(leaf, index)
        shards.append(
            _shard(leaf, index, mesh, target, grads, move) if _is_full_tensor(leaf) else leaf
        )
    result = func(*pytree.tree_unflatten(shards, structure), **kwargs)
    leaves, outline = pytree.tree_flatten(result)
    target = _per_output(out_placements)
    if len(target) != len(leaves):
        raise _CallError(
            f"out_placements of local_map has {len(target)} entries, and it requires one "
            f"PlacementType be provided for each output value, of which the function returned "
            f"{len(leaves)}; give a tuple with one each"
        )
    outputs = [_full_output(leaf, n, mesh, target[n]) for n, leaf in enumerate(leaves)]
    return pytree.tree_unflatten(outputs, outline)


def _is_full_tensor(leaf: Any) -> bool:
    return isinstance(leaf, XLAShardedTensor) and not isinstance(leaf, ManualTensor)


def _check_unplaced(leaf: Any, index: int) -> None:
    mesh_placements = tensor_placements.mesh_placements_of(leaf)
    if mesh_placements is not None or tensor_placements.is_placed(leaf):
        current = f" as {mesh_placements.placements}" if mesh_placements is not None else ""
        raise _CallError(
            f"argument {index} of local_map is a tensor of shape {tuple(leaf.shape)} that is on "
            f"a mesh{current}, and expects placements, where in_placements has None: pass those "
            "that its shards are to have, or omit in_placements to take every tensor as it is"
        )


def _mesh(ours: list[Any], device_mesh: Any) -> DeviceMesh | None:
    """The explicit mesh, else that of the first argument on one, else the current one."""
    if device_mesh is not None:
        return device_mesh_of(device_mesh)
    meshes = [
        mesh_placements.mesh
        for leaf in ours
        if (mesh_placements := tensor_placements.mesh_placements_of(leaf)) is not None
    ]
    meshes += [
        mesh for leaf in ours if (mesh := tensor_placements.mesh_of_program(leaf)) is not None
    ]
    return meshes[0] if meshes else current_mesh_or_none()


def _shard(leaf: Any, index: int, mesh: DeviceMesh, target: Any, grads: Any, move: bool) -> Any:
    """The local tensor of an argument."""
    current = tensor_placements.mesh_placements_of(leaf)
    if target is None:
        if current is None and grads is None:
            target = tensor_placements.normalized(None, mesh, leaf.dim())
        elif current is not None:
            return local_checks.local_tensor_of(leaf, tensor_placements.over(current, mesh), grads)
        else:
            raise ValueError(
                f"argument {index} of local_map is on no mesh, so in_grad_placements has "
                "nothing for it; give in_placements too"
            )
    requested = tensor_placements.layout(tuple(leaf.shape), mesh, target)
    if mesh.is_part():
        requested = requested._replace(is_open=not tensor_placements.is_on_no_mesh(leaf))
        current = None if current is None else tensor_placements.over(current, mesh)
    check_even(requested.sharding.spec, mesh_of(requested.sharding), tuple(leaf.shape))
    if (
        current is not None
        and current.sharding != requested.sharding
        and not _same_sharding(current, requested, leaf)
    ):
        if not move:
            raise ValueError(
                f"argument {index} of local_map is sharded as {current.placements} on "
                f"{current.mesh}, and in_placements requires {requested.placements} on {mesh}; "
                "redistribute it first, or set redistribute_inputs=True"
            )
        leaf = moved(leaf, requested)
    elif current is None or current.placements != requested.placements:
        leaf = moved(leaf, requested, requested.sharding)
    return local_checks.local_tensor_of(leaf, requested, grads)


def _same_sharding(current: Any, requested: Any, leaf: Any) -> bool:
    if not same_grid(current.sharding.mesh, requested.sharding.mesh):
        return False
    current_sharding, requested_sharding = (
        NamedSharding(mesh_of(placements.sharding), placements.along())
        for placements in (current, requested)
    )
    return current_sharding.is_equivalent_to(requested_sharding, leaf.dim())


def _per_output(out_placements: Any) -> tuple[Any, ...]:
    if isinstance(out_placements, tuple) and not any(
        isinstance(placement, Placement) for placement in out_placements
    ):
        return out_placements
    return (out_placements,)


def _full_output(leaf: Any, index: int, mesh: DeviceMesh, placements: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if placements is not None:
            raise _CallError(
                f"result {index} of local_map is a {type(leaf).__name__} and has no placements; "
                f"it expects None placements, not {placements}"
            )
        return leaf
    if _is_full_tensor(leaf) and tensor_placements.mesh_placements_of(leaf) is not None:
        raise ValueError(
            f"result {index} of local_map is a global tensor on a mesh, and not what one "
            "device computed; use the arguments of the function"
        )
    return local_checks.from_local(leaf, mesh, placements, False, None, None, None)
