"""Shapes: an axis in blocks stays so where the primitive takes it as a whole.

Where it does not (a slice of it, a reshape that mixes it with another), it is unpacked first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from ..interpreting import bind, rule
from ..splits import Split
from ..values import Value, aligned


@rule("transpose")
def transpose(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Axes in another order."""
    (value,) = values
    (array,) = bind(eqn, [value.array])
    order = eqn.params["permutation"]
    return [Value(array, tuple(value.splits[axis] for axis in order), value.clean)]


@rule("broadcast_in_dim")
def broadcast(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """New axes; axes of one element are stretched."""
    value = values[0]
    shape, dims = list(eqn.params["shape"]), eqn.params["broadcast_dimensions"]
    value = value.whole([axis for axis, to in enumerate(dims) if value.shape[axis] != shape[to]])
    splits: list[Split | None] = [None] * len(shape)
    for axis, to in enumerate(dims):
        splits[to] = value.splits[axis]
    (array,) = bind(eqn, [value.array], shape=_padded(shape, splits))
    return [Value(array, tuple(splits), value.clean)]


@rule("squeeze")
def squeeze(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Without axes of one element."""
    (value,) = values
    gone = eqn.params["dimensions"]
    value = value.whole(gone)
    (array,) = bind(eqn, [value.array])
    splits = [split for axis, split in enumerate(value.splits) if axis not in gone]
    return [Value(array, tuple(splits), value.clean)]


@rule("reshape")
def reshape(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Another shape; an axis stays in blocks if no other is merged with it, and it is not cut."""
    value = values[0]
    want = eqn.params["new_sizes"]
    kept = dict(_kept_axes(value.shape, want))
    if eqn.params.get("dimensions") is not None:
        kept = {}
    value = value.whole([axis for axis in range(len(value.splits)) if axis not in kept])
    splits: list[Split | None] = [None] * len(want)
    for axis, to in kept.items():
        splits[to] = value.splits[axis]
    (array,) = bind(eqn, [value.array], new_sizes=_padded(want, splits))
    return [Value(array, tuple(splits), value.clean)]


@rule("slice")
def cut(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Axes of which all is taken stay in blocks."""
    (value,) = values
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(start)
    axes = range(len(start))
    taken = [
        axis
        for axis in axes
        if (start[axis], limit[axis], strides[axis]) == (0, value.shape[axis], 1)
    ]
    parts = [axis for axis in axes if axis not in taken]
    cut_from = [(axis, found) for axis in parts if (found := value.splits[axis]) is not None]
    value = value.whole(parts)
    (array,) = bind(eqn, [value.array], limit_indices=_padded(limit, value.splits))
    return [Value(array, value.splits, value.clean, cut_from=tuple(cut_from))]


@rule("dynamic_slice")
def dynamic_cut(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """As `slice`: an axis of which all is taken starts at 0, whatever is asked for."""
    value, *starts = values
    sizes = eqn.params["slice_sizes"]
    value = value.whole([a for a, size in enumerate(sizes) if size != value.shape[a]])
    arrays = [value.array, *(start.whole().array for start in starts)]
    (array,) = bind(eqn, arrays, slice_sizes=_padded(sizes, value.splits))
    return [Value(array, value.splits, value.clean)]


@rule("dynamic_update_slice")
def dynamic_update(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Axes that are updated from end to end stay in blocks."""
    value, update, *starts = values
    part = [axis for axis, size in enumerate(update.shape) if size != value.shape[axis]]
    (inner, update), splits = aligned([value.whole(part), update.whole(part)])
    arrays = [inner.array, update.array, *(start.whole().array for start in starts)]
    (array,) = bind(eqn, arrays)
    found = Value(array, splits)
    for axis in part:
        split = value.splits[axis]
        found = found if split is None else found.packed(axis, split)
    return [found]


@rule("pad")
def pad(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Axes that nothing is added to stay in blocks; what is added reads nothing of padding."""
    value, fill = values
    widths = eqn.params["padding_config"]
    value = value.whole([axis for axis, width in enumerate(widths) if tuple(width) != (0, 0, 0)])
    (array,) = bind(eqn, [value.array, fill.array])
    return [Value(array, value.splits).with_zeros()]


@rule("concatenate")
def concatenate(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Whole along the axis that grows, unless slices of one are put together to its size again."""
    axis = eqn.params["dimension"]
    origins = {dict(value.cut_from).get(axis) for value in values}
    values = [value.whole([axis]) for value in values]
    splits = _common(values, axis)
    laid = [value.laid(splits) for value in values]
    (array,) = bind(eqn, [value.array for value in laid])
    found = Value(array, splits, all(value.clean for value in laid))
    origin = origins.pop()
    if origins or origin is None or origin.extent != found.shape[axis]:
        return [found]
    return [found.packed(axis, origin)]


@rule("split")
def split_apart(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Whole along the axis that is divided."""
    value = values[0].whole([eqn.params["axis"]])
    return [Value(array, value.splits, value.clean) for array in bind(eqn, [value.array])]


def _common(values: Sequence[Value], axis: int) -> tuple[Split | None, ...]:
    """The splits of the first operand that has any, the axis that grows left out."""
    for value in values:
        if value.uneven:
            return tuple(None if at == axis else s for at, s in enumerate(value.splits))
    return values[0].splits


def _padded(shape: Sequence[Any], splits: Sequence[Split | None]) -> tuple[Any, ...]:
    pairs = zip(shape, splits, strict=True)
    return tuple(size if split is None else split.padded for size, split in pairs)


def _kept_axes(have: Sequence[int], want: Sequence[int]) -> list[tuple[int, int]]:
    """The axes that a reshape leaves alone: as many elements before them, and as many in them."""
    if 0 in (*have, *want):
        return []
    before = {(math.prod(want[:to]), size): to for to, size in enumerate(want) if size != 1}
    return [
        (axis, before[math.prod(have[:axis]), size])
        for axis, size in enumerate(have)
        if size != 1 and (math.prod(have[:axis]), size) in before
    ]
