"""Operators of two or more inputs: broadcast to each other, and matrix products.

Integers are divided towards zero, as in C; the remainder of `Mod` has the sign of the divisor, or
with `fmod=1` of the dividend. Both inputs of an operator have one dtype, but for `Pow`, whose
result has that of the base.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from ...errors import ModelError
from .operator_arguments import choice, library
from .registry import broadcast, largest, operator


def _register(op_type: str, name: str, since: int = 7) -> None:
    """Register a function that `numpy` and `jax.numpy` call by the same name."""
    operator(op_type, since=since, host=broadcast)(lambda a, b: getattr(library(a, b), name)(a, b))


for _op_type, _name in {
    "Add": "add",
    "Sub": "subtract",
    "Mul": "multiply",
    "Equal": "equal",
    "Less": "less",
    "Greater": "greater",
    "LessOrEqual": "less_equal",
    "GreaterOrEqual": "greater_equal",
    "And": "logical_and",
    "Or": "logical_or",
    "Xor": "logical_xor",
    "BitwiseAnd": "bitwise_and",
    "BitwiseOr": "bitwise_or",
    "BitwiseXor": "bitwise_xor",
}.items():
    _register(_op_type, _name)


@operator("Div", since=7, host=broadcast)
def div(a, b):
    """The quotient; of integers, without its fraction."""
    np_ = library(a, b)
    if not jnp.issubdtype(a.dtype, jnp.integer):
        return np_.true_divide(a, b).astype(a.dtype)
    if np_ is jnp:
        return lax.div(*jnp.broadcast_arrays(a, b))
    quotient = np.floor_divide(a, b)
    return quotient + ((quotient * b != a) & ((a < 0) != (b < 0))).astype(a.dtype)


@operator("Mod", since=10, host=broadcast)
def mod(a, b, *, fmod=0):
    """The remainder, with the sign of the divisor, or (`fmod=1`) of the dividend."""
    if not fmod and not jnp.issubdtype(a.dtype, jnp.integer):
        raise ModelError(f"Mod of {a.dtype} has fmod=0, which is for integers: floats need fmod=1")
    np_ = library(a, b)
    return np_.fmod(a, b) if fmod else np_.remainder(a, b)


@operator("Pow", since=7, known=("exponent",), host=broadcast)
def power(base, exponent):
    """The base to the power of the exponent, in the dtype of the base."""
    if isinstance(base, np.ndarray):
        return np.power(base, exponent).astype(base.dtype)
    is_static_scalar = (
        isinstance(exponent, np.ndarray) and exponent.size == 1 and float(exponent.item())
    )
    if (
        is_static_scalar is not False
        and float(is_static_scalar).is_integer()
        and 0 <= is_static_scalar <= 8
    ):
        shape = np.broadcast_shapes(base.shape, np.shape(exponent))
        return jnp.broadcast_to(lax.integer_pow(base, int(is_static_scalar)), shape)
    floats = [jnp.issubdtype(x.dtype, jnp.floating) for x in (base, exponent)]
    if floats == [False, True]:
        return jnp.power(base.astype(exponent.dtype), exponent).astype(base.dtype)
    return jnp.power(base, jnp.asarray(exponent).astype(base.dtype))


def _fold(op_type: str, fold: Callable[..., Any], since: int) -> None:
    operator(op_type, since=since, host=_at_most_broadcast)(
        lambda *inputs: functools.reduce(fold, inputs)
    )


def _at_most_broadcast(inputs):
    return broadcast(inputs) if inputs else largest(inputs)


_fold("Sum", lambda a, b: a + b, 8)
_fold("Max", lambda a, b: library(a, b).maximum(a, b), 8)
_fold("Min", lambda a, b: library(a, b).minimum(a, b), 8)


@operator("Mean", since=8)
def mean(*inputs):
    """The mean of the inputs, element by element."""
    return functools.reduce(jnp.add, inputs) / np.asarray(len(inputs), inputs[0].dtype)


@operator("Where", since=9, host=broadcast)
def where(condition, x, y):
    """`x` where the condition holds, else `y`."""
    return library(condition, x, y).where(condition, x, y)


@operator("BitShift", since=11)
def bit_shift(x, y, *, direction):
    """The bits of `x` moved `y` places to the "LEFT" or "RIGHT"; zeros come in."""
    left = choice(direction, "direction", ("LEFT", "RIGHT")) == "LEFT"
    shift = lax.shift_left if left else lax.shift_right_logical
    return shift(*jnp.broadcast_arrays(x, y))


@operator("PRelu", since=7)
def prelu(x, weight):
    """The input; where it is negative, times `weight`, which ONNX calls slope."""
    return jnp.where(x < 0, x * weight, x)


@operator("MatMul")
def matmul(a, b):
    """The product of (stacks of) matrices, as NumPy has it."""
    return jnp.matmul(a, b)


@operator("Gemm", since=7)
def gemm(a, b, c=None, *, alpha=1.0, beta=1.0, transA=0, transB=0):
    """alpha * A B + beta * C, each matrix transposed on request, C broadcast."""
    product = jnp.matmul(a.T if transA else a, b.T if transB else b)
    if alpha != 1.0:
        product = (product * alpha).astype(a.dtype)
    if c is None or beta == 0.0:
        return product
    return product + (c if beta == 1.0 else (c * beta).astype(c.dtype))


@operator("Det", since=11)
def det(x):
    """The determinant of each matrix in the last two axes."""
    return jnp.linalg.det(x)


@operator("Einsum", since=12)
def einsum(*inputs, equation):
    """Einstein's sum."""
    return jnp.einsum(equation, *inputs)
