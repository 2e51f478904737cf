"""Operations on manual tensors: mapped over the devices, with copies of global operands.

An operation is mapped with `torch.vmap` over the leading axis of stacked shards. An operand that is
global, or over fewer axes, and requires a gradient, becomes copies before autograd sees the
operation, so that the copies' gradients are reduced to one. Random numbers differ from device to
device, but for replicated shards (`replicated_axes`): one device draws for all of them, so that
they remain replicated.
"""

from __future__ import annotations

import contextvars
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from isoshard.core.errors import ShardingError
from isoshard.core.layout.axis_types import same_grid
from isoshard.core.layout.mesh import mesh_of
from isoshard.torch_bridge._torch_internals import pytree, schema_of
from isoshard.torch_bridge._torch_internals.dispatcher import transforms_allowed
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import DeviceTensor, Opaque
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.layout import graph_calls, marks
from isoshard.torch_bridge.layout.layout_methods import body_of
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .agreed_value import HOW
from .manual_recipes import (
    Axes,
    Reductions,
    join_recipe,
    joined_shape,
    narrow_recipe,
    restacked_shape,
    split_recipe,
    stacked_shape,
    widen_recipe,
)
from .manual_tensor import ManualTensor, ShardKind

_MAPPING: contextvars.ContextVar[bool] = contextvars.ContextVar("mapping", default=False)


def is_mapping() -> bool:
    """Whether the operation being dispatched is mapped over the devices."""
    return _MAPPING.get()


