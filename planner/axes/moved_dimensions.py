"""Rules of what moves elements and computes nothing: reshape, transpose, slices, joins, orders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .factors import DimensionRule, Factors


def same(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Result number n is operand number n, as it is."""
    for number, shape in enumerate(factors.result_shapes):
        for axis, size in enumerate(shape):
            factors.tie({number: axis}, {number: axis}, size)
    return factors.rule()


def broadcast_in_dim(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes of the operand that keep their size are tied; new ones are free."""
    operand, result = factors.operand_shapes[0], factors.result_shapes[0]
    for axis, place in enumerate(params["broadcast_dimensions"]):
        if operand[axis] == result[place]:
            factors.tie({0: axis}, {0: place}, operand[axis])
    return factors.rule()


def transpose(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes in another order."""
    for place, axis in enumerate(params["permutation"]):
        factors.tie({0: axis}, {0: place}, factors.operand_shapes[0][axis])
    return factors.rule()


def squeeze(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes of size 1 are gone."""
    place = 0
    for axis, size in enumerate(factors.operand_shapes[0]):
        if axis not in params["dimensions"]:
            factors.tie({0: axis}, {0: place}, size)
            place += 1
    return factors.rule()


def reshape(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes are split and merged: factors are the common divisors, from the outermost on.

    Where sizes have none (6 x 4 as 8 x 3) what is left is whole.
    """
    before = [(n, s) for n, s in enumerate(factors.operand_shapes[0]) if s != 1]
    after = [(n, s) for n, s in enumerate(factors.result_shapes[0]) if s != 1]
    if params.get("dimensions") is not None or 0 in factors.operand_shapes[0]:
        return factors.rule(rest_whole=True)
    axis, place, left, right = 0, 0, 1, 1
    while True:
        if left == 1 and before:
            axis, left = before.pop(0)
        if right == 1 and after:
            place, right = after.pop(0)
        if left == 1 or right == 1:
            return factors.rule(rest_whole=True)
        common = math.gcd(left, right)
        if common > 1:
            factors.tie({0: axis}, {0: place}, common)
            left, right = left // common, right // common
            if left > 1 and right > 1:
                common = 1
        if common == 1:
            # Up to where both shapes have counted the same number of elements again.
            inside, outside = left, right
            factors.tie({0: axis}, {}, left, whole=True)
            factors.tie({}, {0: place}, right, whole=True)
            while inside != outside:
                if inside < outside:
                    axis, size = before.pop(0)
                    factors.tie({0: axis}, {}, size, whole=True)
                    inside *= size
                else:
                    place, size = after.pop(0)
                    factors.tie({}, {0: place}, size, whole=True)
                    outside *= size
            left = right = 1


def concatenate(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that operands are joined along is whole."""
    numbers = range(len(factors.operand_shapes))
    for axis, size in enumerate(factors.result_shapes[0]):
        joined = axis == params["dimension"]
        factors.tie(dict.fromkeys(numbers, axis), {0: axis}, size, whole=joined)
    return factors.rule()


def stack(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """A new axis along which operands are joined; it is whole."""
    numbers = range(len(factors.operand_shapes))
    for axis, size in enumerate(factors.operand_shapes[0]):
        factors.tie(dict.fromkeys(numbers, axis), {0: axis + (axis >= params["axis"])}, size)
    return factors.rule(rest_whole=True)


def unstack(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that results are taken from is gone, and whole."""
    numbers = range(len(factors.result_shapes))
    for axis, size in enumerate(factors.result_shapes[0]):
        factors.tie({0: axis + (axis >= params["axis"])}, dict.fromkeys(numbers, axis), size)
    return factors.rule(rest_whole=True)


def split(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that results are taken from is whole."""
    numbers = range(len(factors.result_shapes))
    for axis, size in enumerate(factors.operand_shapes[0]):
        whole = axis == params["axis"]
        factors.tie({0: axis}, dict.fromkeys(numbers, axis), size, whole=whole)
    return factors.rule()


def resized(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Slices and pads: axes whose size changes are whole."""
    for axis, (size, new) in enumerate(
        zip(factors.operand_shapes[0], factors.result_shapes[0], strict=True)
    ):
        factors.tie({0: axis}, {0: axis}, max(size, new), whole=size != new)
    return factors.rule()


def reverse(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that are turned round are whole."""
    for axis, size in enumerate(factors.operand_shapes[0]):
        factors.tie({0: axis}, {0: axis}, size, whole=axis in params["dimensions"])
    return factors.rule()


def tile(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Axes that are repeated are whole."""
    for axis, size in enumerate(factors.operand_shapes[0]):
        if size == factors.result_shapes[0][axis]:
            factors.tie({0: axis}, {0: axis}, size)
    return factors.rule(rest_whole=True)


def sort(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that is sorted along is whole."""
    numbers = range(len(factors.result_shapes))
    for axis, size in enumerate(factors.operand_shapes[0]):
        alike = dict.fromkeys(numbers, axis)
        factors.tie(alike, alike, size, whole=axis == params["dimension"])
    return factors.rule()


def top_k(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """The axis that the largest are taken from is whole."""
    rank = len(factors.operand_shapes[0])
    chosen = params.get("axis", params.get("reduction_dimension", -1)) % rank
    for axis, size in enumerate(factors.operand_shapes[0]):
        if axis != chosen:
            factors.tie({0: axis}, {0: axis, 1: axis}, size)
    return factors.rule(rest_whole=True)


def leading(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Leading axes that all have are a batch; the others are whole: factorizations, transforms."""
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
    return factors.rule(rest_whole=True)


def prefix(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """Random keys and what is made of them: the keys' axes come first, new ones are free."""
    operand, result = factors.operand_shapes[0], factors.result_shapes[0]
    for axis, size in enumerate(operand[: len(result)]):
        if size == result[axis]:
            factors.tie({0: axis}, {0: axis}, size)
    return factors.rule()


def free(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """No axis is tied to another."""
    return factors.rule()


def whole(factors: Factors, params: Mapping[str, Any]) -> DimensionRule:
    """No axis can be split."""
    return factors.rule(rest_whole=True)


def _has(shape: tuple[int, ...], axis: int, size: int) -> bool:
    return axis < len(shape) and shape[axis] == size
