"""Operators of one input, element by element: signs, roundings, powers, trigonometry, tests."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from .operator_arguments import library
from .registry import largest, operator


def _register(op_type: str, function: Callable[[jax.Array], jax.Array]) -> None:
    operator(op_type)(lambda x: function(x))


for _op_type, _function in {
    "Exp": jnp.exp,
    "Log": jnp.log,
    "Erf": jax.lax.erf,
    "Sin": jnp.sin,
    "Cos": jnp.cos,
    "Tan": jnp.tan,
    "Asin": jnp.arcsin,
    "Acos": jnp.arccos,
    "Atan": jnp.arctan,
    "Sinh": jnp.sinh,
    "Cosh": jnp.cosh,
    "Asinh": jnp.arcsinh,
    "Acosh": jnp.arccosh,
    "Atanh": jnp.arctanh,
    "BitwiseNot": jnp.bitwise_not,
    "IsNaN": jnp.isnan,
    "Round": jnp.round,  # ties to even
}.items():
    _register(_op_type, _function)


@operator("Identity", host=largest)
def identity(x):
    """The input."""
    return x


@operator("Abs", host=largest)
def absolute(x):
    """The distance from zero."""
    return abs(x)


@operator("Neg", host=largest)
def negative(x):
    """The input with its sign turned."""
    return -x


@operator("Sign", host=largest)
def sign(x):
    """-1, 0 or 1."""
    return library(x).sign(x)


@operator("Floor", host=largest)
def floor(x):
    """The next integer below."""
    return library(x).floor(x)


@operator("Ceil", host=largest)
def ceil(x):
    """The next integer above."""
    return library(x).ceil(x)


@operator("Sqrt", host=largest)
def sqrt(x):
    """The square root; NaN of negative numbers."""
    return library(x).sqrt(x)


@operator("Reciprocal", host=largest)
def reciprocal(x):
    """One divided by the input."""
    return (1 / x).astype(x.dtype)


@operator("Not", host=largest)
def logical_not(x):
    """The opposite truth value."""
    return library(x).logical_not(x)


@operator("IsInf")
def isinf(x, *, detect_negative=1, detect_positive=1):
    """Whether an element is infinite, of the signs that the attributes select."""
    result = jnp.zeros(x.shape, bool)
    if detect_positive:
        result |= jnp.isposinf(x)
    if detect_negative:
        result |= jnp.isneginf(x)
    return result


@operator("Clip", since=11, host=largest)
def clip(x, low=None, high=None):
    """The input between two bounds; the upper one wins where they cross."""
    np_ = library(x, *(bound for bound in (low, high) if bound is not None))
    x = x if low is None else np_.maximum(x, low)
    return x if high is None else np_.minimum(x, high)


@operator("Clip", since=6)
def clip_by_attributes(x, *, min=None, max=None):
    """`Clip` before opset 11."""
    x = x if min is None else jnp.maximum(x, jnp.asarray(min, x.dtype))
    return x if max is None else jnp.minimum(x, jnp.asarray(max, x.dtype))
