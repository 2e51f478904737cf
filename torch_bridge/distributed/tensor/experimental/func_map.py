"""`local_map`: a function of one device's pieces, as a function of whole tensors.

>>> import torch
>>> from torch.distributed.tensor import Partial, Shard
>>> from isoshard.torch_bridge.distributed.device_mesh import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import distribute_tensor
>>> mesh = init_device_mesh("jax", (4,))
>>> w = distribute_tensor(torch.ones(2, 8), mesh, [Shard(1)])
>>> x = distribute_tensor(torch.arange(8.0).reshape(8, 1), mesh, [Shard(0)])
>>> product = local_map(torch.mm, [Partial()], in_placements=([Shard(1)], [Shard(0)]))
>>> product(w, x)                          # of pieces (2, 2) and (2, 1); their sum at the end
tensor([[28.],
        [28.]], device='jax:0', sharding=P())

The function sees what `to_local()` gives, and each device computes on its piece alone. What it
returns is made whole by `from_local`: pieces are put together, and `Partial` outputs are summed.
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
    """Placements and values do not belong together; DTensor asserts it."""


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: PlacementLike = None,
    in_placements: Sequence[PlacementType] | None = None,
    in_grad_placements: Sequence[PlacementType] | None = None,
    device_mesh: MeshLike = None,
    *,
    redistribute_inputs: bool = False,
) -> Any:
    """Have each device call a function on its pieces.

    Args:
        func: of tensors and other values, in any nesting; without it, the result is a decorator.
        out_placements: of its result, or of each of its results (a tuple, flat); None for what is
            no tensor.
        in_placements: of each positional argument (flat); None for what is no tensor, or lies on
            no mesh and is to be whole. If not given, each argument is taken as it lies, and one
            that lies on no mesh is whole on every device.
        in_grad_placements: of the gradients of the arguments, where they are not those of the
            arguments: `Partial()` for a replicated one of which each device uses a part.
        device_mesh: the mesh; that of the first argument that lies on one, if not given.
        redistribute_inputs: whether arguments that lie otherwise are moved; otherwise they are
            refused.

    Returns:
        The function of whole tensors. Called with none on the `jax` device, or with none on a mesh
        where no mesh is given or current, it is `func`.

    Raises:
        ValueError: when called, if an argument lies otherwise than `in_placements` says, if that
            has None for one on a mesh, or there are not as many placements as arguments or results
            (all but the first are an AssertionError as well, which DTensor raises).
        UnevenError: when called, if an argument does not divide; pieces must be equal here.

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
    for what, given in (
        ("in_placements", in_placements),
        ("in_grad_placements", in_grad_placements),
    ):
        if given is not None and len(given) != len(flat):
            raise _CallError(
                f"{what} of local_map has {len(given)} entries, which does not match the number of "
                f"input args, {len(flat)}; give one each, None for what is no tensor"
            )
    ours = [leaf for leaf in flat if _is_whole(leaf)]
    mesh = _mesh(ours, device_mesh) if ours else None
    if mesh is None:
        return func(*args, **kwargs)
    pieces = []
    for number, leaf in enumerate(flat):
        wanted = in_placements[number] if in_placements is not None else None
        grads = in_grad_placements[number] if in_grad_placements is not None else None
        if not isinstance(leaf, torch.Tensor) and (wanted is not None or grads is not None):
            raise _CallError(
                f"argument {number} of local_map is a {type(leaf).__name__} and has no placements; "
                f"it expects None placements, not {wanted if wanted is not None else grads}"
            )
        if in_placements is not None and wanted is None and _is_whole(leaf):
            _check_unplaced(leaf, number)
        pieces.append(_piece(leaf, number, mesh, wanted, grads, move) if _is_whole(leaf) else leaf)
    result = func(*pytree.tree_unflatten(pieces, structure), **kwargs)
    leaves, outline = pytree.tree_flatten(result)
    wanted = _one_each(out_placements)
    if len(wanted) != len(leaves):
        raise _CallError(
            f"out_placements of local_map has {len(wanted)} entries, and it requires one "
            f"PlacementType be provided for each output value, of which the function returned "
            f"{len(leaves)}; give a tuple with one each"
        )
    whole = [_whole(leaf, n, mesh, wanted[n]) for n, leaf in enumerate(leaves)]
    return pytree.tree_unflatten(whole, outline)