@body_of("manual_function")
def with_copies(func: Opaque, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a torch function, with copies of those whose gradients are to be summed.

    Args:
        func: the function.
        args: its arguments; among them manual tensors.
        kwargs: likewise.
    """
    call_args: Any = (args, kwargs)
    if not torch.is_grad_enabled() or getattr(func, "__module__", "") == "torch.autograd":
        return call_args
    leaves = pytree.tree_leaves(call_args)
    manual = [leaf for leaf in leaves if isinstance(leaf, ManualTensor)]
    if not manual or not any(_is_narrow(leaf, manual[0].axes) for leaf in leaves):
        return call_args
    mesh, axes = _mesh_and_axes(func, manual)
    written = args[0] if args and _is_in_place(func) else None

    def copied(leaf: Any) -> Any:
        is_narrow = leaf is not written and _is_narrow(leaf, axes)
        return _Copies.apply(leaf, mesh, axes) if is_narrow else leaf

    return pytree.tree_map(copied, call_args)


@body_of("manual_dispatch")
def mapped_operation(func: Opaque, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation on each device's shards.

    Args:
        func: an overload.
        args: its arguments; among them manual tensors.
        kwargs: likewise.
    """
    if func.name() in _READS:
        return func(*pytree.tree_map_only(ManualTensor, ManualTensor.agreed, args))
    if func.name() == "aten::equal":
        return args[0].shape == args[1].shape and bool((args[0] == args[1]).all())
    flat, structure = pytree.tree_flatten((args, kwargs))
    indices = [n for n, leaf in enumerate(flat) if isinstance(leaf, ManualTensor)]
    mesh, axes = _mesh_and_axes(func, [flat[n] for n in indices])
    if _leaves_device(kwargs):
        return func(*pytree.tree_map_only(ManualTensor, ManualTensor.agreed, args), **kwargs)
    _check_written(func, args, axes)
    wide = [_over(flat[n], axes) for n in indices]
    replicated_axes = frozenset.intersection(*(operand.replicated_axes for operand in wide))

    def run(*shards: Any) -> Any:
        leaves = list(flat)
        for index, shard in zip(indices, shards, strict=True):
            leaves[index] = shard
        local_args, local_kwargs = pytree.tree_unflatten(leaves, structure)
        token = _MAPPING.set(True)
        try:
            return func(*local_args, **local_kwargs)
        finally:
            _MAPPING.reset(token)

    if torch.Tag.nondeterministic_seeded in func.tags:
        if replicated_axes == {*axes}:
            return _draw_shared(func, run, args, wide, ShardKind(mesh, axes, replicated_axes))
        replicated_axes = frozenset()
    with transforms_allowed():
        results = torch.vmap(run, randomness="different")(*[operand.stacked for operand in wide])
    if schema_of(func).is_mutable:
        for written in _written(args):
            written.replicated_axes = replicated_axes
        if torch.Tag.inplace_view in func.tags:
            args[0].resized()
        return args[0]
    viewed = wide[0] if any(returned.alias_info for returned in schema_of(func).returns) else None

    def wrapped(leaf: Any) -> ManualTensor:
        return ManualTensor.of(leaf, mesh, axes, replicated_axes, viewed)

    return pytree.tree_map_only(torch.Tensor, wrapped, results)


def _draw_shared(func: Any, run: Any, args: Any, wide: list[ManualTensor], like: ShardKind) -> Any:
    """A random operation on replicated shards: one draw for all devices."""
    replicated = NamedSharding(like.mesh, P())
    results = run(*(joined(operand, replicated, ()) for operand in wide))

    def copies(leaf: Any) -> ManualTensor:
        return copies_of(leaf, like)

    if schema_of(func).is_mutable:
        args[0].stacked.copy_(copies(results).stacked)
        return args[0]
    return pytree.tree_map_only(torch.Tensor, copies, results)


def copies_of(t: DeviceTensor, like: ShardKind) -> ManualTensor:
    """A global tensor as a copy on each device, outside autograd.

    Args:
        t: on the `jax` device.
        like: the kind of the result.
    """
    recipe, how = split_recipe(like.mesh, like.axes, P()), (like.mesh, like.axes, P())
    return ManualTensor.recorded(recipe, t, like, stacked_shape, *how)


def _is_narrow(leaf: Any, axes: Axes) -> bool:
    """Whether the gradient of an operand has to be summed over devices along some of the axes."""
    if isinstance(leaf, ManualTensor):
        return leaf.axes != axes
    ours = isinstance(leaf, XLAShardedTensor) or (
        isinstance(leaf, torch.Tensor) and graph_calls.is_traced(leaf)
    )
    return ours and leaf.requires_grad


def _mesh_and_axes(func: Any, manual: list[ManualTensor]) -> tuple[jax.sharding.Mesh, Axes]:
    """The mesh of an operation, and the axes that its result is over."""
    name = getattr(func, "__name__", func)
    mesh = manual[0].mesh
    widest = max((operand.axes for operand in manual), key=len)
    for operand in manual:
        if not same_grid(operand.mesh, mesh):
            raise ShardingError(
                f"{name} has manual operands over two meshes, {mesh} and {operand.mesh}; "
                "enable manual sharding for both over one mesh"
            )
        if not set(operand.axes) <= set(widest):
            raise ShardingError(
                f"{name} has local tensors over {widest} and over {operand.axes} of {mesh}, and "
                "the axes of one must include those of the other: join them with "
                "DTensor.from_local(t, mesh, placements), and take both to_local() on one mesh"
            )
    return mesh, widest


def _over(t: ManualTensor, axes: Axes) -> ManualTensor:
    """Shards over more axes: copies along the new ones."""
    if t.axes == axes:
        return t
    recipe = widen_recipe(t.mesh, t.axes, axes)
    like = ShardKind(t.mesh, axes, t.replicated_axes | {*axes} - {*t.axes})
    return ManualTensor.recorded(recipe, t.stacked, like, restacked_shape, t.mesh, axes)


def _is_in_place(func: Any) -> bool:
    """Whether a torch function writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    is_dunder = name.startswith("__i") or name == "__setitem__"
    return is_dunder or (name.endswith("_") and not name.endswith("__"))


_READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero"})


def _leaves_device(kwargs: Any) -> bool:
    """Whether the result of an operation is to be on another device."""
    device = (kwargs or {}).get("device")
    return device is not None and torch.device(device).type not in naming.OURS


def _check_written(func: Any, args: Any, axes: Axes) -> None:
    """Raise if an operation writes a manual tensor into another one, or one over fewer axes."""
    if not schema_of(func).is_mutable:
        return
    for written in _written(args):
        if not isinstance(written, ManualTensor) or written.axes != axes:
            raise RuntimeError(
                f"{func} would write a value per device into a tensor that is shared by devices; "
                f"{HOW}"
            )


def _written(args: Any) -> Any:
    """The tensors that an operation with a mutable first argument writes to."""
    return args[0] if isinstance(args[0], list | tuple) else args[:1]


class _Copies(torch.autograd.Function):
    """`apply(t, mesh, axes)`: a global tensor, or shards over fewer axes, as copies over `axes`."""

    @staticmethod
    def forward(ctx: Any, t: Any, mesh: Any, axes: Axes) -> ManualTensor:
        ctx.narrow = t.axes if isinstance(t, ManualTensor) else None
        if isinstance(t, ManualTensor):
            return _over(t, axes)
        return copies_of(t, ShardKind(mesh, axes, frozenset(axes)))

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _Sums.apply(gradient[0], ctx.narrow), None, None


class _Sums(torch.autograd.Function):
    """`apply(shards, axes)`: gradients of copies as the gradient of shards over `axes`.

    Of a global tensor for None. It is their sum, or along replicated axes that of one copy.
    """

    @staticmethod
    def forward(ctx: Any, shards: Any, axes: Axes | None) -> Any:
        mesh, wide = ctx.how = shards.mesh, shards.axes
        removed = [name for name in wide if name not in (axes or ())]
        how = tuple((name, "sum") for name in removed if name not in shards.replicated_axes)
        if axes is None:
            return joined(shards, NamedSharding(mesh, P()), how)
        recipe = narrow_recipe(mesh, axes, wide, how)
        like = ShardKind(mesh, axes, shards.replicated_axes & {*axes})
        return ManualTensor.recorded(recipe, shards.stacked, like, restacked_shape, mesh, axes)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _Copies.apply(gradient[0], *ctx.how), None


def joined(shards: ManualTensor, sharding: NamedSharding, how: Reductions) -> Any:
    """The global tensor of shards, outside autograd.

    Args:
        shards: over all axes of the mesh, or some.
        sharding: of the global tensor. If the shards are over some axes only, the partitioner
            chooses it along the others.
        how: see `Reductions`.
    """
    is_over_all_axes = shards.axes == shards.mesh.axis_names
    axes = mesh_of(sharding).axis_names if is_over_all_axes else shards.axes
    constants = (sharding, axes, how, is_over_all_axes)
    return graph_calls.record_or_trace(_joined, _joined_shape, shards.stacked, *constants)


def _joined(
    stacked: Any, sharding: Any, axes: Axes, how: Reductions, is_over_all_axes: bool
) -> Any:
    recipe = join_recipe(mesh_of(sharding), axes, sharding.spec, how)
    (value,) = tapes.recorder().record(recipe, [lazy_tensor.read(stacked)])
    if is_over_all_axes and value.array is None:
        value.layout = sharding_ids.intern(sharding)
    shape = _joined_shape(tuple(stacked.shape), sharding, axes)
    full = lazy_tensor.fresh(Aval.contiguous(shape, stacked.dtype), value)
    if is_over_all_axes:
        marks.keep(full, sharding, None)
    return full


def _joined_shape(shape: Any, sharding: Any, axes: Axes, *_: Any) -> Any:
    return joined_shape(shape, mesh_of(sharding), axes, sharding.spec)
