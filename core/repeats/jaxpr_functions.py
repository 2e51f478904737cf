"""Equations as a function, mapped over rows, and values that a loop can carry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from isoshard.core.runtime._jax_internals.jaxpr_classes import DebugInfo, Jaxpr, jaxpr_as_fun
from isoshard.core.runtime.jaxprs import closed


def function_of(variables: list[Any], results: Sequence[Any], equations: list[Any]) -> Any:
    """A function that evaluates equations.

    Args:
        variables: of the arguments.
        results: variables or literals that it returns, as a list.
        equations: in order.
    """
    effects: Any = frozenset().union(*[equation.effects for equation in equations])
    names = DebugInfo("repeats", "rolled", None, None)
    jaxpr = Jaxpr([], variables, list(results), equations, effects, names)
    return jaxpr_as_fun(closed(jaxpr))


def strong(array: Any) -> Any:
    """An array without JAX's weak type, which would change the type of a loop's carry."""
    if getattr(jax.typeof(array), "weak_type", False):
        return jax.lax.convert_element_type(array, array.dtype)
    return array


def over_rows(run: Any, axes: Sequence[int | None], args: Sequence[Any], count: int) -> Any:
    """A function mapped over rows, by `jax.vmap`, or one by one for want of a batching rule.

    Args:
        run: the function.
        axes: 0 for an argument that has rows, None for one without.
        args: the arguments.
        count: how many rows there are.
    """
    try:
        return jax.vmap(run, in_axes=axes)(*args)
    except NotImplementedError:
        rows = [
            run(
                *[
                    value if axis is None else value[row]
                    for value, axis in zip(args, axes, strict=True)
                ]
            )
            for row in range(count)
        ]
        return [jnp.stack(value) for value in zip(*rows, strict=True)]
