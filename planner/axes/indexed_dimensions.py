"""Rules of what reads or writes by index: gather, scatter, dynamic slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .factors import DimensionRule, Factors


def dynamic_slice(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that are taken in full are tied, the others whole."""
    for axis, (size, taken) in enumerate(
        zip(factors.operand_shapes[0], factors.result_shapes[0], strict=True)
    ):
        if size == taken:
            factors.tie({0: axis}, {0: axis}, size)
    return factors.rule(rest_whole=True)


def dynamic_update_slice(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that are written in full are tied, the others whole."""
    for axis, (size, written) in enumerate(zip(*factors.operand_shapes[:2], strict=True)):
        operands = {0: axis, 1: axis} if size == written else {0: axis}
        factors.tie(operands, {0: axis}, size, whole=size != written)
    return factors.rule(rest_whole=True)


def gather(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Rows by index: axes of the indices come to the result, and so do axes taken in full.

    An axis of which single rows are taken counts as reduced: a device that has a part of the rows
    gives those it has, and zeros for the others.
    """
    numbers, taken = params["dimension_numbers"], params["slice_sizes"]
    operand, indices = factors.operand_shapes[:2]
    result = factors.result_shapes[0]
    batch = [axis for axis in range(len(result)) if axis not in numbers.offset_dims]
    window = [
        axis
        for axis in range(len(operand))
        if axis not in numbers.collapsed_slice_dims and axis not in numbers.operand_batching_dims
    ]
    batching = dict(
        zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    for axis, place in enumerate(batch):
        operands = {1: axis}
        if axis in batching:
            operands[0] = batching[axis]
        factors.tie(operands, {0: place}, indices[axis])
    for axis, place in zip(window, numbers.offset_dims, strict=True):
        if taken[axis] == operand[axis]:
            factors.tie({0: axis}, {0: place}, operand[axis])
    for axis in range(len(operand)):
        if taken[axis] == 1 and operand[axis] > 1 and axis in numbers.start_index_map:
            factors.tie({0: axis}, {}, operand[axis], reduced=True)
    return factors.rule(rest_whole=True)


def scatter(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Rows replaced by index: updates come one after the other, so their axes are whole."""
    return _scatter(factors, params, summed=False)


def scatter_sum(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Rows added to by index: axes of the indices are summed."""
    return _scatter(factors, params, summed=True)


def _scatter(factors: Factors, params: Mapping[str, Any], *, summed: bool) -> DimensionRule:
    numbers = params["dimension_numbers"]
    operand, indices, updates = factors.operand_shapes[:3]
    batch = [axis for axis in range(len(updates)) if axis not in numbers.update_window_dims]
    window = [
        axis
        for axis in range(len(operand))
        if axis not in numbers.inserted_window_dims and axis not in numbers.operand_batching_dims
    ]
    batching = dict(
        zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True)
    )
    for axis, place in enumerate(batch):
        size = indices[axis]
        if axis in batching:
            own = batching[axis]
            factors.tie({0: own, 1: axis, 2: place}, {0: own}, size)
        else:
            factors.tie({1: axis, 2: place}, {}, size, reduced=summed, whole=not summed)
    for axis, place in zip(window, numbers.update_window_dims, strict=True):
        full = updates[place] == operand[axis]
        operands = {0: axis, 2: place} if full else {0: axis}
        factors.tie(operands, {0: axis}, operand[axis], whole=not full)
    for axis in numbers.inserted_window_dims:
        factors.tie({0: axis}, {0: axis}, operand[axis])
    return factors.rule(rest_whole=True)
