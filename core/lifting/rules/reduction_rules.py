"""Reductions: the padding is replaced by the identity of the reduction; zeros in products."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.blocks.block_values import Value, joint
from isoshard.core.blocks.extremes import keeping_nan
from isoshard.core.blocks.interpreting import bind, rule, run_unpacked
from isoshard.core.blocks.splits import valid_mask
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn

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
    if jnp.issubdtype(value.array.dtype, jnp.complexfloating):
        value = value.unpacked(axes)  # nothing is beyond all complex numbers
    if valid_mask(value.splits, axes) is None:
        return [_reduced(value, axes, bind(eqn, [value.array])[0])]
    least = eqn.primitive.name == "reduce_min"
    fill = _lowest(value.array.dtype, highest=least)
    floats = jnp.issubdtype(value.array.dtype, jnp.floating)

    def masked(x: jax.Array) -> jax.Array:
        x = Value(x, value.splits).filled(fill, axes).array
        return keeping_nan(lambda x: bind(eqn, [x])[0], x, least=least)

    if not floats:
        return [_reduced(value, axes, masked(value.array))]
    best = jax.custom_jvp(masked)

    @best.defjvp
    def best_jvp(primals: Any, tangents: Any) -> Any:
        result = best(primals[0])
        valid: Any = valid_mask(value.splits, axes)
        at = (primals[0] == jnp.expand_dims(result, axes)) & valid
        shares = at / jnp.sum(at, axes, keepdims=True).astype(result.dtype)
        tangent = jnp.where(valid, tangents[0], 0) * jnp.where(valid, shares, 0)
        return result, jnp.sum(tangent, axes)

    return [_reduced(value, axes, best(value.array))]


@rule("argmax", "argmin")
def position(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """The index of an extreme: an axis in blocks is unpacked."""
    (value,) = values
    axes = eqn.params["axes"]
    value = value.unpacked(axes)
    if not value.uneven:
        return run_unpacked(eqn, [value])
    return [_reduced(value, axes, bind(eqn, [value.array])[0])]


@rule("dot_general")
def product(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Matrix products: zeros for padding on both sides, so that no gradient reads any."""
    left, right = values
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left_dims, right_dims = (*left_batch, *left_sum), (*right_batch, *right_sum)
    for a, b in zip(left_dims, right_dims, strict=True):
        split = left.splits[a] or right.splits[b]
        if split is not None:
            left, right = left.packed(a, split), right.packed(b, split)
    order = [(0, axis) for axis in left_batch]
    for side, value, bound in ((0, left, left_dims), (1, right, right_dims)):
        order += [(side, axis) for axis in range(len(value.splits)) if axis not in bound]
    splits = joint([[(left, right)[side].splits[axis]] for side, axis in order])
    lost = [source for source, split in zip(order, splits, strict=True) if split is None]
    left = left.unpacked([axis for side, axis in lost if side == 0])
    right = right.unpacked([axis for side, axis in lost if side == 1])
    left, right = left.with_zeros(), right.with_zeros()
    (array,) = bind(eqn, [left.array, right.array])
    hints = [(left, right)[side].hints[axis] for side, axis in order]
    for at, (a, b) in enumerate(zip(left_batch, right_batch, strict=True)):
        hints[at] = left.hints[a] or right.hints[b]
    return [Value(array, splits, hints=tuple(hints)).with_zeros()]


def _reduced(value: Value, axes: tuple[int, ...], array: Any) -> Value:
    left = [axis for axis in range(len(value.splits)) if axis not in axes]
    splits = tuple(value.splits[axis] for axis in left)
    return Value(array, splits, hints=tuple(value.hints[axis] for axis in left))


def _lowest(dtype: Any, *, highest: bool) -> Any:
    """The lower, or upper, bound of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        beyond = np.asarray(np.inf if highest else -np.inf).astype(dtype)
        if np.isinf(beyond):
            return beyond
        return np.asarray(jnp.finfo(dtype).max if highest else jnp.finfo(dtype).min)
    if jnp.issubdtype(dtype, jnp.bool_):
        return np.asarray(highest)
    limits = jnp.iinfo(dtype)
    return np.asarray(limits.max if highest else limits.min).astype(dtype)
