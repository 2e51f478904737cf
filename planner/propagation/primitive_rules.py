"""Sharding rules by family of primitives.

What multiplies and sums (products, convolutions, reductions); what reads or writes by index
(gather, scatter, dynamic slices); what moves elements (reshape, transpose, slices, sort).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from .factors import DimensionRule, Factors


def dot_general(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Batch axes are shared, contracted ones are summed, the others free."""
    dims = params["dimension_numbers"]
    (lhs_contract, rhs_contract), _ = dims
    lhs = factors.operand_shapes[0]
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        factors.tie({0: left, 1: right}, {}, lhs[left], reduced=True)
    _tie_result_axes(factors, dims, 0)
    return factors.rule()


def ragged_dot_general(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """A product of groups: rows of the left are of the groups that the third operand counts."""
    dims = params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (_, rhs_batch) = dims.dot_dimension_numbers
    lhs, rhs = factors.operand_shapes[:2]
    ragged = set(dims.lhs_ragged_dimensions)
    grouped = set(dims.rhs_group_dimensions)
    # Rows of a group are contiguous, so splitting them gives each device several groups.
    for axis in grouped:
        factors.tie({1: axis}, {}, rhs[axis], unsharded=True)
    lead = len(factors.result_shapes[0]) - (
        len(lhs) - len(lhs_contract) + len(rhs) - len(rhs_contract) - len(rhs_batch) - len(grouped)
    )
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        factors.tie(
            {0: left, 1: right}, {}, lhs[left], reduced=left not in ragged, unsharded=left in ragged
        )
    _tie_result_axes(factors, dims.dot_dimension_numbers, lead, full=ragged, left_out=grouped)
    return factors.rule(rest_unsharded=True)


def _tie_result_axes(
    factors: Factors,
    dims: Any,
    index: int,
    full: Collection[int] = (),
    left_out: Collection[int] = (),
) -> None:
    """Tie the axes that a product keeps to those of its result: batch, left, right."""
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
    lhs, rhs = factors.operand_shapes[:2]
    for left, right in zip(lhs_batch, rhs_batch, strict=True):
        factors.tie({0: left, 1: right}, {0: index}, lhs[left], unsharded=left in full)
        index += 1
    for axis in range(len(lhs)):
        if axis not in (*lhs_contract, *lhs_batch):
            factors.tie({0: axis}, {0: index}, lhs[axis])
            index += 1
    for axis in range(len(rhs)):
        if axis not in (*rhs_contract, *rhs_batch, *left_out):
            factors.tie({1: axis}, {0: index}, rhs[axis])
            index += 1


def convolution(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Batch, features and groups as of a product; axes that a window slides along are unsharded."""
    dims = params["dimension_numbers"]
    lhs, rhs, out = dims.lhs_spec, dims.rhs_spec, dims.out_spec
    left, right = factors.operand_shapes[:2]
    result = factors.result_shapes[0]
    groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    if batch_groups > 1:
        factors.tie({0: lhs[0], 1: rhs[0]}, {0: out[1]}, batch_groups)
        factors.tie({0: lhs[0]}, {0: out[0]}, result[out[0]])
        factors.tie({1: rhs[0]}, {0: out[1]}, right[rhs[0]] // batch_groups)
        factors.tie({0: lhs[1], 1: rhs[1]}, {}, right[rhs[1]], reduced=True)
    else:
        factors.tie({0: lhs[0]}, {0: out[0]}, left[lhs[0]])
        if groups > 1:
            factors.tie({0: lhs[1], 1: rhs[0]}, {0: out[1]}, groups)
        factors.tie({1: rhs[0]}, {0: out[1]}, right[rhs[0]] // groups)
        factors.tie({0: lhs[1], 1: rhs[1]}, {}, right[rhs[1]], reduced=True)
    for n, (a, b, c) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        still = (
            right[b] == 1
            and params["window_strides"][n] == 1
            and tuple(params["padding"][n]) == (0, 0)
            and params["lhs_dilation"][n] == 1
        )
        factors.tie({0: a}, {0: c}, max(left[a], result[c]), unsharded=not still)
        factors.tie({1: b}, {}, right[b], unsharded=True)
    return factors.rule()


def reduction(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that are summed (or of which the largest is taken) are gone from the result."""
    axes = params["axes"] if "axes" in params else params["dimensions"]
    several = range(len(factors.result_shapes))
    index = 0
    for axis, size in enumerate(factors.operand_shapes[0]):
        operands = dict.fromkeys(several, axis)
        if axis in axes:
            factors.tie(operands, {}, size, reduced=True)
        else:
            factors.tie(operands, dict.fromkeys(several, index), size)
            index += 1
    return factors.rule()


def cumulative(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that is accumulated along is unsharded."""
    for axis, size in enumerate(factors.operand_shapes[0]):
        factors.tie({0: axis}, {0: axis}, size, unsharded=axis == params["axis"])
    return factors.rule()


def reduce_window(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that a window slides along are unsharded."""
    window, strides = params["window_dimensions"], params["window_strides"]
    dilation = params.get("base_dilation", (1,) * len(window))
    return _windows(factors, window, strides, params["padding"], dilation)


def select_and_scatter(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """As `reduce_window`, from windows back to elements, or from elements to windows."""
    window, strides = params["window_dimensions"], params["window_strides"]
    return _windows(factors, window, strides, params["padding"], (1,) * len(window))


def _windows(
    factors: Factors, window: Any, strides: Any, padding: Any, dilation: Any
) -> DimensionRule:
    same = [n for n, s in enumerate(factors.operand_shapes) if len(s) == len(window)]
    sizes = factors.result_shapes[0]
    for axis, size in enumerate(sizes):
        still = (
            window[axis] == 1
            and strides[axis] == 1
            and tuple(padding[axis]) == (0, 0)
            and dilation[axis] == 1
        )
        largest = max([size, *(factors.operand_shapes[n][axis] for n in same)])
        several = range(len(factors.result_shapes))
        factors.tie(
            dict.fromkeys(same, axis), dict.fromkeys(several, axis), largest, unsharded=not still
        )
    return factors.rule()


def dynamic_slice(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that are sliced in full are tied, the others unsharded."""
    for axis, (size, taken) in enumerate(
        zip(factors.operand_shapes[0], factors.result_shapes[0], strict=True)
    ):
        if size == taken:
            factors.tie({0: axis}, {0: axis}, size)
    return factors.rule(rest_unsharded=True)


def dynamic_update_slice(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that are written in full are tied, the others unsharded."""
    for axis, (size, written) in enumerate(zip(*factors.operand_shapes[:2], strict=True)):
        operands = {0: axis, 1: axis} if size == written else {0: axis}
        factors.tie(operands, {0: axis}, size, unsharded=size != written)
    return factors.rule(rest_unsharded=True)


def gather(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Rows by index: axes of the indices come to the result, and so do axes taken in full.

    An axis of which single rows are taken counts as reduced: a device with a shard of the rows
    returns those it has, and zeros for the others.
    """
    dims, taken = params["dimension_numbers"], params["slice_sizes"]
    operand, indices = factors.operand_shapes[:2]
    result = factors.result_shapes[0]
    batch = [axis for axis in range(len(result)) if axis not in dims.offset_dims]
    window = [
        axis
        for axis in range(len(operand))
        if axis not in dims.collapsed_slice_dims and axis not in dims.operand_batching_dims
    ]
    batching = dict(zip(dims.start_indices_batching_dims, dims.operand_batching_dims, strict=True))
    for axis, index in enumerate(batch):
        operands = {1: axis}
        if axis in batching:
            operands[0] = batching[axis]
        factors.tie(operands, {0: index}, indices[axis])
    for axis, index in zip(window, dims.offset_dims, strict=True):
        if taken[axis] == operand[axis]:
            factors.tie({0: axis}, {0: index}, operand[axis])
    for axis in range(len(operand)):
        if taken[axis] == 1 and operand[axis] > 1 and axis in dims.start_index_map:
            factors.tie({0: axis}, {}, operand[axis], reduced=True)
    return factors.rule(rest_unsharded=True)


def scatter(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Rows replaced by index: updates are ordered, so their axes are unsharded."""
    return _scatter(factors, params, summed=False)


def scatter_sum(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Rows added to by index: axes of the indices are summed."""
    return _scatter(factors, params, summed=True)


def _scatter(factors: Factors, params: Mapping[str, Any], *, summed: bool) -> DimensionRule:
    dims = params["dimension_numbers"]
    operand, indices, updates = factors.operand_shapes[:3]
    batch = [axis for axis in range(len(updates)) if axis not in dims.update_window_dims]
    window = [
        axis
        for axis in range(len(operand))
        if axis not in dims.inserted_window_dims and axis not in dims.operand_batching_dims
    ]
    batching = dict(
        zip(dims.scatter_indices_batching_dims, dims.operand_batching_dims, strict=True)
    )
    for axis, index in enumerate(batch):
        size = indices[axis]
        if axis in batching:
            operand_axis = batching[axis]
            factors.tie({0: operand_axis, 1: axis, 2: index}, {0: operand_axis}, size)
        else:
            factors.tie({1: axis, 2: index}, {}, size, reduced=summed, unsharded=not summed)
    for axis, index in zip(window, dims.update_window_dims, strict=True):
        is_full = updates[index] == operand[axis]
        operands = {0: axis, 2: index} if is_full else {0: axis}
        factors.tie(operands, {0: axis}, operand[axis], unsharded=not is_full)
    for axis in dims.inserted_window_dims:
        factors.tie({0: axis}, {0: axis}, operand[axis])
    return factors.rule(rest_unsharded=True)


def same(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Each result is sharded as the operand of the same index."""
    for index, shape in enumerate(factors.result_shapes):
        for axis, size in enumerate(shape):
            factors.tie({index: axis}, {index: axis}, size)
    return factors.rule()


def broadcast_in_dim(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes of the operand that keep their size are tied; new ones are free."""
    operand, result = factors.operand_shapes[0], factors.result_shapes[0]
    for axis, param in enumerate(params["broadcast_dimensions"]):
        if operand[axis] == result[param]:
            factors.tie({0: axis}, {0: param}, operand[axis])
    return factors.rule()


def transpose(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes in another order."""
    for index, axis in enumerate(params["permutation"]):
        factors.tie({0: axis}, {0: index}, factors.operand_shapes[0][axis])
    return factors.rule()


def squeeze(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes of size 1 are gone."""
    index = 0
    for axis, size in enumerate(factors.operand_shapes[0]):
        if axis not in params["dimensions"]:
            factors.tie({0: axis}, {0: index}, size)
            index += 1
    return factors.rule()


def reshape(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes are split and merged: factors are the common divisors, from the outermost on.

    Where sizes have none (6 x 4 as 8 x 3) what is left is unsharded.
    """
    before = [(n, s) for n, s in enumerate(factors.operand_shapes[0]) if s != 1]
    after = [(n, s) for n, s in enumerate(factors.result_shapes[0]) if s != 1]
    if params.get("dimensions") is not None or 0 in factors.operand_shapes[0]:
        return factors.rule(rest_unsharded=True)
    axis, index, left, right = 0, 0, 1, 1
    while True:
        if left == 1 and before:
            axis, left = before.pop(0)
        if right == 1 and after:
            index, right = after.pop(0)
        if left == 1 or right == 1:
            return factors.rule(rest_unsharded=True)
        common = math.gcd(left, right)
        if common > 1:
            factors.tie({0: axis}, {0: index}, common)
            left, right = left // common, right // common
            if left > 1 and right > 1:
                common = 1
        if common == 1:
            # Up to where both shapes have counted the same number of elements again.
            inside, outside = left, right
            factors.tie({0: axis}, {}, left, unsharded=True)
            factors.tie({}, {0: index}, right, unsharded=True)
            while inside != outside:
                if inside < outside:
                    axis, size = before.pop(0)
                    factors.tie({0: axis}, {}, size, unsharded=True)
                    inside *= size
                else:
                    index, size = after.pop(0)
                    factors.tie({}, {0: index}, size, unsharded=True)
                    outside *= size
            left = right = 1


def concatenate(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that operands are joined along is unsharded."""
    operands = range(len(factors.operand_shapes))
    for axis, size in enumerate(factors.result_shapes[0]):
        joined = axis == params["dimension"]
        factors.tie(dict.fromkeys(operands, axis), {0: axis}, size, unsharded=joined)
    return factors.rule()


def stack(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """A new axis along which operands are joined; it is unsharded."""
    operands = range(len(factors.operand_shapes))
    for axis, size in enumerate(factors.operand_shapes[0]):
        factors.tie(dict.fromkeys(operands, axis), {0: axis + (axis >= params["axis"])}, size)
    return factors.rule(rest_unsharded=True)


def unstack(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that results are taken from is dropped, and unsharded."""
    results = range(len(factors.result_shapes))
    for axis, size in enumerate(factors.result_shapes[0]):
        factors.tie({0: axis + (axis >= params["axis"])}, dict.fromkeys(results, axis), size)
    return factors.rule(rest_unsharded=True)


def split(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that results are taken from is unsharded."""
    results = range(len(factors.result_shapes))
    for axis, size in enumerate(factors.operand_shapes[0]):
        is_axis = axis == params["axis"]
        factors.tie({0: axis}, dict.fromkeys(results, axis), size, unsharded=is_axis)
    return factors.rule()


def resized(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Slices and pads: axes whose size changes are unsharded."""
    for axis, (size, new) in enumerate(
        zip(factors.operand_shapes[0], factors.result_shapes[0], strict=True)
    ):
        factors.tie({0: axis}, {0: axis}, max(size, new), unsharded=size != new)
    return factors.rule()


def reverse(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Reversed axes are unsharded."""
    for axis, size in enumerate(factors.operand_shapes[0]):
        factors.tie({0: axis}, {0: axis}, size, unsharded=axis in params["dimensions"])
    return factors.rule()


def tile(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Repeated axes are unsharded."""
    for axis, size in enumerate(factors.operand_shapes[0]):
        if size == factors.result_shapes[0][axis]:
            factors.tie({0: axis}, {0: axis}, size)
    return factors.rule(rest_unsharded=True)


def sort(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that is sorted along is unsharded."""
    results = range(len(factors.result_shapes))
    for axis, size in enumerate(factors.operand_shapes[0]):
        same = dict.fromkeys(results, axis)
        factors.tie(same, same, size, unsharded=axis == params["dimension"])
    return factors.rule()


def top_k(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that the largest are taken from is unsharded."""
    rank = len(factors.operand_shapes[0])
    chosen = params.get("axis", params.get("reduction_dimension", -1)) % rank
    for axis, size in enumerate(factors.operand_shapes[0]):
        if axis != chosen:
            factors.tie({0: axis}, {0: axis, 1: axis}, size)
    return factors.rule(rest_unsharded=True)


def leading(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Common leading axes are a batch; the others are unsharded: factorizations, transforms."""
    shapes = (*factors.operand_shapes, *factors.result_shapes)
    inner = params.get("fft_lengths")
    batch = min(map(len, shapes)) if inner is None else len(shapes[0]) - len(inner)
    for axis in range(batch if inner is not None else max(0, len(shapes[0]) - 2)):
        size = shapes[0][axis]
        factors.tie(
            {n: axis for n, s in enumerate(factors.operand_shapes) if _has(s, axis, size)},
            {n: axis for n, s in enumerate(factors.result_shapes) if _has(s, axis, size)},
            size,
        )
    return factors.rule(rest_unsharded=True)


def prefix(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Random keys and what is drawn from them: the keys' axes come first, new ones are free."""
    operand, result = factors.operand_shapes[0], factors.result_shapes[0]
    for axis, size in enumerate(operand[: len(result)]):
        if size == result[axis]:
            factors.tie({0: axis}, {0: axis}, size)
    return factors.rule()


def free(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """No axis is tied to another."""
    return factors.rule()


def unsharded(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """No axis can be split."""
    return factors.rule(rest_unsharded=True)


def _has(shape: tuple[int, ...], axis: int, size: int) -> bool:
    return axis < len(shape) and shape[axis] == size
