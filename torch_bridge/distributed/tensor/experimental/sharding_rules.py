"""`register_sharding`: the placements of an operator's results, given those of its arguments.

XLA's partitioner chooses how an operation is computed, and its result's sharding. A rule sets it
instead: of its pairs of placements, the one that moves the least data becomes a constraint on
arguments and results.

>>> import torch
>>> from torch.distributed.tensor import Replicate, Shard
>>> from isoshard.torch_bridge.distributed import init_device_mesh
>>> from isoshard.torch_bridge.distributed.tensor import distribute_tensor
>>> @register_sharding(torch.ops.aten.cummax.default)
... def rows(x, dim):
...     replicated = [Replicate(), Replicate()], [Replicate(), None]
...     rest = [n for n in range(x.ndim) if n != dim]
...     return [replicated] + [([Shard(n)] * 2, [Shard(n), None]) for n in rest]
>>> x = distribute_tensor(torch.rand(8, 8), init_device_mesh("jax", (4,)), [Shard(0)])
>>> torch.cummax(x, 1).values.placements, torch.cummax(x, 0).values.placements
((Shard(dim=0),), (Replicate(),))
>>> unregister_sharding(torch.ops.aten.cummax.default)

A pair is for one dimension of a mesh, and every dimension takes one. A global tensor has no
pending sums, so a pair with `Partial` arguments is left out, and a `Partial` result is the sum,
replicated.
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
from isoshard.torch_bridge.spmd.uneven import even_with_warning

Rule = Callable[..., Sequence[tuple[Sequence[Any], Sequence[Any]]]]
_RULES: dict[Any, Rule] = {}


def register_sharding(op: Opaque) -> Callable[[Rule], Rule]:
    """A decorator for the function that returns an operator's acceptable layouts.

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
    for overload in overloads:
        if not isinstance(overload, OpOverload):
            raise TypeError(
                f"register_sharding takes an overload, as torch.ops.aten._softmax.default, or a "
                f"list of them, and this is {overload!r}"
            )
        if schema_of(overload).is_mutable:
            raise ShardingError(
                f"register_sharding({overload}): the operator writes to an argument, whose "
                "sharding is kept; register the overload that writes to none, and shard the tensor "
                "with tensor.redistribute(mesh, placements)"
            )

    def register(rule: Rule) -> Rule:
        for overload in overloads:
            if overload not in _RULES:
                dispatch.around(overload, lambda plain, overload=overload: _Ruled(overload, plain))
            _RULES[overload] = rule
        return rule

    return register


def unregister_sharding(op: Opaque) -> None:
    """Remove the rules of operators: XLA's partitioner chooses again.

    Args:
        op: an overload, or a list of them; those without a rule are unchanged.
    """
    for overload in op if isinstance(op, list | tuple) else [op]:
        if _RULES.pop(overload, None) is not None:
            dispatch.around(overload, lambda ruled: ruled.plain)


class _Ruled:
    """The handler of an overload with a rule."""

    def __init__(self, op: OpOverload, plain: dispatch.Handler):
        self.op = op
        self.plain = plain

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        at = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[n] for n in at]
        # no rule is about local tensors
        mesh = None if is_mapping() else _mesh(self.op, tensors)
        if mesh is None:
            return self.plain(args, kwargs)
        specs = [_spec(tensor, mesh) for tensor in tensors]
        spec_leaves = list(leaves)
        for n, spec in zip(at, specs, strict=True):
            spec_leaves[n] = spec
        spec_args, named = pytree.tree_unflatten(spec_leaves, structure)
        targets, results = _cheapest(self.op, _RULES[self.op](*spec_args, **named), specs, mesh)
        for n, tensor, placements in zip(at, tensors, targets, strict=True):
            leaves[n] = _redistributed(tensor, mesh, placements)
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        output_tree = self.plain(args, kwargs)
        outputs = [output_tree] if isinstance(output_tree, torch.Tensor) else list(output_tree)
        for output, placements in zip(outputs, results, strict=True):
            if output is not None:
                mesh_placements = tensor_placements.layout(tuple(output.shape), mesh, placements)
                tensor_placements.mark(output, mesh_placements)
        return output_tree


def _mesh(op: OpOverload, tensors: list[Any]) -> DeviceMesh | None:
    """The mesh that a call's tensors are split over; else one that some are on, if any."""
    shardings = [sharding for tensor in tensors if (sharding := _sharding(op, tensor)) is not None]
    split = [sharding for sharding in shardings if any(sharding.spec)]
    meshes = {device_mesh_of(mesh_of(sharding)) for sharding in split}
    if len(meshes) > 1:
        raise ShardingError(
            f"{op} has arguments split over {' and '.join(map(str, meshes))}, and its sharding is "
            "registered for one mesh; bring them to one with tensor.redistribute(mesh, placements)"
        )
    return next(iter(meshes), None) or (
        device_mesh_of(mesh_of(shardings[0])) if shardings else None
    )


