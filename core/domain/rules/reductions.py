"""Reductions: the padding is replaced by what does not change the result."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from ..interpreting import bind, rule, run_whole
from ..splits import valid_mask
from ..values import Value

_IDENTITY = {"reduce_sum": 0, "reduce_prod": 1, "reduce_and": -1, "reduce_or": 0, "reduce_xor": 0}


@rule(*_IDENTITY)
def reduction(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Sums and the like, over any axes."""
    (value,) = values
    axes = eqn.params["axes"]
    fill = _IDENTITY[eqn.primitive.name]
    if fill or not value.clean:
        value = value.filled(np.asarray(fill).astype(value.array.dtype), axes)
    return [_reduced(value, axes, bind(eqn, [value.array])[0])]


@rule("reduce_max", "reduce_min")
def extreme(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Largest or smallest elements; equal ones share the gradient, as in JAX, without padding."""
    (value,) = values
    axes = eqn.params["axes"]
    if valid_mask(value.splits, axes) is None:
        return [_reduced(value, axes, bind(eqn, [value.array])[0])]
    fill = _lowest(value.array.dtype, highest=eqn.primitive.name == "reduce_min")

    def masked(x: jax.Array) -> jax.Array:
        return bind(eqn, [Value(x, value.splits).filled(fill, axes).array])[0]

    if not jnp.issubdtype(value.array.dtype, jnp.floating):
        return [_reduced(value, axes, masked(value.array))]
    best = jax.custom_jvp(masked)

    @best.defjvp
    def best_jvp(primals: Any, tangents: Any) -> Any:
        found = best(primals[0])
        at = primals[0] == jnp.expand_dims(found, axes)
        at &= valid_mask(value.splits, axes)
        shared = jnp.sum(at, axes).astype(found.dtype)
        return found, jnp.sum(jnp.where(at, tangents[0], 0), axes) / shared

    return [_reduced(value, axes, best(value.array))]


@rule("argmax", "argmin")
def position(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Where the extreme stands: along an axis in blocks, at the true shape."""
    (value,) = values
    axes = eqn.params["axes"]
    value = value.whole(axes)
    if not value.uneven:
        return run_whole(eqn, [value])
    return [_reduced(value, axes, bind(eqn, [value.array])[0])]


def _reduced(value: Value, axes: tuple[int, ...], array: Any) -> Value:
    left = [axis for axis in range(len(value.splits)) if axis not in axes]
    splits = tuple(value.splits[axis] for axis in left)
    return Value(array, splits, hints=tuple(value.hints[axis] for axis in left))


def _lowest(dtype: Any, *, highest: bool) -> Any:
    """What no element is below, or above."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(np.inf if highest else -np.inf).astype(dtype)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.asarray(highest)
    limits = jnp.iinfo(dtype)
    return np.asarray(limits.max if highest else limits.min).astype(dtype)
