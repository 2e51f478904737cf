"""Activation functions."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from .operator_arguments import axis_of, choice
from .registry import operator


@operator("Relu")
def relu(x):
    """The positive part."""
    return jnp.maximum(x, jnp.zeros((), x.dtype))


@operator("Sigmoid")
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return jax.nn.sigmoid(x)


@operator("Tanh")
def tanh(x):
    """The hyperbolic tangent."""
    return jnp.tanh(x)


@operator("LeakyRelu", since=6)
def leaky_relu(x, *, alpha=0.01):
    """The input; where it is negative, times `alpha`."""
    return jnp.where(x < 0, x * alpha, x)


@operator("ThresholdedRelu", since=10)
def thresholded_relu(x, *, alpha=1.0):
    """The input where it is greater than `alpha`, else zero."""
    return jnp.where(x > alpha, x, 0)


@operator("Elu", since=6)
def elu(x, *, alpha=1.0):
    """The input; where it is negative, alpha * (exp(x) - 1)."""
    return jnp.where(x < 0, alpha * _expm1_of_negative(x), x)


@operator("Selu", since=6)
def selu(x, *, alpha=1.67326319217681884765625, gamma=1.05070102214813232421875):
    """`Elu`, scaled by `gamma`."""
    return gamma * elu(x, alpha=alpha)


@operator("Celu", since=12)
def celu(x, *, alpha=1.0):
    """The input; where it is negative, alpha * (exp(x / alpha) - 1)."""
    return jnp.where(x < 0, alpha * _expm1_of_negative(x / alpha), x)


def _expm1_of_negative(x):
    """exp(x) - 1, without an overflow (and its NaN gradient) where x is positive."""
    return jnp.expm1(jnp.where(x < 0, x, 0))


@operator("Softplus")
def softplus(x):
    """log(1 + exp(x))."""
    return jax.nn.softplus(x)


@operator("Softsign")
def softsign(x):
    """x / (1 + |x|)."""
    return x / (1 + jnp.abs(x))


@operator("HardSigmoid", since=6)
def hard_sigmoid(x, *, alpha=0.2, beta=0.5):
    """alpha * x + beta, between 0 and 1."""
    return jnp.clip(alpha * x + beta, 0, 1)


@operator("HardSwish", since=14)
def hard_swish(x):
    """The input times its `HardSigmoid` with alpha 1/6."""
    return x * jnp.clip(x / 6 + 0.5, 0, 1)


@operator("Swish", since=24)
def swish(x, *, alpha=1.0):
    """The input times the sigmoid of alpha times the input."""
    return x * jax.nn.sigmoid(alpha * x)


@operator("Mish", since=18)
def mish(x):
    """The input times the hyperbolic tangent of its `Softplus`."""
    return x * jnp.tanh(jax.nn.softplus(x))


@operator("Gelu", since=20)
def gelu(x, *, approximate="none"):
    """The input times the normal distribution's share below it; "tanh" approximates that."""
    if choice(approximate, "approximate", ("none", "tanh")) == "tanh":
        return jax.nn.gelu(x, approximate=True)
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


@operator("Shrink", since=9)
def shrink(x, *, lambd=0.5, bias=0.0):
    """The input moved by `bias` towards zero; zero where it is within `lambd` of it."""
    lambd, bias = (jnp.asarray(value, x.dtype) for value in (lambd, bias))
    return jnp.where(x < -lambd, x + bias, jnp.where(x > lambd, x - bias, 0)).astype(x.dtype)


@operator("Softmax", since=13)
def softmax(x, *, axis=-1):
    """Exponentials along an axis, divided by their sum."""
    return jax.nn.softmax(x, axis=axis_of(axis, x.ndim))


@operator("LogSoftmax", since=13)
def log_softmax(x, *, axis=-1):
    """The logarithm of `Softmax`."""
    return jax.nn.log_softmax(x, axis=axis_of(axis, x.ndim))


@operator("Hardmax", since=13)
def hardmax(x, *, axis=-1):
    """One at the first largest element along an axis, zero elsewhere."""
    axis = axis_of(axis, x.ndim)
    return jax.nn.one_hot(jnp.argmax(x, axis), x.shape[axis], dtype=x.dtype, axis=axis)


def _flattened(function):
    """An older form: along all axes from `axis` on, as if they were one."""

    def flattened_rows(x, *, axis=1):
        rows = math.prod(x.shape[: axis_of(axis, x.ndim)])
        return function(x.reshape(rows, -1), axis=-1).reshape(x.shape)

    return flattened_rows


for _op_type, _function in (
    ("Softmax", softmax),
    ("LogSoftmax", log_softmax),
    ("Hardmax", hardmax),
):
    operator(_op_type)(_flattened(_function))