def _is_whole(leaf: Any) -> bool:
    return isinstance(leaf, XLAShardedTensor) and not isinstance(leaf, ManualTensor)


def _check_unplaced(leaf: Any, number: int) -> None:
    laid = tensor_placements.found(leaf)
    if laid is not None or tensor_placements.is_placed(leaf):
        lies = f" as {laid.placements}" if laid is not None else ""
        raise _CallError(
            f"argument {number} of local_map is a tensor of shape {tuple(leaf.shape)} that lies on "
            f"a mesh{lies}, and expects placements, where in_placements has None: give those that "
            "its pieces are to have, or leave in_placements out to take every tensor as it lies"
        )


def _mesh(ours: list[Any], device_mesh: Any) -> DeviceMesh | None:
    """The mesh that is given, else that of the first argument on one, else the current one."""
    if device_mesh is not None:
        return device_mesh_of(device_mesh)
    known = [laid.mesh for leaf in ours if (laid := tensor_placements.found(leaf)) is not None]
    known += [
        mesh for leaf in ours if (mesh := tensor_placements.mesh_of_program(leaf)) is not None
    ]
    return known[0] if known else current_mesh_or_none()


def _piece(leaf: Any, number: int, mesh: DeviceMesh, wanted: Any, grads: Any, move: bool) -> Any:
    """What each device holds of an argument."""
    laid = tensor_placements.found(leaf)
    if wanted is None:
        if laid is None and grads is None:
            wanted = tensor_placements.normalized(None, mesh, leaf.dim())
        elif laid is not None:
            return local_checks.pieces(leaf, tensor_placements.over(laid, mesh), grads)
        else:
            raise ValueError(
                f"argument {number} of local_map lies on no mesh, so in_grad_placements says "
                "nothing for it; give in_placements too"
            )
    asked = tensor_placements.layout(tuple(leaf.shape), mesh, wanted)
    if mesh.is_part():
        asked = asked._replace(is_open=not tensor_placements.is_nowhere(leaf))
        laid = None if laid is None else tensor_placements.over(laid, mesh)
    check_even(asked.sharding.spec, mesh_of(asked.sharding), tuple(leaf.shape))
    if laid is not None and laid.sharding != asked.sharding and not _alike(laid, asked, leaf):
        if not move:
            raise ValueError(
                f"argument {number} of local_map lies as {laid.placements} on {laid.mesh}, and "
                f"in_placements asks for {asked.placements} on {mesh}; redistribute it first, or "
                "set redistribute_inputs=True"
            )
        leaf = moved(leaf, asked)
    elif laid is None or laid.placements != asked.placements:
        leaf = moved(leaf, asked, asked.sharding)
    return local_checks.pieces(leaf, asked, grads)


def _alike(laid: Any, asked: Any, leaf: Any) -> bool:
    if not same_grid(laid.sharding.mesh, asked.sharding.mesh):
        return False
    here, there = (NamedSharding(mesh_of(one.sharding), one.along()) for one in (laid, asked))
    return here.is_equivalent_to(there, leaf.dim())


def _one_each(out_placements: Any) -> tuple[Any, ...]:
    if isinstance(out_placements, tuple) and not any(
        isinstance(one, Placement) for one in out_placements
    ):
        return out_placements
    return (out_placements,)


def _whole(leaf: Any, number: int, mesh: DeviceMesh, placements: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        if placements is not None:
            raise _CallError(
                f"result {number} of local_map is a {type(leaf).__name__} and has no placements; "
                f"it expects None placements, not {placements}"
            )
        return leaf
    if _is_whole(leaf) and tensor_placements.found(leaf) is not None:
        raise ValueError(
            f"result {number} of local_map is a whole tensor laid out on a mesh, and not what one "
            "device computed; use the arguments that the function is given"
        )
    return local_checks.from_local(leaf, mesh, placements, False, None, None, None)
