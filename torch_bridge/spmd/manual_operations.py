"""How operations act on manual tensors: mapped over the devices, with copies of what is whole.

An operation is mapped with `torch.vmap` over the leading axis of stacked pieces. What is whole, or
over fewer axes, and requires a gradient, becomes copies before autograd sees the operation, so that
their gradients become one again. Numbers that are drawn differ from device to device, but for the
copies of a replicated tensor (`alike`): these stay alike, so one device draws for all of them.
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
from isoshard.torch_bridge.engine.values import layout_numbers
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.layout import graph_calls, marks
from isoshard.torch_bridge.layout.method_bodies import body_of
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

from .agreed_value import HOW
from .manual_recipes import (
    Axes,
    Reductions,
    cut_recipe,
    cut_shape,
    join_recipe,
    joined_shape,
    narrow_recipe,
    restacked_shape,
    widen_recipe,
)
from .manual_tensor import ManualTensor, ShardKind

_MAPPING: contextvars.ContextVar[bool] = contextvars.ContextVar("mapping", default=False)


def is_mapping() -> bool:
    """Whether the operation being dispatched is mapped over each device's pieces."""
    return _MAPPING.get()


@body_of("manual_function")
def with_copies(func: Opaque, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a function of torch's, where each has the gradient that it should.

    Args:
        func: the function.
        args: its arguments; among them manual tensors.
        kwargs: likewise.
    """
    given: Any = (args, kwargs)
    if not torch.is_grad_enabled() or getattr(func, "__module__", "") == "torch.autograd":
        return given
    leaves = pytree.tree_leaves(given)
    manual = [leaf for leaf in leaves if isinstance(leaf, ManualTensor)]
    if not manual or not any(_is_narrow(leaf, manual[0].axes) for leaf in leaves):
        return given
    mesh, axes = _place(func, manual)
    written = args[0] if args and _is_in_place(func) else None

    def copied(leaf: Any) -> Any:
        is_narrow = leaf is not written and _is_narrow(leaf, axes)
        return _Copies.apply(leaf, mesh, axes) if is_narrow else leaf

    return pytree.tree_map(copied, given)


@body_of("manual_dispatch")
def mapped_operation(func: Opaque, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """One operation on each device's pieces.

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
    places = [n for n, leaf in enumerate(flat) if isinstance(leaf, ManualTensor)]
    mesh, axes = _place(func, [flat[n] for n in places])
    if _leaves_device(kwargs):
        return func(*pytree.tree_map_only(ManualTensor, ManualTensor.agreed, args), **kwargs)
    _check_written(func, args, axes)
    wide = [_over(flat[n], axes) for n in places]
    alike = frozenset.intersection(*(one.alike for one in wide))

    def run(*pieces: Any) -> Any:
        leaves = list(flat)
        for place, piece in zip(places, pieces, strict=True):
            leaves[place] = piece
        given, named = pytree.tree_unflatten(leaves, structure)
        token = _MAPPING.set(True)
        try:
            return func(*given, **named)
        finally:
            _MAPPING.reset(token)

    if torch.Tag.nondeterministic_seeded in func.tags:
        if alike == {*axes}:
            return _drawn_once(func, run, args, wide, ShardKind(mesh, axes, alike))
        alike = frozenset()
    with transforms_allowed():
        got = torch.vmap(run, randomness="different")(*[one.stacked for one in wide])
    if schema_of(func).is_mutable:
        for one in _written(args):
            one.alike = alike
        if torch.Tag.inplace_view in func.tags:
            args[0].resized()
        return args[0]
    shown = wide[0] if any(one.alias_info for one in schema_of(func).returns) else None
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: ManualTensor.of(leaf, mesh, axes, alike, shown), got
    )


def _drawn_once(func: Any, run: Any, args: Any, wide: list[ManualTensor], like: ShardKind) -> Any:
    """An operation that draws numbers, on pieces that are alike: one draw for all devices."""
    whole = NamedSharding(like.mesh, P())
    got = run(*(joined(one, whole, ()) for one in wide))

    def copies(leaf: Any) -> ManualTensor:
        return copies_of(leaf, like)

    if schema_of(func).is_mutable:
        args[0].stacked.copy_(copies(got).stacked)
        return args[0]
    return pytree.tree_map_only(torch.Tensor, copies, got)


def copies_of(t: DeviceTensor, like: ShardKind) -> ManualTensor:
    """A whole as each device's own piece, outside autograd.

    Args:
        t: on the `jax` device.
        like: what they are.
    """
    recipe, how = cut_recipe(like.mesh, like.axes, P()), (like.mesh, like.axes, P())
    return ManualTensor.made(recipe, t, like, cut_shape, *how)


def _is_narrow(leaf: Any, axes: Axes) -> bool:
    """Whether the gradient of an operand has to be summed over devices along some of the axes."""
    if isinstance(leaf, ManualTensor):
        return leaf.axes != axes
    ours = isinstance(leaf, XLAShardedTensor) or (
        isinstance(leaf, torch.Tensor) and graph_calls.is_traced(leaf)
    )
    return ours and leaf.requires_grad


