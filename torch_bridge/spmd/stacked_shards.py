"""Pieces handed through a program of its own, as the loop of scanned layers, as ordinary tensors.

Such a program takes and returns ordinary tensors. `ManualLeaves` remembers which values of a
nesting are pieces, gives them as stacked tensors, and makes pieces of these again inside.

>>> import isoshard.torch_bridge as xs
>>> t = torch.ones(8, 6, device="jax")
>>> mine = xs.enable_manual_sharding(t, ("x", None), mesh=xs.get_1d_mesh("x"))
>>> form = ManualLeaves((mine, 3))
>>> stacked, number = form.stacked((mine, 3))
>>> stacked.shape, form.pieces((stacked, number))[0].shape
(torch.Size([8, 1, 6]), torch.Size([1, 6]))

What is alike on all devices has a gradient that is alike, in and around the program; it is refused
where it turns out otherwise, since the program is made before.
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


class LessAlike(Exception):
    """A program returns pieces that differ between devices where it takes copies that are alike."""


class ManualLeaves:
    """Which values of a nesting are pieces, and of what kind.

    Args:
        values: the nesting.
    """

    def __init__(self, values: Opaque):
        """See the class."""
        self._kinds = [_kind(leaf) for leaf in pytree.tree_leaves(values)]

    def __bool__(self) -> bool:
        """Whether there are any."""
        return any(kind is not None for kind in self._kinds)

    def stacked(self, values: Opaque) -> Any:
        """The nesting with stacked tensors for pieces.

        Args:
            values: a nesting of the same kinds, from the first on.

        Raises:
            TypeError: there are no pieces where there should be.
            LessAlike: pieces differ where they were alike; they are not taken for alike any more.
        """
        leaves, structure = pytree.tree_flatten(values)
        for number, leaf in enumerate(leaves):
            kind = self._kinds[number] if number < len(self._kinds) else None
            is_like = isinstance(leaf, ManualTensor) and kind is not None and leaf.axes == kind.axes
            if is_like != (kind is not None or isinstance(leaf, ManualTensor)):
                wanted = "a whole tensor" if kind is None else f"pieces over {kind.axes}"
                raise TypeError(f"this takes {wanted} in place {number} and returns {leaf!r}")
            if is_like and kind is not None and not kind.alike <= leaf.alike:
                self._kinds[number] = kind._replace(alike=kind.alike & leaf.alike)
                raise LessAlike
            leaves[number] = _Stacked.apply(leaf, kind) if is_like else leaf
        return pytree.tree_unflatten(leaves, structure)

    def pieces(self, values: Opaque) -> Any:
        """The nesting with pieces for stacked tensors.

        Args:
            values: of `stacked`, or like it.
        """
        leaves, structure = pytree.tree_flatten(values)
        made = [
            leaf if kind is None else _Unstacked.apply(leaf, kind)
            for leaf, kind in zip(leaves, self._kinds, strict=False)
        ]
        return pytree.tree_unflatten(made, structure)


def _kind(leaf: Any) -> ShardKind | None:
    if not isinstance(leaf, ManualTensor):
        return None
    return ShardKind(leaf.home, leaf.axes, leaf.alike)


class _Stacked(torch.autograd.Function):
    """`apply(pieces, kind)`: the tensor that they are stacked in."""

    @staticmethod
    def forward(ctx: Any, pieces: Any, kind: ShardKind) -> Any:
        ctx.kind = kind
        stacked = pieces.stacked
        aval = Aval.contiguous(tuple(stacked.shape), stacked.dtype)
        return lazy_tensor.fresh(aval, lazy_tensor.read(stacked))

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return _Unstacked.apply(gradient[0], ctx.kind), None


class _Unstacked(torch.autograd.Function):
    """`apply(stacked, kind)`: the pieces."""

    @staticmethod
    def forward(ctx: Any, stacked: Any, kind: ShardKind) -> Any:
        ctx.kind = kind
        aval = Aval.contiguous(tuple(stacked.shape), stacked.dtype)
        own = lazy_tensor.fresh(aval, lazy_tensor.read(stacked))
        return ManualTensor.of(own, kind.mesh, kind.axes, kind.alike)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        kind, pieces = ctx.kind, gradient[0]
        if not isinstance(pieces, ManualTensor):  # the value that all devices have was used
            pieces = copies_of(pieces, kind._replace(alike=frozenset(kind.axes)))
        if not kind.alike <= pieces.alike:
            raise RuntimeError(
                f"pieces of shape {tuple(pieces.shape)} that go through scanned layers are the "
                f"same on all devices along {sorted(kind.alike - pieces.alike)}, and their "
                "gradient differs there: what each device makes of its copy is a part of a sum. "
                "Say so where the copies are taken, to_local(grad_placements=[Partial()]), or let "
                "a parallel style take them"
            )
        return _Stacked.apply(pieces, kind), None
