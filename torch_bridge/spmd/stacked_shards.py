"""Manual tensors as operands of a subprogram, such as the loop of scanned layers.

A subprogram takes and returns ordinary tensors. `ManualLeaves` remembers which leaves of a tree are
manual, replaces them by their stacked tensors, and makes manual tensors of these again inside.

>>> import isoshard.torch_bridge as xs
>>> t = torch.ones(8, 6, device="jax")
>>> local = xs.enable_manual_sharding(t, ("x", None), mesh=xs.get_1d_mesh("x"))
>>> form = ManualLeaves((local, 3))
>>> stacked, number = form.stacked((local, 3))
>>> stacked.shape, form.unstacked((stacked, number))[0].shape
(torch.Size([8, 1, 6]), torch.Size([1, 6]))

What is replicated over devices has a gradient that is replicated too, in and around the program.
The program is traced before the gradient is there, so a gradient that is not replicated raises.
"""

from __future__ import annotations

from typing import Any

import torch

from isoshard.torch_bridge._torch_internals import pytree
from isoshard.torch_bridge.common.argument_types import Opaque
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.values.value import Aval

from .manual_operations import copies_of
from .manual_tensor import ManualTensor, ShardKind


class NoLongerReplicated(Exception):
    """A subprogram takes replicated shards, and returns shards that differ between devices."""


class ManualLeaves:
    """Which leaves of a tree are manual tensors, and of what kind.

    Args:
        values: the tree.
    """

    def __init__(self, values: Opaque):
        """See the class."""
        self._kinds = [_kind(leaf) for leaf in pytree.tree_leaves(values)]

    def __bool__(self) -> bool:
        """Whether any leaf is."""
        return any(kind is not None for kind in self._kinds)

    def stacked(self, values: Opaque) -> Any:
        """The tree with stacked tensors for manual ones.

        Raises:
            TypeError: a leaf is of another kind.
            NoLongerReplicated: shards differ that were replicated; from now on they count as
                different.
        """
        leaves, structure = pytree.tree_flatten(values)
        for index, leaf in enumerate(leaves):
            kind = self._kinds[index] if index < len(self._kinds) else None
            is_like = isinstance(leaf, ManualTensor) and kind is not None and leaf.axes == kind.axes
            if is_like != (kind is not None or isinstance(leaf, ManualTensor)):
                expected = "a global tensor" if kind is None else f"local tensors over {kind.axes}"
                raise TypeError(f"this takes {expected} as leaf {index} and returns {leaf!r}")
            if is_like and kind is not None and kind.replicated_axes - leaf.replicated_axes:
                replicated_axes = kind.replicated_axes & leaf.replicated_axes
                self._kinds[index] = kind._replace(replicated_axes=replicated_axes)
                raise NoLongerReplicated
            leaves[index] = _Stacked.apply(leaf, kind) if is_like else leaf
        return pytree.tree_unflatten(leaves, structure)

    def unstacked(self, values: Opaque) -> Any:
        """The tree with manual tensors for stacked ones.

        Args:
            values: of `stacked`, or like it.
        """
        leaves, structure = pytree.tree_flatten(values)
        unstacked = [
            leaf if kind is None else _Unstacked.apply(leaf, kind)
            for leaf, kind in zip(leaves, self._kinds, strict=False)
        ]
        return pytree.tree_unflatten(unstacked, structure)


def _kind(leaf: Any) -> ShardKind | None:
    if not isinstance(leaf, ManualTensor):
        return None
    return ShardKind(leaf.mesh, leaf.axes, leaf.replicated_axes)


class _Stacked(torch.autograd.Function):
    """`apply(shards, kind)`: the stacked tensor."""

    @staticmethod
    def forward(ctx: Any, shards: Any, kind: ShardKind) -> Any:
        ctx.kind = kind
        stacked = shards.stacked
        aval = Aval.contiguous(tuple(stacked.shape), stacked.dtype)
        return lazy_tensor.fresh(aval, lazy_tensor.read(stacked))

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _Unstacked.apply(gradient[0], ctx.kind), None


class _Unstacked(torch.autograd.Function):
    """`apply(stacked, kind)`: the shards."""

    @staticmethod
    def forward(ctx: Any, stacked: Any, kind: ShardKind) -> Any:
        ctx.kind = kind
        aval = Aval.contiguous(tuple(stacked.shape), stacked.dtype)
        unshared = lazy_tensor.fresh(aval, lazy_tensor.read(stacked))
        return ManualTensor.of(unshared, kind.mesh, kind.axes, kind.replicated_axes)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        kind, shards = ctx.kind, gradient[0]
        if not isinstance(shards, ManualTensor):  # the value that all devices have was used
            shards = copies_of(shards, kind._replace(replicated_axes=frozenset(kind.axes)))
        if differing := kind.replicated_axes - shards.replicated_axes:
            raise RuntimeError(
                f"local tensors of shape {tuple(shards.shape)} that go through scanned layers are "
                f"replicated over {sorted(differing)}, and their gradients are not: each device's "
                "is a term of a sum. Declare it where the local tensors are made, "
                "to_local(grad_placements=[Partial()]), or let a parallel style make them"
            )
        return _Stacked.apply(shards, kind), None
