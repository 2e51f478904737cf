"""`shard_as`: two trees of tensors laid out alike, without saying how."""

from __future__ import annotations

from typing import Any

import torch

from isoshard.core.errors import ShardingError
from isoshard.core.layout.sharding_groups import shard_alike
from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common import naming
from isoshard.torch_bridge.common.argument_types import DeviceTensor
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.tape import Recipe
from isoshard.torch_bridge.engine.values.value import Aval
from isoshard.torch_bridge.layout import marks
from isoshard.torch_bridge.tensors.tensor import XLAShardedTensor

_ALIKE = Recipe("shard_as", lambda arrays, _scalars, _key: list(shard_alike(*arrays)), 2)


def shard_as(a: DeviceTensor, b: DeviceTensor) -> tuple[Any, Any]:
    """Two trees like `a` and `b`, corresponding tensors laid out alike.

    Where the layout of one of the two is known (the one in `a` counts first), the other gets it.
    Elsewhere XLA's partitioner chooses one for both. Gradients are laid out alike too.

    Args:
        a: nested lists, tuples and dictionaries of tensors on the `jax` device and None.
        b: of the same structure, with tensors of the same shapes.

    Returns:
        The two new trees.

    Raises:
        ShardingError: they differ in structure or in shapes, or hold something else.

    Example:
        >>> import isoshard.torch_bridge as xs
        >>> mesh = xs.Mesh(range(8), (8,), ("x",))
        >>> known = xs.mark_sharding(torch.ones(8).to("jax"), mesh, ("x",))
        >>> shard_as({"w": known}, {"w": torch.zeros(8).to("jax")})[1]["w"].sharding_spec
        '{devices=[8]0,1,2,3,4,5,6,7}'
    """
    left, structure = pytree.tree_flatten(a)
    right, other = pytree.tree_flatten(b)
    if structure != other:
        raise ShardingError(f"shard_as takes two trees of one structure: {structure} and {other}")
    pairs = [_pair(x, y) for x, y in zip(left, right, strict=True)]
    return (
        pytree.tree_unflatten([x for x, _ in pairs], structure),
        pytree.tree_unflatten([y for _, y in pairs], structure),
    )


def _pair(x: Any, y: Any) -> tuple[Any, Any]:
    if x is None and y is None:
        return None, None
    if not isinstance(x, XLAShardedTensor) or not isinstance(y, XLAShardedTensor):
        raise ShardingError(
            f"shard_as takes tensors on the {naming.current().type} device, or None in both "
            "places; corresponding are "
            f"{_kind(x)} and {_kind(y)}"
        )
    if x.shape != y.shape:
        raise ShardingError(
            f"shard_as takes tensors of one shape, and {tuple(x.shape)} meets {tuple(y.shape)}"
        )
    alike: Any = _Alike.apply(x, y)
    return alike


class _Alike(torch.autograd.Function):
    """Both tensors anew, with one layout."""

    @staticmethod
    def forward(ctx: Any, *pair: Any) -> Any:
        known = _known(pair)
        if known is not None:
            return tuple(marks.laid_out(tensor, known) for tensor in pair)
        values = tapes.recorder().record(_ALIKE, [lazy_tensor.read(tensor) for tensor in pair])
        avals = [Aval.contiguous(tuple(tensor.shape), tensor.dtype) for tensor in pair]
        return tuple(map(lazy_tensor.fresh, avals, values))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _Alike.apply(*gradients)


def _known(pair: Any) -> marks.Sharding | None:
    """The layout of one of the two: of what was marked, else of what is split, else of any."""
    found = [marks.placed(tensor) for tensor in pair]
    by_mark = [layout for tensor, layout in zip(pair, found, strict=True) if marks.marked(tensor)]
    by_data = sorted(
        (layout for layout in found if layout), key=lambda layout: not any(layout.spec)
    )
    return next(iter([*by_mark, *by_data]), None)


def _kind(leaf: Any) -> str:
    return f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else repr(leaf)
