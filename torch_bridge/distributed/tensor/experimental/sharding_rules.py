"""`register_sharding`: which layouts of an operator's results go with which of its arguments.

XLA's partitioner works out how an operation is computed, and where its result lies. A rule says so
instead: of the pairs of placements that it accepts, the one that moves the least of the arguments
as they lie is asked of the partitioner, for arguments and results.

>>> import torch
>>> from torch.distributed.tensor import Replicate, Shard
>>> from isoshard.torch_bridge.distributed import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import distribute_tensor
>>> @register_sharding(torch.ops.aten.cummax.default)
... def rows(x, dim):
...     whole = [Replicate(), Replicate()], [Replicate(), None]
...     return [whole] + [([Shard(n)] * 2, [Shard(n), None]) for n in range(x.ndim) if n != dim]
>>> x = distribute_tensor(torch.rand(8, 8), init_device_mesh("jax", (4,)), [Shard(0)])
>>> torch.cummax(x, 1).values.placements, torch.cummax(x, 0).values.placements
((Shard(dim=0),), (Replicate(),))
>>> unregister_sharding(torch.ops.aten.cummax.default)

A pair is for one dimension of a mesh, and every dimension takes one. A whole tensor has no sums to
be taken, so a pair whose arguments are `Partial` is left out, and a result that is `Partial` is the
sum, whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from isoshard.core.errors import ShardingError
from isoshard.core.layout.mesh import mesh_of
from isoshard.torch_bridge._torch_internals import OpOverload, pytree, schema_of
from isoshard.torch_bridge._torch_internals.dtensor_fields import DTENSOR_SPEC, TENSOR_META
from isoshard.torch_bridge.common.argument_types import Opaque
from isoshard.torch_bridge.distributed import tensor_placements
from isoshard.torch_bridge.distributed.device_mesh import DeviceMesh, device_mesh_of
from isoshard.torch_bridge.engine.operators import dispatch
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.placements.translation import placements_of
from isoshard.torch_bridge.spmd.manual_operations import is_mapping
from isoshard.torch_bridge.spmd.uneven import even_part

Rule = Callable[..., Sequence[tuple[Sequence[Any], Sequence[Any]]]]
_RULES: dict[Any, Rule] = {}


def register_sharding(op: Opaque) -> Callable[[Rule], Rule]:
    """A decorator for the function that says which layouts an operator may have.

    Args:
        op: an overload, as `torch.ops.aten._softmax.default`, or a list of them; one that writes to
            no argument. It is what autograd calls: `torch.softmax` calls this one, and its
            backward `_softmax_backward_data`.

    Returns:
        The decorator, which gives the function back. The function is called as the operator, with a
        `DTensorSpec` for each tensor, which has `ndim`, `shape`, `mesh` and `placements`. It
        returns pairs `(results, arguments)`, for one dimension of a mesh: a placement for each
        result, and one for each argument, None for what is no tensor. Calls with no tensor on a
        mesh ask no rule. The last rule of an operator counts.

    Raises:
        TypeError: `op` is no overload.
        ShardingError: the overload writes to an argument; when called, if tensors are split over
            several meshes, the layout of one is not known while a step is captured, or no pair
            suits shapes and arguments.

    Example:
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from isoshard.torch_bridge.distributed import init_device_mesh
        >>> from isoshard.torch_bridge.distributed.tensor import distribute_tensor
        >>> aten = torch.ops.aten
        >>> @register_sharding(aten.cumsum.default)
        ... def along_other_axes(x, dim):
        ...     split = [([Shard(n)], [Shard(n), None]) for n in range(x.ndim) if n != dim]
        ...     return [([Replicate()], [Replicate(), None]), *split]
        >>> mesh = init_device_mesh("jax", (4,))
        >>> x = distribute_tensor(torch.ones(8, 8), mesh, [Shard(0)])
        >>> x.cumsum(0).placements, x.cumsum(1).placements
        ((Replicate(),), (Shard(dim=0),))
        >>> unregister_sharding(aten.cumsum.default)
    """
    overloads = op if isinstance(op, list | tuple) else [op]
    for one in overloads:
        if not isinstance(one, OpOverload):
            raise TypeError(
                f"register_sharding takes an overload, as torch.ops.aten._softmax.default, or a "
                f"list of them, and this is {one!r}"
            )
        if schema_of(one).is_mutable:
            raise ShardingError(
                f"register_sharding({one}): the operator writes to an argument, which stays where "
                "it lies; register the overload that writes to none, and lay the tensor out with "
                "tensor.redistribute(mesh, placements)"
            )

    def register(rule: Rule) -> Rule:
        for one in overloads:
            if one not in _RULES:
                dispatch.around(one, lambda plain, one=one: _Ruled(one, plain))
            _RULES[one] = rule
        return rule

    return register


def unregister_sharding(op: Opaque) -> None:
    """Leave operators to XLA's partitioner again.

    Args:
        op: an overload, or a list of them; those without a rule stay as they are.
    """
    for one in op if isinstance(op, list | tuple) else [op]:
        if _RULES.pop(one, None) is not None:
            dispatch.around(one, lambda ruled: ruled.plain)


class _Ruled:
    """How an overload is handled that has a rule."""

    def __init__(self, op: OpOverload, plain: dispatch.Handler):
        self.op = op
        self.plain = plain

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[n] for n in at]
        # one device's piece is what no rule is about
        mesh = None if is_mapping() else _mesh(self.op, tensors)
        if mesh is None:
            return self.plain(args, kwargs)
        specs = [_spec(tensor, mesh) for tensor in tensors]
        told = list(leaves)
        for n, spec in zip(at, specs, strict=True):
            told[n] = spec
        given, named = pytree.tree_unflatten(told, structure)
        wanted, results = _cheapest(self.op, _RULES[self.op](*given, **named), specs, mesh)
        for n, tensor, placements in zip(at, tensors, wanted, strict=True):
            leaves[n] = _laid(tensor, mesh, placements)
        given, named = pytree.tree_unflatten(leaves, structure)
        made = self.plain(given, named)
        outputs = [made] if isinstance(made, torch.Tensor) else list(made)
        for output, placements in zip(outputs, results, strict=True):
            if output is not None:
                laid = tensor_placements.layout(tuple(output.shape), mesh, placements)
                tensor_placements.mark(output, laid)
        return made


def _mesh(op: OpOverload, tensors: list[Any]) -> DeviceMesh | None:
    """The mesh that a call's tensors are split over; else one that some lie on, if any do."""
    laid = [sharding for tensor in tensors if (sharding := _sharding(op, tensor)) is not None]
    split = [sharding for sharding in laid if any(sharding.spec)]
    meshes = {device_mesh_of(mesh_of(sharding)) for sharding in split}
    if len(meshes) > 1:
        raise ShardingError(
            f"{op} has arguments split over {' and '.join(map(str, meshes))}, and its sharding is "
            "registered for one mesh; bring them to one with tensor.redistribute(mesh, placements)"
        )
    return next(iter(meshes), None) or (device_mesh_of(mesh_of(laid[0])) if laid else None)


