"""Index arrays that name all elements along an axis in order: reading by them is a reshape.

Masks of `transformers` read a padding mask as `mask[rows, columns]`, with both made by
`torch.arange`. XLA has no form for that but a gather, and its partitioner gathers a sharded mask by
collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch

from isoshard.torch_bridge.engine.values.metas import Slot
from isoshard.torch_bridge.engine.values.views import Chain

READS = frozenset(
    {
        "aten::index.Tensor",
        "aten::_unsafe_index.Tensor",
        "aten::index.Tensor_hacked_twin",
        "aten::_unsafe_index.Tensor_hacked_twin",
    }
)


def ordered_read(
    recipe: Any, entry: Sequence[int], operands: Sequence[Any], makers: Sequence[Any]
) -> jax.Array | None:
    """The result of an entry without a gather; None where it reads no whole axes in order.

    Args:
        recipe: of the entry.
        entry: its recipe's number and the slots of its operands.
        operands: the values of these.
        makers: what made each slot: recipe, entry and more, or None for an input.
    """
    if recipe.name not in READS:
        return None
    indices = recipe.detail.args[1]
    if not all(isinstance(index, Slot) for index in indices):
        return None
    shapes = [_shape(producers(slot, makers)) for slot in entry[2:]]
    if len(shapes) != len(indices) or None in shapes:
        return None
    return _reshaped(operands[0], [shape for shape in shapes if shape is not None])


def _reshaped(x: jax.Array, shapes: Sequence[tuple[int, ...]]) -> jax.Array | None:
    """`x[indices]`, for indices that are ranges of some shapes; None if these are not its axes."""
    shape = np.broadcast_shapes(*shapes)
    axes: list[int] = []
    for extent, index_shape in zip(x.shape, shapes, strict=False):
        padded = (1,) * (len(shape) - len(index_shape)) + index_shape
        long = [axis for axis, size in enumerate(padded) if size > 1]
        if np.prod(padded) != extent or len(long) > 1:
            return None
        axes.append(long[0] if long else -1)
    used = [axis for axis in axes if axis >= 0]
    if len({*used}) != len(used):
        return None
    order = sorted(range(len(axes)), key=lambda dim: axes[dim])
    rest = range(len(axes), x.ndim)
    return x.transpose(*order, *rest).reshape(*shape, *x.shape[len(axes) :])


def producers(slot: int, makers: Sequence[Any]) -> list[Any]:
    """What made a slot, and the first operand of that, and so on: recipes with their entries."""
    chain: list[Any] = []
    while makers[slot] is not None:
        recipe, entry = makers[slot][:2]
        chain.append((recipe, entry))
        if not isinstance(recipe.detail, Chain) and recipe.name != "aten::add.Tensor":
            break
        slot = entry[1]
    return chain


def _shape(chain: Sequence[Any]) -> tuple[int, ...] | None:
    """The shape of `arange(n)`, maybe reshaped, or with 0 added; None of anything else."""
    recipes = [recipe for recipe, _ in chain]
    if not recipes or recipes[-1].name != "aten::arange":
        return None
    call = recipes[-1].detail
    (out,) = call.outs
    if not isinstance(call.args[0], int) or out.dtype not in (torch.int32, torch.int64):
        return None
    shape = tuple(out.size)
    for recipe in reversed(recipes[:-1]):
        if isinstance(recipe.detail, Chain):
            if any(op[0] != "reshape" for op in recipe.detail.ops):
                return None
            shape = tuple(recipe.detail.ops[-1][1])
        elif recipe.detail.args[1:] != (0,) or recipe.detail.outs[0].dtype != out.dtype:
            return None
    return shape
