"""Indexing: axes that gather and scatter index in full remain in blocks."""

from __future__ import annotations

from isoshard.core.blocks.block_values import Value, joint
from isoshard.core.blocks.hints import but
from isoshard.core.blocks.interpreting import bind, rule
from isoshard.core.blocks.splits import AxisSplit
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn


@rule("gather")
def gather(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Axes sliced in full, and those of the indices, remain in blocks; padding reads element 0."""
    operand, indices = values
    dims, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    windows = [
        axis
        for axis in range(len(sizes))
        if axis not in (*dims.collapsed_slice_dims, *dims.operand_batching_dims)
    ]
    full = [
        axis
        for axis in windows
        if sizes[axis] == operand.shape[axis] and axis not in dims.start_index_map
    ]
    partial = [axis for axis in range(len(sizes)) if axis not in full]
    operand = operand.hinted(but(operand.hints, partial)).unpacked(partial)
    last = len(indices.splits) - 1
    indices = indices.unpacked([*dims.start_indices_batching_dims, last])
    rank = last + len(windows)
    sources = dict(zip(dims.offset_dims, [(0, axis) for axis in windows], strict=True))
    others = [axis for axis in range(rank) if axis not in sources]
    sources.update(zip(others, [(1, axis) for axis in range(last)], strict=True))
    splits = joint([[_split_of(operand, indices, sources[axis])] for axis in range(rank)])
    placed = [sources[axis] for axis in range(rank)]
    lost = [sources[axis] for axis in range(rank) if splits[axis] is None]
    operand = operand.unpacked([axis for side, axis in lost if side == 0])
    indices = indices.unpacked([axis for side, axis in lost if side == 1]).with_zeros()
    sizes = tuple(
        size if split is None else split.padded
        for size, split in zip(sizes, operand.splits, strict=True)
    )
    (array,) = bind(eqn, [operand.array, indices.array], slice_sizes=sizes)
    hints = tuple((operand, indices)[side].hints[axis] for side, axis in placed)
    return [Value(array, splits, hints=hints).with_zeros()]


@rule("scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max")
@rule("scatter_add", "scatter_sub", "scatter_mul", "scatter_min", "scatter_max")
def scatter(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Axes updated in full remain in blocks; others are unpacked, and repacked."""
    operand, indices, updates = values
    dims = eqn.params["dimension_numbers"]
    windows = [
        axis
        for axis in range(len(operand.splits))
        if axis not in (*dims.inserted_window_dims, *dims.operand_batching_dims)
    ]
    pairs = {
        axis: to
        for axis, to in zip(windows, dims.update_window_dims, strict=True)
        if operand.shape[axis] == updates.shape[to]
        and axis not in dims.scatter_dims_to_operand_dims
    }
    candidates: list[AxisSplit | None] = [None] * len(operand.splits)
    for axis, to in pairs.items():
        candidates[axis] = operand.splits[axis] or updates.splits[to]
    splits = joint([[split] for split in candidates])
    below: list[AxisSplit | None] = [None] * len(updates.splits)
    for axis, to in pairs.items():
        below[to] = splits[axis]
    arrays = [
        operand.with_splits(splits).array,
        indices.unpacked().array,
        updates.with_splits(below).array,
    ]
    (array,) = bind(eqn, arrays)
    hints = but(operand.hints, [a for a in range(len(operand.splits)) if a not in pairs])
    value = Value(array, splits, hints=hints)
    for axis, split in enumerate(operand.splits):
        if split is not None and splits[axis] is None and axis not in pairs:
            value = value.packed(axis, split)
    return [value]


def _split_of(operand: Value, indices: Value, source: tuple[int, int]) -> AxisSplit | None:
    """The split of one axis of the operand (0) or of the indices (1)."""
    side, axis = source
    return (operand, indices)[side].splits[axis]
