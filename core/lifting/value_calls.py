"""Functions of values as functions of arrays, for JAX's own transformations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from isoshard.core.blocks.block_values import Frame, Value

OnValues = Callable[[list[Value]], Sequence[Value]]


def results_of(function: OnValues, values: Sequence[Value]) -> list[Frame]:
    """The frames of a function's results; nothing is computed."""
    frames: list[Frame] = []

    def run(arrays: Sequence[Any]) -> list[Any]:
        results = function(_values(arrays, [value.frame for value in values]))
        frames[:] = [value.frame for value in results]
        return [value.array for value in results]

    jax.eval_shape(run, [value.array for value in values])
    return frames


def on_arrays(
    function: OnValues, frames: Sequence[Frame], results: Sequence[Frame]
) -> Callable[..., list[Any]]:
    """A function of values as one of arrays."""

    def run(*arrays: Any) -> list[Any]:
        outputs = function(_values(arrays, frames))
        return [
            value.with_splits(frame.splits).array
            for value, frame in zip(outputs, results, strict=True)
        ]

    return run


def agreeing(first: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, ...]:
    """Per axis the common entry, or None.

    Example:
        >>> from isoshard.core.blocks.splits import AxisSplit as Split
        >>> agreeing((Split((2, 1), 2), None), (Split((2, 1), 2), Split((1, 1), 1)))[1] is None
        True
    """
    return tuple(a if a == b else None for a, b in zip(first, other, strict=True))


def _values(arrays: Sequence[Any], frames: Sequence[Frame]) -> list[Value]:
    return [frame.of(array) for array, frame in zip(arrays, frames, strict=True)]