def _place(func: Any, manual: list[ManualTensor]) -> tuple[jax.sharding.Mesh, Axes]:
    """The mesh of an operation, and the axes that its result is over."""
    name = getattr(func, "__name__", func)
    mesh = manual[0].home
    widest = max((one.axes for one in manual), key=len)
    for one in manual:
        if not same_grid(one.home, mesh):
            raise ShardingError(
                f"{name} has manual operands over two meshes, {mesh} and {one.home}; "
                "enable manual sharding for both over one mesh"
            )
        if not set(one.axes) <= set(widest):
            raise ShardingError(
                f"{name} has pieces over {widest} and pieces over {one.axes} of {mesh}, and one "
                "of the two must be among the other: make them whole with "
                "DTensor.from_local(t, mesh, placements), and take both to_local() on one mesh"
            )
    return mesh, widest


def _over(t: ManualTensor, axes: Axes) -> ManualTensor:
    """Pieces over more axes: copies along the new ones."""
    if t.axes == axes:
        return t
    recipe, alike = widen_recipe(t.home, t.axes, axes), t.alike | {*axes} - {*t.axes}
    like = ShardKind(t.home, axes, alike)
    return ManualTensor.made(recipe, t.stacked, like, restacked_shape, t.home, axes)


def _is_in_place(func: Any) -> bool:
    """Whether a function of torch's writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    is_dunder = name.startswith("__i") or name == "__setitem__"
    return is_dunder or (name.endswith("_") and not name.endswith("__"))


_READS = frozenset({"aten::_local_scalar_dense", "aten::is_nonzero"})


def _leaves_device(kwargs: Any) -> bool:
    """Whether an operation is asked for a result on another device."""
    device = (kwargs or {}).get("device")
    return device is not None and torch.device(device).type not in naming.OURS


def _check_written(func: Any, args: Any, axes: Axes) -> None:
    """Refuse to write a manual tensor into another, or into one over fewer axes."""
    if not schema_of(func).is_mutable:
        return
    for written in _written(args):
        if not isinstance(written, ManualTensor) or written.axes != axes:
            raise RuntimeError(
                f"{func} would write one value per device into a tensor that has one for several; "
                f"{HOW}"
            )


def _written(args: Any) -> Any:
    """What an operation that writes to its first argument writes to."""
    return args[0] if isinstance(args[0], list | tuple) else args[:1]


class _Copies(torch.autograd.Function):
    """`apply(t, mesh, axes)`: a whole, or pieces over fewer axes, as copies over these."""

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
    """`apply(pieces, axes)`: what copies get as gradients, as one of pieces over these axes.

    A whole for None. It is their sum, or that of one of them where they are alike.
    """

    @staticmethod
    def forward(ctx: Any, pieces: Any, axes: Axes | None) -> Any:
        mesh, wide = ctx.how = pieces.home, pieces.axes
        gone = [name for name in wide if name not in (axes or ())]
        how = tuple((name, "sum") for name in gone if name not in pieces.alike)
        if axes is None:
            return joined(pieces, NamedSharding(mesh, P()), how)
        recipe, alike = narrow_recipe(mesh, axes, wide, how), pieces.alike & {*axes}
        like = ShardKind(mesh, axes, alike)
        return ManualTensor.made(recipe, pieces.stacked, like, restacked_shape, mesh, axes)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _Copies.apply(gradient[0], *ctx.how), None


def joined(pieces: ManualTensor, sharding: NamedSharding, how: Reductions) -> Any:
    """The whole that pieces make, outside autograd.

    Args:
        pieces: over all axes of the mesh, or some.
        sharding: how they lie in the whole. If they are over all axes, it lies so; otherwise along
            the other axes as the partitioner has it.
        how: see `Reductions`.
    """
    mesh, is_known = mesh_of(sharding), pieces.axes == pieces.home.axis_names
    axes = mesh.axis_names if is_known else pieces.axes
    asked = (sharding, axes, how, is_known)
    return graph_calls.laid_by(_joined, _joined_shape, pieces.stacked, *asked)


def _joined(stacked: Any, sharding: Any, axes: Axes, how: Reductions, is_known: bool) -> Any:
    recipe = join_recipe(mesh_of(sharding), axes, sharding.spec, how)
    (value,) = tapes.recorder().record(recipe, [lazy_tensor.read(stacked)])
    if is_known and value.array is None:
        value.layout = layout_numbers.intern(sharding)
    shape = _joined_shape(tuple(stacked.shape), sharding, axes)
    whole = lazy_tensor.fresh(Aval.contiguous(shape, stacked.dtype), value)
    if is_known:
        marks.keep(whole, sharding, None)
    return whole


def _joined_shape(shape: Any, sharding: Any, axes: Axes, *_: Any) -> Any:
    return joined_shape(shape, mesh_of(sharding), axes, sharding.spec)
