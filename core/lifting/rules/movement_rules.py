"""Slices, padding, concatenation and reversal, by moving rows between devices.

No axis is gathered for it.

Rows that remain do not move. A concatenated axis has the split of the one its slices came
from; or of the operand with more than half of its rows; or else that of `torch.chunk`.
Steps other than 1 take the axis out of its blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from isoshard.core.blocks.axis_moves import at_home, in_chunks, movable, move_axis
from isoshard.core.blocks.block_values import Value, aligned, joint, joint_hints
from isoshard.core.blocks.hints import but
from isoshard.core.blocks.interpreting import bind, rule
from isoshard.core.blocks.splits import AxisSplit
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn


@rule("slice")
def slice_rule(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Axes sliced in full are unchanged; of others, the rows remain on their devices."""
    (value,) = values
    start, limit = list(eqn.params["start_indices"]), list(eqn.params["limit_indices"])
    strides = eqn.params["strides"] or (1,) * len(start)
    sliced = []
    for axis, step in enumerate(strides):
        split = value.splits[axis]
        count = limit[axis] - start[axis]
        if split is None or (count, step) == (split.extent, 1):
            continue
        sliced.append((axis, split))
        if step == 1 and movable(split, split) and count > 0:
            value = _moved(value, axis, at_home(split, -start[axis], count), -start[axis])
            start[axis], limit[axis] = 0, count
        else:
            value = value.unpacked([axis])
    (array,) = bind(
        eqn, [value.array], start_indices=tuple(start), limit_indices=_padded(limit, value.splits)
    )
    aval: Any = eqn.outvars[0].aval
    sizes = aval.shape
    hints = but(value.hints, [axis for axis, size in enumerate(sizes) if size != value.shape[axis]])
    return [Value(array, value.splits, value.clean, sliced_from=tuple(sliced), hints=hints)]


