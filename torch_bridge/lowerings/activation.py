"""Activations, forward and backward.

Each formula is the one torch documents, with torch's choice at the kinks: `relu` has gradient 0 at
0, `hardtanh` has gradient 0 at both ends.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .argument_forms import wide, widely
from .registry import lower
from .vjp import by_vjp

_SQRT_HALF = math.sqrt(0.5)
_SIXTH = np.float32(1 / 6)  # torch's constant has 32 bits in float64 too
_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715  # of the tanh approximation of GELU (Hendrycks and Gimpel, arXiv:1606.08415)


def _keep(condition: jax.Array, x: jax.Array) -> jax.Array:
    """`x` where the condition holds, else 0."""
    return jnp.where(condition, x, jnp.zeros_like(x))


# Piecewise linear


@lower("aten::relu")
def _relu(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, 0)


@lower("aten::relu6")
def _relu6(x: jax.Array) -> jax.Array:
    return jnp.clip(x, 0, 6)


@lower("aten::threshold")
def _threshold(x: jax.Array, threshold: float, value: float) -> jax.Array:
    return jnp.where(wide(x) <= threshold, jnp.asarray(value, x.dtype), x)


@lower("aten::threshold_backward")
def _threshold_backward(grad: jax.Array, x: jax.Array, threshold: float) -> jax.Array:
    return jnp.where(wide(x) <= threshold, jnp.zeros_like(grad), grad)


@lower("aten::leaky_relu")
@widely
def _leaky_relu(x: jax.Array, negative_slope: float = 0.01) -> jax.Array:
    return jnp.where(x > 0, x, x * negative_slope)


@lower("aten::leaky_relu_backward")
@widely
def _leaky_relu_backward(
    grad: jax.Array, x: jax.Array, negative_slope: float, self_is_result: bool
) -> jax.Array:
    return jnp.where(x > 0, grad, grad * negative_slope)


@lower("aten::_prelu_kernel")
def _prelu(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.where(x > 0, x, weight * x)


@lower("aten::_prelu_kernel_backward")
def _prelu_backward(
    grad: jax.Array, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jnp.where(x > 0, grad, weight * grad), jnp.where(x > 0, jnp.zeros_like(grad), x * grad)


@lower("aten::hardtanh")
def _hardtanh(x: jax.Array, min_val: float = -1, max_val: float = 1) -> jax.Array:
    return jnp.clip(x, jnp.asarray(min_val, x.dtype), jnp.asarray(max_val, x.dtype))


@lower("aten::hardtanh_backward")
@widely
def _hardtanh_backward(grad: jax.Array, x: jax.Array, min_val: float, max_val: float) -> jax.Array:
    return jnp.where((x <= min_val) | (x >= max_val), jnp.zeros_like(grad), grad)


@lower("aten::hardsigmoid")
@widely
def _hardsigmoid(x: jax.Array) -> jax.Array:
    return jnp.clip(x + 3, 0, 6) / 6


@lower("aten::hardsigmoid_backward")
@widely
def _hardsigmoid_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    return _keep((x > -3) & (x < 3), grad * _SIXTH.astype(grad.dtype))


@lower("aten::hardswish")
@widely
def _hardswish(x: jax.Array) -> jax.Array:
    return x * jnp.clip(x + 3, 0, 6) / 6


@lower("aten::hardswish_backward")
@widely
def _hardswish_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    middle = jnp.where(x < 3, grad * (x / 3 + 0.5), grad)
    return jnp.where(x <= -3, jnp.zeros_like(grad), middle)


@lower("aten::hardshrink")
@widely
def _hardshrink(x: jax.Array, lambd: float = 0.5) -> jax.Array:
    return jnp.where((x >= -lambd) & (x <= lambd), jnp.zeros_like(x), x)


@lower("aten::softshrink")
@widely
def _softshrink(x: jax.Array, lambd: float = 0.5) -> jax.Array:
    return jnp.where(jnp.abs(x) > lambd, x - jnp.sign(x) * lambd, x * 0)


@lower("aten::hardshrink_backward", "aten::softshrink_backward")
@widely
def _shrink_backward(grad: jax.Array, x: jax.Array, lambd: float) -> jax.Array:
    return jnp.where((x >= -lambd) & (x <= lambd), jnp.zeros_like(grad), grad)


# Smooth


@lower("aten::sigmoid_backward")
@widely
def _sigmoid_backward(grad: jax.Array, y: jax.Array) -> jax.Array:
    return grad * jnp.conj(y * (1 - y))


@lower("aten::tanh_backward")
@widely
def _tanh_backward(grad: jax.Array, y: jax.Array) -> jax.Array:
    return grad * jnp.conj(1 - y * y)


@lower("aten::logit_backward")
@widely
def _logit_backward(grad: jax.Array, x: jax.Array, eps: float | None = None) -> jax.Array:
    low, outside = (0.0, jnp.nan) if eps is None or eps < 0 else (eps, 0.0)
    derivative = x * (1 - x)
    inside = jnp.where(derivative == 0, grad * jnp.inf, grad / derivative)  # also at -0.0
    return jnp.where((x < low) | (x > 1 - low), outside, inside)


@lower("aten::gelu")
@widely
def _gelu(x: jax.Array, *, approximate: str = "none") -> jax.Array:
    return jax.nn.gelu(x, approximate=approximate == "tanh")


@lower("aten::gelu_backward")
@widely
def _gelu_backward(grad: jax.Array, x: jax.Array, *, approximate: str = "none") -> jax.Array:
    if approximate == "tanh":
        t = jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3))
        derivative = _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x)
        return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * derivative)
    density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (_normal_cdf(x) + x * density)


def _normal_cdf(x: jax.Array) -> jax.Array:
    """One expression for forward and backward, so that the compiler computes it once."""
    return 0.5 * (1 + jax.lax.erf(x * _SQRT_HALF))


@lower("aten::silu")
@widely
def _silu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(x)


@lower("aten::silu_backward")
@widely
def _silu_backward(grad: jax.Array, x: jax.Array) -> jax.Array:
    s = jax.nn.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


@lower("aten::mish")
@widely
def _mish(x: jax.Array) -> jax.Array:
    return x * jnp.tanh(jax.nn.softplus(x))


lower("aten::mish_backward")(widely(by_vjp(_mish)))


@lower("aten::softplus")
@widely
def _softplus(x: jax.Array, beta: float = 1, threshold: float = 20) -> jax.Array:
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jax.nn.softplus(scaled) / beta)


@lower("aten::softplus_backward")
@widely
def _softplus_backward(grad: jax.Array, x: jax.Array, beta: float, threshold: float) -> jax.Array:
    return jnp.where(x * beta > threshold, grad, grad * jax.nn.sigmoid(x * beta))


@lower("aten::elu")
@widely
def _elu(
    x: jax.Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0
) -> jax.Array:
    return jnp.where(x > 0, x * scale, jnp.expm1(x * input_scale) * (alpha * scale))


@lower("aten::elu_backward")
@widely
def _elu_backward(
    grad: jax.Array, alpha: float, scale: float, input_scale: float, is_result: bool, x: jax.Array
) -> jax.Array:
    low = x + alpha * scale if is_result else alpha * scale * jnp.exp(x * input_scale)
    return jnp.where(x <= 0, grad * input_scale * low, grad * scale)


@lower("aten::celu")
def _celu(x: jax.Array, alpha: float = 1.0) -> jax.Array:
    return _elu(x, alpha, 1.0, 1 / alpha)


@lower("aten::log_sigmoid_forward", meta=lambda x: (x.new_empty(x.shape), x.new_empty(x.shape)))
@widely
def _log_sigmoid(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The result and `exp(-|x|)`, which torch keeps for the backward."""
    return jax.nn.log_sigmoid(x), jnp.exp(-jnp.abs(x))


