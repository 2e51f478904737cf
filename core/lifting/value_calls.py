"""Functions of values as functions of arrays: what JAX's own transformations can be applied to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from isoshard.core.blocks.block_values import Frame, Value

OnValues = Callable[[list[Value]], Sequence[Value]]


def results_of(function: OnValues, values: Sequence[Value]) -> list[Frame]:
    """The frames of a function's results; nothing is computed."""
    found: list[Frame] = []

    def run(arrays: Sequence[Any]) -> list[Any]:
        results = function(_values(arrays, [value.frame for value in values]))
        found[:] = [value.frame for value in results]
        return [value.array for value in results]

    jax.eval_shape(run, [value.array for value in values])
    return found


def on_arrays(
    function: OnValues, given: Sequence[Frame], results: Sequence[Frame]
) -> Callable[..., list[Any]]:
    """A function of values as one of arrays."""

    def run(*arrays: Any) -> list[Any]:
        found = function(_values(arrays, given))
        return [
            value.with_splits(own.splits).array for value, own in zip(found, results, strict=True)
        ]

    return run


def agreeing(one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Per axis what both say, or None.

    Example:
        >>> from isoshard.core.blocks.splits import AxisSplit as Split
        >>> agreeing((Split((2, 1), 2), None), (Split((2, 1), 2), Split((1, 1), 1)))[1] is None
        True
    """
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))


def _values(arrays: Sequence[Any], frames: Sequence[Frame]) -> list[Value]:
    return [frame.of(array) for array, frame in zip(arrays, frames, strict=True)]
