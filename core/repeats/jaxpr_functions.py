"""Equations as a function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, jaxpr_as_fun

_NAMES = DebugInfo("repeats", "rolled", None, None)


def function_of(variables: list[Any], results: Sequence[Any], equations: list[Any]) -> Any:
    """A function that evaluates equations.

    Args:
        variables: what it is given.
        results: what it returns, as a list.
        equations: in order.
    """
    effects: Any = frozenset().union(*[one.effects for one in equations])
    jaxpr = Jaxpr([], variables, list(results), equations, effects, _NAMES)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, []))
