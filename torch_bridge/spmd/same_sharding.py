"""`shard_as`: two trees of tensors with the same shardings."""

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

_SAME_SHARDING = Recipe("shard_as", lambda arrays, _scalars, _key: list(shard_alike(*arrays)), 2)


def shard_as(a: DeviceTensor, b: DeviceTensor) -> tuple[Any, Any]:
    """Two trees like `a` and `b`, corresponding tensors with the same sharding.

    Where one of the two has a sharding (that of the tensor in `a` first), the other gets it.
    Elsewhere XLA's partitioner chooses a sharding for both. So have their gradients.

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
        >>> marked = xs.mark_sharding(torch.ones(8).to("jax"), mesh, ("x",))
        >>> shard_as({"w": marked}, {"w": torch.zeros(8).to("jax")})[1]["w"].sharding_spec
        '{devices=[8]0,1,2,3,4,5,6,7}'
    """
    left, structure = pytree.tree_flatten(a)
    right, other = pytree.tree_flatten(b)
    if structure != other:
        raise ShardingError(
            f"shard_as takes two trees of one structure, not {structure} and {other}"
        )
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
            f"trees; corresponding leaves are {_kind(x)} and {_kind(y)}"
        )
    if x.shape != y.shape:
        raise ShardingError(
            f"shard_as takes two tensors of one shape, not {tuple(x.shape)} and {tuple(y.shape)}"
        )
    pair: Any = _SameSharding.apply(x, y)
    return pair


class _SameSharding(torch.autograd.Function):
    """Both tensors as new ones, with one sharding."""

    @staticmethod
    def forward(ctx: Any, *pair: Any) -> Any:
        sharding = _existing_sharding(pair)
        if sharding is not None:
            return tuple(marks.constrained(tensor, sharding) for tensor in pair)
        operands = [lazy_tensor.read(tensor) for tensor in pair]
        results = tapes.recorder().record(_SAME_SHARDING, operands)
        avals = [Aval.contiguous(tuple(tensor.shape), tensor.dtype) for tensor in pair]
        return tuple(map(lazy_tensor.fresh, avals, results))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _SameSharding.apply(*gradients)


def _existing_sharding(pair: Any) -> marks.Sharding | None:
    """The sharding of one of the two: a marked one, else a split one, else any."""
    shardings = [marks.placed(tensor) for tensor in pair]
    by_mark = [
        sharding for tensor, sharding in zip(pair, shardings, strict=True) if marks.marked(tensor)
    ]
    by_data = sorted(
        (sharding for sharding in shardings if sharding),
        key=lambda sharding: not any(sharding.spec),
    )
    return next(iter([*by_mark, *by_data]), None)


def _kind(leaf: Any) -> str:
    return f"a tensor on {leaf.device}" if isinstance(leaf, torch.Tensor) else repr(leaf)