@lower("aten::log_sigmoid_backward")
@widely
def _log_sigmoid_backward(grad: jax.Array, x: jax.Array, buffer: jax.Array) -> jax.Array:
    return grad * jax.nn.sigmoid(-x)


@lower("aten::glu")
@widely
def _glu(x: jax.Array, dim: int = -1) -> jax.Array:
    a, b = jnp.split(x, 2, axis=dim)
    return a * jax.nn.sigmoid(b)


@lower("aten::glu_backward")
@widely
def _glu_backward(grad: jax.Array, x: jax.Array, dim: int) -> jax.Array:
    a, b = jnp.split(x, 2, axis=dim)
    s = jax.nn.sigmoid(b)
    return jnp.concatenate([grad * s, grad * a * s * (1 - s)], axis=dim)


@lower("aten::glu_jvp", meta=lambda glu, x, dx, dim: torch.empty_like(glu))
def _glu_jvp(glu: jax.Array, x: jax.Array, dx: jax.Array, dim: int) -> jax.Array:
    """The tangent of `glu(x)`."""
    return jax.jvp(lambda x: _glu(x, dim), (x,), (dx.astype(x.dtype),))[1]


@lower(
    "aten::glu_backward_jvp", meta=lambda grad_x, grad, x, dgrad, dx, dim: torch.empty_like(grad_x)
)
def _glu_backward_jvp(
    grad_x: jax.Array, grad: jax.Array, x: jax.Array, dgrad: jax.Array, dx: jax.Array, dim: int
) -> jax.Array:
    """The tangent of the gradient of `x`."""
    steps = dgrad.astype(grad.dtype), dx.astype(x.dtype)
    return jax.jvp(lambda grad, x: _glu_backward(grad, x, dim), (grad, x), steps)[1]
