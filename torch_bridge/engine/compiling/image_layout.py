"""Images with channels last, from one convolution to the next.

torch's images are `(batch, channels, *space)`, and every value of a program has torch's shape. XLA
computes convolutions with channels last; on CPUs it would pay a transpose before and after each.
While a program is built, the result of a convolution is kept with channels last, what is done to it
element by element or channel by channel is computed in that order too, and torch's order is made
only for an operator that requires it.

>>> env = Env()
>>> env.last[0] = jnp.zeros((2, 5, 5, 3))           # a convolution's result, channels last
>>> env.append(None)
>>> env[0].shape                                    # what any other operator sees
(2, 3, 5, 5)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from isoshard.core.runtime.shard_map_axes import varying, varying_over
from isoshard.torch_bridge.common.dtypes import physical_dtype
from isoshard.torch_bridge.engine.signatures.bound_op import BoundOp
from isoshard.torch_bridge.lowerings import registry

# Element by element, though torch does not tag them as pointwise.
_POINTWISE = frozenset(
    f"aten::{name}"
    for name in (
        "_to_copy",
        "elu_backward",
        "hardsigmoid_backward",
        "hardswish_backward",
        "hardtanh_backward",
        "leaky_relu_backward",
        "softplus_backward",
    )
)


class Env(list[Any]):
    """The value of each slot while a program is built.

    Attributes:
        last: values with channels last, by slot; where the list has None, torch's order is made
            when it is first read.
    """

    def __init__(self) -> None:
        """No values yet."""
        super().__init__()
        self.last: dict[int, Any] = {}

    def __getitem__(self, slot: Any) -> Any:
        """A value in torch's order."""
        value = super().__getitem__(slot)
        if value is None and slot in self.last:
            value = jnp.moveaxis(self.last[slot], -1, 1)
            self[slot] = value
        return value

    def let_differ(self, slots: Iterable[int]) -> None:
        """Let values differ over the same axes of a `jax.shard_map` around.

        A derivative that a lowering takes by JAX of one that differs less would be a sum over
        devices, and torch's autograd takes each device to have its own.
        """
        stores = (
            (super().__getitem__, super().__setitem__),
            (self.last.get, self.last.__setitem__),
        )
        there = [
            (slot, value, put)
            for slot in slots
            for get, put in stores
            if (value := get(slot)) is not None
        ]
        axes = frozenset[Any]().union(*(varying(value) for _, value, _ in there))
        for slot, value, put in there:
            put(slot, varying_over(value, axes))


class Images:
    """Computes entries of a program on images with channels last, where it can.

    Args:
        env: the values so far.
    """

    def __init__(self, env: Env):
        """See the class."""
        self._env = env

    def rewrite(self, recipe: Any, entry: Sequence[int], scalars: Any) -> list[Any] | None:
        """The results of an entry, or None to compute it in torch's order."""
        call = recipe.detail
        if not isinstance(call, BoundOp) or recipe.random:
            return None
        if call.images is not None:
            return self._variant(call, entry[1:], scalars)
        if any(slot in self._env.last for slot in entry[1:]) and _is_pointwise(call):
            return self._pointwise(call, entry[1:], scalars)
        return None

    def _variant(self, call: BoundOp, slots: Sequence[int], scalars: Any) -> list[Any] | None:
        """A convolution, or a norm of images that are in this order already."""
        images = call.images
        assert images is not None
        begins = "convolution" in call.op.name()
        if not begins and not any(slots[slot] in self._env.last for slot in images.slots):
            return None
        arrays = [
            self._last(slot) if index in images.slots else self._env[slot]
            for index, slot in enumerate(slots)
        ]
        outputs = images.run(arrays, scalars, None)
        flat = list(outputs) if isinstance(outputs, list | tuple) else [outputs]
        metas = [*call.outs, *(call.ins[index] for index in call.written)]
        results: list[Any] = []
        for index, (value, meta) in enumerate(zip(flat, metas, strict=True)):
            if value is not None and meta is not None:
                value = value.astype(physical_dtype(meta.dtype))
                results.append(self._keep(value, len(results), index in images.results))
        return results

    def _pointwise(self, call: BoundOp, slots: Sequence[int], scalars: Any) -> list[Any] | None:
        (meta,) = call.outs
        rank = len(meta.size) if meta else 0
        if meta is None or not any(
            slot in self._env.last and self._env.last[slot].ndim == rank for slot in slots
        ):
            return None
        value = call.run([self._broadcast(slot, rank) for slot in slots], scalars, None)
        return [self._keep(value.astype(physical_dtype(meta.dtype)), 0, True)]

    def _keep(self, value: Any, index: int, last: bool) -> Any:
        """Put the next result but `index` where it belongs; None if that is not the list."""
        if not last:
            return value
        self._env.last[len(self._env) + index] = value
        return None

    def _last(self, slot: int) -> Any:
        """A value with channels last."""
        if slot not in self._env.last:
            self._env.last[slot] = jnp.moveaxis(self._env[slot], 1, -1)
        return self._env.last[slot]

    def _broadcast(self, slot: int, rank: int) -> Any:
        """An operand that broadcasts against images of `rank` axes with channels last."""
        if slot in self._env.last and self._env.last[slot].ndim == rank:
            return self._env.last[slot]
        value = self._env[slot]
        if value.ndim == 0:
            return value
        if value.ndim == rank:
            return self._last(slot)
        return jnp.moveaxis(value.reshape((1,) * (rank - value.ndim) + value.shape), 1, -1)


def _is_pointwise(call: BoundOp) -> bool:
    named = call.op.name() in _POINTWISE or torch.Tag.pointwise in call.op.tags
    if not named or len(call.outs) != 1 or call.written:
        return False
    lowering = registry.find(call.op)
    return lowering is not None and not lowering.strided
