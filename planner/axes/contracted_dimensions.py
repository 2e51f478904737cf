"""Rules of what multiplies and sums: products, convolutions, reductions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from .factors import DimensionRule, Factors


def dot_general(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Batch axes are shared, contracted ones are summed, the others free."""
    numbers = params["dimension_numbers"]
    (lhs_contract, rhs_contract), _ = numbers
    lhs = factors.operand_shapes[0]
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        factors.tie({0: left, 1: right}, {}, lhs[left], reduced=True)
    _kept(factors, numbers, 0)
    return factors.rule()


def ragged_dot_general(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """A product of groups: rows of the left are of the groups that the third operand counts."""
    numbers = params["ragged_dot_dimension_numbers"]
    (lhs_contract, rhs_contract), (_, rhs_batch) = numbers.dot_dimension_numbers
    lhs, rhs = factors.operand_shapes[:2]
    ragged = set(numbers.lhs_ragged_dimensions)
    grouped = set(numbers.rhs_group_dimensions)
    # Rows of a group lie one after the other, so splitting them gives each device several groups.
    for axis in grouped:
        factors.tie({1: axis}, {}, rhs[axis], whole=True)
    lead = len(factors.result_shapes[0]) - (
        len(lhs) - len(lhs_contract) + len(rhs) - len(rhs_contract) - len(rhs_batch) - len(grouped)
    )
    for left, right in zip(lhs_contract, rhs_contract, strict=True):
        factors.tie(
            {0: left, 1: right}, {}, lhs[left], reduced=left not in ragged, whole=left in ragged
        )
    _kept(factors, numbers.dot_dimension_numbers, lead, whole=ragged, left_out=grouped)
    return factors.rule(rest_whole=True)


def _kept(
    factors: Factors,
    numbers: Any,
    place: int,
    whole: Collection[int] = (),
    left_out: Collection[int] = (),
) -> None:
    """Tie the axes that a product keeps to those of its result: batch, left, right.

    Args:
        factors: of the product.
        numbers: its contracted and batch axes.
        place: of the first of them in the result.
        whole: batch axes of the left that cannot stay split.
        left_out: axes of the right that the result has not.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = numbers
    lhs, rhs = factors.operand_shapes[:2]
    for left, right in zip(lhs_batch, rhs_batch, strict=True):
        factors.tie({0: left, 1: right}, {0: place}, lhs[left], whole=left in whole)
        place += 1
    for axis in range(len(lhs)):
        if axis not in (*lhs_contract, *lhs_batch):
            factors.tie({0: axis}, {0: place}, lhs[axis])
            place += 1
    for axis in range(len(rhs)):
        if axis not in (*rhs_contract, *rhs_batch, *left_out):
            factors.tie({1: axis}, {0: place}, rhs[axis])
            place += 1


def convolution(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Batch, features and groups as of a product; axes that a window slides along are whole."""
    numbers = params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
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
        factors.tie({0: a}, {0: c}, max(left[a], result[c]), whole=not still)
        factors.tie({1: b}, {}, right[b], whole=True)
    return factors.rule()


def reduction(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that are summed (or of which the largest is taken) are gone from the result."""
    axes = params["axes"] if "axes" in params else params["dimensions"]
    several = range(len(factors.result_shapes))
    place = 0
    for axis, size in enumerate(factors.operand_shapes[0]):
        operands = dict.fromkeys(several, axis)
        if axis in axes:
            factors.tie(operands, {}, size, reduced=True)
        else:
            factors.tie(operands, dict.fromkeys(several, place), size)
            place += 1
    return factors.rule()


def cumulative(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that is run along is whole."""
    for axis, size in enumerate(factors.operand_shapes[0]):
        factors.tie({0: axis}, {0: axis}, size, whole=axis == params["axis"])
    return factors.rule()


def reduce_window(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that a window slides along are whole."""
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
    alike = [n for n, s in enumerate(factors.operand_shapes) if len(s) == len(window)]
    sizes = factors.result_shapes[0]
    for axis, size in enumerate(sizes):
        still = (
            window[axis] == 1
            and strides[axis] == 1
            and tuple(padding[axis]) == (0, 0)
            and dilation[axis] == 1
        )
        largest = max([size, *(factors.operand_shapes[n][axis] for n in alike)])
        several = range(len(factors.result_shapes))
        factors.tie(
            dict.fromkeys(alike, axis), dict.fromkeys(several, axis), largest, whole=not still
        )
    return factors.rule()
