"""Where order matters: along an axis in blocks at the true shape; other axes keep their blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from isoshard.core.blocks.block_values import Value, aligned, joint, joint_hints
from isoshard.core.blocks.hints import but
from isoshard.core.blocks.interpreting import bind, pack_like, rule
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn

Axes = Callable[[JaxprEqn, Value], Iterable[int]]


def _axis(eqn: JaxprEqn, value: Value) -> Iterable[int]:
    return [eqn.params["axis"]]


def _dimension(eqn: JaxprEqn, value: Value) -> Iterable[int]:
    return [eqn.params["dimension"]]


def _last(eqn: JaxprEqn, value: Value) -> Iterable[int]:
    return [eqn.params.get("axis", len(value.splits) - 1)]


def _windows(eqn: JaxprEqn, value: Value) -> Iterable[int]:
    parameters = eqn.params
    ones = (1,) * len(value.splits)
    every = [
        parameters["window_dimensions"],
        parameters["window_strides"],
        parameters.get("base_dilation") or ones,
        parameters.get("window_dilation") or ones,
    ]
    return [
        axis
        for axis in range(len(value.splits))
        if any(param[axis] != 1 for param in every) or tuple(parameters["padding"][axis]) != (0, 0)
    ]


ORDERED: dict[str, Axes] = {
    "cumsum": _axis,
    "cumprod": _axis,
    "cummax": _axis,
    "cummin": _axis,
    "cumlogsumexp": _axis,
    "sort": _dimension,
    "top_k": _last,
    "reduce_window_sum": _windows,
    "reduce_window_max": _windows,
    "reduce_window_min": _windows,
}


@rule("cumlogsumexp", "sort", "top_k")
def ordered(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Unpack the ordered axes; repack those that keep their size."""
    axes = set(ORDERED[eqn.primitive.name](eqn, values[0]))
    rank = len(values[0].splits)
    before = joint([[value.splits[axis] for value in values] for axis in range(rank)])
    hints = but(joint_hints(values), axes)
    values, splits = aligned([value.unpacked(axes) for value in values])
    arrays = bind(eqn, [value.array for value in values])
    results = [Value(array, splits, hints=hints) for array in arrays]
    return pack_like(results, [before[axis] if axis in axes else None for axis in range(rank)])
