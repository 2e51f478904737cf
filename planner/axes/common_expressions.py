"""What an equation computes, as a key: equal for equal ones, so that it is written once (CSE)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from isoshard.core.runtime._jax_internals.jaxpr_classes import Literal

CONSTANT = -1
"""The number of all values that are made of nothing but constants: each use makes its own."""


def equation_key(equation: Any, operands: tuple[int, ...], made: Mapping[Any, Any]) -> Any:
    """The key of an equation; None if what it computes cannot be told.

    Args:
        equation: of a jaxpr.
        operands: numbers of its operands.
        made: of variables made of constants, the keys of what makes them.
    """
    if equation.effects:
        return None
    constants = tuple(
        [
            _bits(one.val) if isinstance(one, Literal) else made.get(one, id(one))
            for one, number in zip(equation.invars, operands, strict=True)
            if number == CONSTANT
        ]
    )
    params = tuple([one for one in equation.params.items() if "jaxpr" not in one[0]])
    aval = equation.outvars[0].aval if equation.outvars else None
    key = (equation.primitive.name, operands, constants, params, getattr(aval, "dtype", None))
    try:
        hash(key)
    except TypeError:  # a parameter has no hash
        return None
    return key


def _bits(value: Any) -> tuple[Any, ...]:
    """A constant's elements; its `repr` would take long."""
    array = np.asarray(value)
    return array.dtype, array.shape, array.tobytes()