def _sharding(op: OpOverload, tensor: Any) -> Any:
    """A tensor's sharding, for which it may be computed; None for one on no mesh."""
    if not tensor_placements.is_placed(tensor):
        return None
    tensor_placements.placements_of_tensor(tensor)
    mesh_placements = tensor_placements.mesh_placements_of(tensor)
    if mesh_placements is None:
        raise ShardingError(
            f"{op} has a registered sharding, which depends on its arguments', and one of shape "
            f"{tuple(tensor.shape)} has no layout before the step that is being captured runs: "
            "set it with tensor.redistribute(mesh, placements)"
        )
    return mesh_placements.sharding


def _spec(tensor: Any, mesh: DeviceMesh) -> Any:
    """A tensor as a rule sees it; replicated, if it is not split over the mesh."""
    mesh_placements = tensor_placements.mesh_placements_of(tensor)
    own = mesh_placements is not None and device_mesh_of(mesh_of(mesh_placements.sharding)) == mesh
    placements = (
        placements_of(mesh_placements.sharding) if mesh_placements is not None and own else None
    )
    placements = tensor_placements.normalized(placements, mesh, tensor.dim())
    meta = TENSOR_META.resolve()(tensor.shape, tensor.stride(), tensor.dtype)
    return DTENSOR_SPEC.resolve()(mesh, placements, tensor_meta=meta)


def _cheapest(
    op: OpOverload, pairs: Sequence[Any], specs: list[Any], mesh: DeviceMesh
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The pair of placements that moves the least data; the first of several."""
    checked_pairs = [_checked(op, pair, len(specs)) for pair in pairs]
    usable = [
        pair for pair in checked_pairs if not any(placement.is_partial() for placement in pair[1])
    ]
    chosen: Any = None
    for choice in itertools.product(usable, repeat=mesh.ndim):
        targets = [tuple(pair[1][n] for pair in choice) for n in range(len(specs))]
        if not all(
            _divides(spec, placed, mesh) for spec, placed in zip(specs, targets, strict=True)
        ):
            continue
        moved = sum(_moved(spec, placed, mesh) for spec, placed in zip(specs, targets, strict=True))
        if chosen is None or moved < chosen[0]:
            results = [tuple(pair[0][n] for pair in choice) for n in range(len(choice[0][0]))]
            chosen = moved, targets, results
    if chosen is None:
        current = ", ".join(f"{tuple(spec.shape)} {spec.placements}" for spec in specs)
        raise ShardingError(
            f"none of the {len(checked_pairs)} registered shardings of {op} suits arguments "
            f"{current} over {mesh}; accept ([Replicate()], [Replicate(), ..]) as well"
        )
    return chosen[1], chosen[2]


def _checked(op: OpOverload, pair: Any, count: int) -> tuple[list[Any], list[Any]]:
    """The placements of tensors in one pair; a partial sum as a result is replicated."""
    from torch.distributed.tensor import Replicate

    results, arguments = pair
    placed = [argument for argument in arguments if argument is not None]
    returns = len(schema_of(op).returns)
    if len(placed) != count or len(results) != returns:
        raise ShardingError(
            f"the registered sharding of {op} has {results} for {returns} results and {arguments} "
            f"for {count} tensors; give one placement for each, and None for what is no tensor"
        )
    return [
        Replicate() if result is None or result.is_partial() else result for result in results
    ], placed


def _divides(spec: Any, placements: tuple[Any, ...], mesh: DeviceMesh) -> bool:
    """Whether placements divide a tensor evenly or have at most its size."""
    divisors = dict.fromkeys(range(spec.ndim), 1)
    for count, placement in zip(mesh.shape, placements, strict=True):
        if placement.is_shard():
            if not -spec.ndim <= placement.dim < spec.ndim:
                return False
            divisors[placement.dim % spec.ndim] *= count
    return all(spec.shape[axis] % divisor == 0 for axis, divisor in divisors.items())


def _moved(spec: Any, placements: tuple[Any, ...], mesh: DeviceMesh) -> float:
    """The bytes that a device receives, estimated for each mesh dimension by itself.

    As in DTensor, to split another axis costs a little more than to gather: of the two it gathers.
    """
    size = math.prod(spec.shape) * spec.tensor_meta.dtype.itemsize
    total = 0.0
    for count, source, target in zip(mesh.shape, spec.placements, placements, strict=True):
        if source != target and source.is_shard():
            total += size * (count - 1) / count + target.is_shard()
    return total


def _redistributed(tensor: Any, mesh: DeviceMesh, placements: tuple[Any, ...]) -> Any:
    mesh_placements = tensor_placements.layout(tuple(tensor.shape), mesh, placements)
    if tensor.dim() == 0 or marks.requested_sharding(tensor) == mesh_placements.sharding:
        return tensor
    return marks.constrained(tensor, *even_with_warning(mesh_placements.sharding, tensor.shape))