def _sharding(op: OpOverload, tensor: Any) -> Any:
    """How a tensor lies, for which it is computed if it must be; None for one on no mesh."""
    if not tensor_placements.is_placed(tensor):
        return None
    tensor_placements.placements_of_tensor(tensor)
    found = tensor_placements.found(tensor)
    if found is None:
        raise ShardingError(
            f"{op} has a registered sharding, which goes by how arguments lie, and one of shape "
            f"{tuple(tensor.shape)} has no layout before the step that is being captured runs: "
            "say it with tensor.redistribute(mesh, placements)"
        )
    return found.sharding


def _spec(tensor: Any, mesh: DeviceMesh) -> Any:
    """A tensor as a rule sees it; whole on every device, if it is not split over the mesh."""
    found = tensor_placements.found(tensor)
    own = found is not None and device_mesh_of(mesh_of(found.sharding)) == mesh
    placements = placements_of(found.sharding) if found is not None and own else None
    placements = tensor_placements.normalized(placements, mesh, tensor.dim())
    meta = TENSOR_META.found()(tensor.shape, tensor.stride(), tensor.dtype)
    return DTENSOR_SPEC.found()(mesh, placements, tensor_meta=meta)


def _cheapest(
    op: OpOverload, pairs: Sequence[Any], specs: list[Any], mesh: DeviceMesh
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Of arguments and of results, the placements that move the least; the first of several."""
    known = [_checked(op, pair, len(specs)) for pair in pairs]
    usable = [pair for pair in known if not any(one.is_partial() for one in pair[1])]
    chosen: Any = None
    for choice in itertools.product(usable, repeat=mesh.ndim):
        wanted = [tuple(pair[1][n] for pair in choice) for n in range(len(specs))]
        if not all(
            _divides(spec, placed, mesh) for spec, placed in zip(specs, wanted, strict=True)
        ):
            continue
        moved = sum(_moved(spec, placed, mesh) for spec, placed in zip(specs, wanted, strict=True))
        if chosen is None or moved < chosen[0]:
            results = [tuple(pair[0][n] for pair in choice) for n in range(len(choice[0][0]))]
            chosen = moved, wanted, results
    if chosen is None:
        lie = ", ".join(f"{tuple(spec.shape)} {spec.placements}" for spec in specs)
        raise ShardingError(
            f"none of the {len(known)} registered shardings of {op} suits arguments {lie} over "
            f"{mesh}; accept ([Replicate()], [Replicate(), ..]) as well, which always does"
        )
    return chosen[1], chosen[2]


def _checked(op: OpOverload, pair: Any, count: int) -> tuple[list[Any], list[Any]]:
    """The placements of tensors in one pair; a sum still to be taken of a result is whole."""
    from torch.distributed.tensor import Replicate

    results, arguments = pair
    placed = [one for one in arguments if one is not None]
    returns = len(schema_of(op).returns)
    if len(placed) != count or len(results) != returns:
        raise ShardingError(
            f"the registered sharding of {op} says {results} for {returns} results and {arguments} "
            f"for {count} tensors; give one placement for each, and None for what is no tensor"
        )
    return [Replicate() if one is None or one.is_partial() else one for one in results], placed


def _divides(spec: Any, placements: tuple[Any, ...], mesh: DeviceMesh) -> bool:
    """Whether a tensor has as many rows as placements cut it into."""
    cuts = dict.fromkeys(range(spec.ndim), 1)
    for count, placement in zip(mesh.shape, placements, strict=True):
        if placement.is_shard():
            if not -spec.ndim <= placement.dim < spec.ndim:
                return False
            cuts[placement.dim % spec.ndim] *= count
    return all(spec.shape[axis] % cut == 0 for axis, cut in cuts.items())


def _moved(spec: Any, placements: tuple[Any, ...], mesh: DeviceMesh) -> float:
    """The bytes that a device receives, where only the dimension at hand is looked at.

    As in DTensor, to cut another axis costs a little more than to gather: of the two it gathers.
    """
    size = math.prod(spec.shape) * spec.tensor_meta.dtype.itemsize
    total = 0.0
    for count, here, there in zip(mesh.shape, spec.placements, placements, strict=True):
        if here != there and here.is_shard():
            total += size * (count - 1) / count + there.is_shard()
    return total


def _laid(tensor: Any, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Any:
    laid = tensor_placements.layout(tuple(tensor.shape), mesh, placements)
    if tensor.dim() == 0 or marks.asked(tensor) == laid.sharding:
        return tensor
    return marks.laid_out(tensor, *even_part(laid.sharding, tensor.shape))
