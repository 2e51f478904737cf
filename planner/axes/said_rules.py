"""The rule of an operator that says itself how its axes belong together, as XLA's Shardy is told.

Operators of `custom_partitioning` give a text such as `"i j, j k -> i k"`, with names in brackets
where an axis is several dimensions, and the sizes that it does not tell.

>>> rule = parsed_rule("b (h g) l, b h s -> b (h g) l", [(2, 8, 16), (2, 4, 32)], [(2, 8, 16)], {"g": 2})
>>> rule.operands, rule.results
((((0,), (1, 2), (3,)), ((0,), (1,), (4,))), (((0,), (1, 2), (3,)),))
>>> rule.sizes
(2, 4, 2, 16, 32)
"""  # noqa: E501

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .factors import Axes, DimensionRule, Shape

_AXIS = re.compile(r"\(([^)]*)\)|(\S+)")


def said_rule(equation: Any) -> DimensionRule | None:
    """The rule that an operator of `custom_partitioning` says.

    Args:
        equation: of a jaxpr.

    Returns:
        The rule; None if it is no such operator, or says it otherwise than by a text.
    """
    if equation.primitive.name != "custom_partitioning":
        return None
    ask, static = equation.params["sharding_rule"], equation.params["static_args"]
    if not callable(ask):
        return None
    given, made = ([one.aval for one in some] for some in (equation.invars, equation.outvars))
    said = ask(*static, None, given, made)
    text, sizes = said if isinstance(said, tuple) else (said, {})
    if not isinstance(text, str):
        return None
    return parsed_rule(text, [one.shape for one in given], [one.shape for one in made], sizes)


def parsed_rule(
    text: str, operands: Sequence[Shape], results: Sequence[Shape], sizes: Mapping[str, int]
) -> DimensionRule:
    """Read a rule.

    Args:
        text: of operands and results, parted by `->`.
        operands: shapes.
        results: shapes.
        sizes: of names that stand in brackets only.
    """
    left, right = text.split("->")
    named = [[_axes(one) for one in side.split(",")] for side in (left, right)]
    known = dict(sizes)
    arrays = [*zip(named[0], operands, strict=True), *zip(named[1], results, strict=True)]
    for together in (False, True):  # what stands alone tells its size; then the last one of several
        for axes, shape in arrays:
            for names, size in zip(axes, shape, strict=True):
                new = [name for name in names if name not in known]
                if len(new) == 1 and (together or len(names) == 1):
                    known[new[0]] = size // math.prod(
                        known[name] for name in names if name in known
                    )
    every = [name for axes, _ in arrays for names in axes for name in names]
    number = {name: at for at, name in enumerate(dict.fromkeys(every))}

    def numbered(side: list[list[tuple[str, ...]]]) -> tuple[Axes, ...]:
        return tuple(
            tuple(tuple(number[name] for name in names) for names in axes) for axes in side
        )

    return DimensionRule(
        numbered(named[0]), numbered(named[1]), tuple(known[name] for name in number)
    )


def _axes(text: str) -> list[tuple[str, ...]]:
    """The names of each axis of one array."""
    found = _AXIS.findall(text)
    return [tuple(several.split()) if several else (alone,) for several, alone in found]
