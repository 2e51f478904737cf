"""Functions of values as functions of arrays: what JAX's own transformations can be applied to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .values import Splits, Value

OnValues = Callable[[list[Value]], Sequence[Value]]


def results_of(function: OnValues, values: Sequence[Value]) -> list[Splits]:
    """In what blocks a function's results lie; nothing is computed.

    Args:
        function: of values.
        values: its arguments.

    Returns:
        The splits of each result.
    """
    found: list[Splits] = []

    def run(arrays: Sequence[Any]) -> list[Any]:
        results = function(_values(arrays, [value.splits for value in values]))
        found[:] = [value.splits for value in results]
        return [value.array for value in results]

    jax.eval_shape(run, [value.array for value in values])
    return found


def on_arrays(
    function: OnValues, splits: Sequence[Splits], results: Sequence[Splits]
) -> Callable[..., list[Any]]:
    """A function of values as one of arrays.

    Args:
        function: of values.
        splits: of its arguments.
        results: in which its results are laid.

    Returns:
        A function from as many arrays to a list of arrays.
    """

    def run(*arrays: Any) -> list[Any]:
        found = function(_values(arrays, splits))
        return [value.laid(own).array for value, own in zip(found, results, strict=True)]

    return run


def agreeing(one: Splits, other: Splits) -> Splits:
    """Per axis the split in which both lie, or None.

    Example:
        >>> from isoshard.core.domain.splits import Split
        >>> agreeing((Split((2, 1), 2), None), (Split((2, 1), 2), Split((1, 1), 1)))[1] is None
        True
    """
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))


def _values(arrays: Sequence[Any], splits: Sequence[Splits]) -> list[Value]:
    return [Value(array, own) for array, own in zip(arrays, splits, strict=True)]
