"""Shapes: an axis in blocks remains so where the primitive takes it in full.

Where it does not (a slice of it, a reshape that mixes it with another), it is unpacked first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from isoshard.core.blocks.block_values import Value, aligned, joint_hints
from isoshard.core.blocks.hints import Even, but
from isoshard.core.blocks.interpreting import bind, rule
from isoshard.core.blocks.splits import AxisSplit
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn


@rule("transpose")
def transpose(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Axes in another order."""
    (value,) = values
    (array,) = bind(eqn, [value.array])
    return [_with_axes(value, array, enumerate(eqn.params["permutation"]))]


@rule("broadcast_in_dim")
def broadcast(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """New axes; axes of one element are stretched."""
    value = values[0]
    shape, dims = list(eqn.params["shape"]), eqn.params["broadcast_dimensions"]
    value = value.unpacked([axis for axis, to in enumerate(dims) if value.shape[axis] != shape[to]])
    splits: list[AxisSplit | None] = [None] * len(shape)
    for axis, to in enumerate(dims):
        splits[to] = value.splits[axis]
    (array,) = bind(eqn, [value.array], shape=_padded(shape, splits))
    unchanged = [(to, axis) for axis, to in enumerate(dims) if value.shape[axis] == shape[to]]
    return [_with_axes(value, array, unchanged)]


@rule("squeeze")
def squeeze(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Without axes of one element."""
    (value,) = values
    gone = eqn.params["dimensions"]
    value = value.unpacked(gone)
    (array,) = bind(eqn, [value.array])
    left = [axis for axis in range(len(value.splits)) if axis not in gone]
    return [_with_axes(value, array, enumerate(left))]


@rule("stack")
def stack(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """A new axis over values with the same splits (from JAX 0.11 on)."""
    values, splits = aligned(values)
    (array,) = bind(eqn, [value.array for value in values])
    like = Value(
        values[0].array, splits, all(value.clean for value in values), hints=joint_hints(values)
    )
    before = [to for to in range(len(array.shape)) if to != eqn.params["axis"]]
    return [_with_axes(like, array, zip(before, range(len(splits)), strict=True))]


@rule("unstack")
def unstack(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Without an axis, a result for each of its elements (from JAX 0.11 on)."""
    (value,) = values
    gone = eqn.params["axis"]
    value = value.unpacked([gone])
    left = [axis for axis in range(len(value.splits)) if axis != gone]
    return [_with_axes(value, array, enumerate(left)) for array in bind(eqn, [value.array])]


@rule("reshape")
def reshape(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Another shape; an axis remains in blocks if none before it is merged with it.

    Merged with later axes, its blocks grow by their sizes; divided, its first factor is in blocks
    if the blocks are multiples of the rest.
    """
    value = values[0]
    want = eqn.params["new_sizes"]
    in_order = eqn.params.get("dimensions") is None
    unchanged = dict(_unchanged_axes(value.shape, want)) if in_order else {}
    scaled = _scaled_axes(value, want, unchanged) if in_order else {}
    value = value.unpacked(
        [axis for axis in range(len(value.splits)) if axis not in {*unchanged, *scaled}]
    )
    splits: list[AxisSplit | None] = [None] * len(want)
    for axis, to in unchanged.items():
        splits[to] = value.splits[axis]
    for to, split in scaled.values():
        splits[to] = split
    (array,) = bind(eqn, [value.array], new_sizes=_padded(want, splits))
    result = _with_axes(value, array, [(to, axis) for axis, to in unchanged.items()])
    return [dataclasses.replace(result, splits=tuple(splits))]


@rule("dynamic_slice")
def dynamic_slice(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """As `slice`: an axis sliced in full starts at 0, whatever the index."""
    value, *starts = values
    sizes = eqn.params["slice_sizes"]
    partial = [a for a, size in enumerate(sizes) if size != value.shape[a]]
    value = value.unpacked(partial)
    arrays = [value.array, *(start.unpacked().array for start in starts)]
    (array,) = bind(eqn, arrays, slice_sizes=_padded(sizes, value.splits))
    hints = but(value.hints, partial)
    return [Value(array, value.splits, value.clean, hints=hints)]


def _with_axes(value: Value, array: Any, pairs: Iterable[tuple[int, int]]) -> Value:
    """A result some of whose axes are axes of a value; pairs of (result axis, value axis)."""
    splits: list[AxisSplit | None] = [None] * len(array.shape)
    hints: list[Even | None] = [None] * len(array.shape)
    for to, axis in pairs:
        splits[to], hints[to] = value.splits[axis], value.hints[axis]
    return Value(array, tuple(splits), value.clean, hints=tuple(hints))


def _padded(shape: Sequence[Any], splits: Sequence[AxisSplit | None]) -> tuple[Any, ...]:
    pairs = zip(shape, splits, strict=True)
    return tuple(size if split is None else split.padded for size, split in pairs)


def _unchanged_axes(have: Sequence[int], want: Sequence[int]) -> list[tuple[int, int]]:
    """The axes that a reshape keeps: as many elements before them, and as many in them."""
    if 0 in (*have, *want):
        return []
    before = {(math.prod(want[:to]), size): to for to, size in enumerate(want) if size != 1}
    return [
        (axis, before[math.prod(have[:axis]), size])
        for axis, size in enumerate(have)
        if size != 1 and (math.prod(have[:axis]), size) in before
    ]


def _scaled_axes(
    value: Value, want: Sequence[int], unchanged: dict[int, int]
) -> dict[int, tuple[int, AxisSplit]]:
    """Axes in blocks that a reshape merges with later ones, or divides, and their new splits."""
    have = value.shape
    scaled: dict[int, tuple[int, AxisSplit]] = {}
    if 0 in (*have, *want):
        return scaled
    begins = {math.prod(want[:to]): to for to, size in enumerate(want) if size != 1}
    for axis, split in enumerate(value.splits):
        to = begins.get(math.prod(have[:axis]))
        if split is None or have[axis] == 1 or axis in unchanged or to is None:
            continue
        if want[to] % have[axis] == 0:
            times = want[to] // have[axis]
            sizes, block = tuple(size * times for size in split.sizes), split.block * times
        else:
            ratio = have[axis] // want[to]
            if have[axis] % want[to] or any(size % ratio for size in (*split.sizes, split.block)):
                continue
            sizes, block = tuple(size // ratio for size in split.sizes), split.block // ratio
        scaled[axis] = to, dataclasses.replace(split, sizes=sizes, block=block)
    return scaled