@rule("pad")
def pad(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Rows remain on their devices; new ones join the nearest."""
    value, fill = values
    config = [tuple(width) for width in eqn.params["padding_config"]]
    widths = list(config)
    outside = np.False_
    for axis, (low, high, between) in enumerate(widths):
        split = value.splits[axis]
        if split is None or (low, high, between) == (0, 0, 0):
            continue
        count = split.extent + low + high
        if between or not movable(split, split) or count <= 0:
            value = value.unpacked([axis])
            continue
        after = at_home(split, low, count)
        value = _moved(value, axis, after, low)
        widths[axis] = (0, 0, 0)
        rows = np.zeros(after.padded, int)
        rows[after.positions()] = np.arange(count) - low
        line = ((rows < 0) | (rows >= split.extent)) & after.valid()
        outside = outside | _line(line, axis, len(widths))
    (array,) = bind(eqn, [value.array, fill.array], padding_config=tuple(widths))
    if outside.any():
        # Where several axes grow, the unsplit ones are filled already.
        array = jnp.where(outside, fill.array, array)
    hints = but(value.hints, [axis for axis, width in enumerate(config) if width != (0, 0, 0)])
    return [Value(array, value.splits, hints=hints).with_zeros()]


@rule("concatenate")
def concatenate(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Each operand moves to its rows of the result."""
    axis = eqn.params["dimension"]
    filled = [value for value in values if value.shape[axis]]
    if len(filled) == 1:
        return [dataclasses.replace(filled[0], sliced_from=())]
    count = sum(value.shape[axis] for value in values)
    hints = but(joint_hints(values), [axis])
    split = _of_result(values, axis, count)
    splits = list(_common(values, axis))
    if split is None:
        matched = [value.with_splits(splits) for value in values]
        (array,) = bind(eqn, [value.array for value in matched])
        clean = all(value.clean for value in matched)
        return [Value(array, tuple(splits), clean, hints=hints)]
    splits = [s if s is None or not set(s.names) & set(split.names) else None for s in splits]
    result: Any = None
    begin = 0
    rows = np.full(split.padded, count)
    rows[split.positions()] = np.arange(count)
    for value in values:
        size = value.shape[axis]
        value = _with_other_splits(value, axis, splits)
        moved = _put(value, axis, split, begin, count)
        from_value = _line(rows >= begin, axis, len(splits))
        result = moved if result is None else jnp.where(from_value, moved, result)
        begin += size
    splits[axis] = split
    return [Value(result, tuple(splits), hints=hints).placed().with_zeros()]


@rule("dynamic_update_slice")
def updated(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Rows at a static index are moved there; a dynamic index takes the unpacked axis."""
    value, update, *starts = values
    partial = [axis for axis, size in enumerate(update.shape) if size != value.shape[axis]]
    if len(partial) == 1 and not isinstance(starts[partial[0]].array, jax.Array):
        (axis,) = partial
        begin, size = int(np.asarray(starts[axis].array)), update.shape[axis]
        begin = min(max(begin, 0), value.shape[axis] - size)  # as XLA has it
        split = _of_update(value.splits[axis], update.splits[axis], begin, value.shape[axis])
        if split is not None:
            return [_written(value, update, axis, begin, split)]
    hints = but(joint_hints([value, update]), partial)
    (inner, update), splits = aligned([value.unpacked(partial), update.unpacked(partial)])
    arrays = [inner.array, update.array, *(start.unpacked().array for start in starts)]
    (array,) = bind(eqn, arrays)
    result = Value(array, splits, hints=hints)
    for axis in partial:
        split = value.splits[axis]
        result = result if split is None else result.packed(axis, split)
    return [result]


def _of_update(
    axis_split: AxisSplit | None, of_update: AxisSplit | None, begin: int, count: int
) -> AxisSplit | None:
    """The blocks of an axis of which a slice is written; None where it is not to be in any."""
    if axis_split is not None:
        return axis_split if movable(axis_split, axis_split) else None
    if of_update is None or not movable(of_update, of_update) or 2 * of_update.extent <= count:
        return None
    return at_home(of_update, begin, count)


def _written(value: Value, update: Value, axis: int, begin: int, split: AxisSplit) -> Value:
    count, size = value.shape[axis], update.shape[axis]
    hints = joint_hints([value, update])
    value = value.packed(axis, split)
    splits = list(joint([[a, b] for a, b in zip(value.splits, update.splits, strict=True)]))
    splits[axis] = split
    splits = [
        None
        if at != axis and axis_split and set(axis_split.names) & set(split.names)
        else axis_split
        for at, axis_split in enumerate(splits)
    ]
    value = value.with_splits(splits)
    update = _with_other_splits(update, axis, splits)
    moved = _put(update, axis, split, begin, count)
    rows = np.full(split.padded, -1)
    rows[split.positions()] = np.arange(count)
    is_updated = _line((rows >= begin) & (rows < begin + size), axis, len(splits))
    array = jnp.where(is_updated, moved, value.array)
    return Value(array, tuple(splits), hints=hints).with_zeros()


@rule("split")
def split_rule(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """As slices that follow each other; empty ones are in no blocks."""
    (value,) = values
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    split, count = value.splits[axis], value.shape[axis]
    inside = value if movable(split, split) else value.unpacked([axis])
    begins = np.cumsum((0, *sizes[:-1])).tolist()
    return [
        value if size == count else _slice_at(inside, axis, begin, size)
        for begin, size in zip(begins, sizes, strict=True)
    ]


def _slice_at(value: Value, axis: int, begin: int, size: int) -> Value:
    split = value.splits[axis]
    if split is not None and size:
        return _moved(value, axis, at_home(split, -begin, size), -begin)
    splits = (*value.splits[:axis], None, *value.splits[axis + 1 :])
    start = begin if size else 0
    array = lax.slice_in_dim(value.array, start, start + size, axis=axis)
    return Value(array, splits, value.clean, hints=but(value.hints, [axis]))


@rule("rev")
def turned(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The last row comes first, in blocks of the same sizes."""
    (value,) = values
    rest = []
    for axis in eqn.params["dimensions"]:
        split = value.splits[axis]
        if split is not None and movable(split, split):
            value = _moved(value, axis, split, 0, reverse=True)
        elif split is not None:
            value = value.unpacked([axis])
            (array,) = bind(eqn, [value.array], dimensions=(axis,))
            value = dataclasses.replace(value, array=array).packed(axis, split)
        else:
            rest.append(axis)
    (array,) = bind(eqn, [value.array], dimensions=tuple(rest))
    return [Value(array, value.splits, value.clean, hints=but(value.hints, rest))]


def _moved(
    value: Value, axis: int, after: AxisSplit, shift: int, *, reverse: bool = False
) -> Value:
    before = value.splits[axis]
    assert before is not None
    array = move_axis(value.array, axis, before, after, shift, reverse=reverse)
    splits = (*value.splits[:axis], after, *value.splits[axis + 1 :])
    others = any(split is not None for at, split in enumerate(splits) if at != axis)
    return Value(array, splits, value.clean or not others, hints=value.hints).placed()


def _with_other_splits(value: Value, axis: int, splits: Sequence[AxisSplit | None]) -> Value:
    """In the blocks of the other axes; along this in its own, if those leave its devices free."""
    axis_split = value.splits[axis]
    others = [split for at, split in enumerate(splits) if at != axis and split is not None]
    if axis_split is not None and set(axis_split.names) & {
        name for split in others for name in split.names
    }:
        axis_split = None
    return value.with_splits(
        [axis_split if at == axis else split for at, split in enumerate(splits)]
    )


def _put(value: Value, axis: int, split: AxisSplit, begin: int, count: int) -> Any:
    """The rows of one operand in the blocks of the result; anything may stand in the others."""
    before = value.splits[axis]
    if before is not None and movable(before, split):
        return move_axis(value.array, axis, before, split, begin)
    value = value.unpacked([axis])
    after = count - begin - value.shape[axis]
    pads = [(begin, after) if at == axis else (0, 0) for at in range(len(value.splits))]
    grown = Value(jnp.pad(value.array, pads), value.splits, value.clean, hints=value.hints)
    return grown.packed(axis, split).array


def _of_result(values: Sequence[Value], axis: int, count: int) -> AxisSplit | None:
    """The blocks of what is concatenated along an axis; None where it is to be not split."""
    origins = [dict(value.sliced_from).get(axis) for value in values]
    if origins[0] is not None and len(set(origins)) == 1 and origins[0].extent == count:
        return origins[0]
    begin, best = 0, None
    for value in values:
        split = value.splits[axis]
        if split is not None and movable(split, split):
            if 2 * split.extent > count:
                return at_home(split, begin, count)
            best = best or in_chunks(split, count)
        begin += value.shape[axis]
    return best


def _common(values: Sequence[Value], axis: int) -> tuple[AxisSplit | None, ...]:
    """The splits of the operands, the axis that grows left out."""
    rank = len(values[0].splits)
    return joint([[] if at == axis else [v.splits[at] for v in values] for at in range(rank)])


def _line(line: np.ndarray, axis: int, rank: int) -> np.ndarray:
    return line.reshape((-1,) + (1,) * (rank - axis - 1))


def _padded(shape: Sequence[Any], splits: Sequence[AxisSplit | None]) -> tuple[Any, ...]:
    pairs = zip(shape, splits, strict=True)
    return tuple(size if split is None else split.padded for size, split in pairs)
