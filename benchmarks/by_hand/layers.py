"""Layers over a dict of parameters, which have the names they have in torch.

>>> import jax.numpy as jnp
>>> params = {"fc.weight": jnp.ones((2, 3)), "fc.bias": jnp.zeros(2)}
>>> linear(params, "fc", jnp.ones((1, 3))).tolist()
[[3.0, 3.0]]
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

Params = dict[str, jax.Array]


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """Outputs of a linear layer with torch's order of weights."""
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def norm(params: Params, name: str, x: jax.Array, epsilon: float = 1e-5) -> jax.Array:
    """Layer norm over the last axis, with the weights of this name."""
    return layer_norm(x, params[f"{name}.weight"], params[f"{name}.bias"], epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    """Normalise the last axis to mean 0 and variance 1, then scale and shift.

    The gradient is the closed formula. Left to automatic differentiation, XLA's CPU compiler
    recomputes the residual stream in every layer, and the whole step takes five times as long.
    """
    return _layer_norm(x, weight, bias, epsilon)[0]


def _layer_norm(x: jax.Array, weight: jax.Array, bias: jax.Array, epsilon: float):
    scale = jax.lax.rsqrt(x.var(-1, keepdims=True) + epsilon)
    normal = (x - x.mean(-1, keepdims=True)) * scale
    return normal * weight + bias, (normal, scale, weight)


def _layer_norm_gradient(epsilon: float, saved: tuple[jax.Array, ...], grad: jax.Array):
    normal, scale, weight = saved
    inner = grad * weight
    along = normal * (normal * inner).mean(-1, keepdims=True)
    x = scale * (inner - inner.mean(-1, keepdims=True) - along)
    return x, (grad * normal).sum((0, 1)), grad.sum((0, 1))


layer_norm.defvjp(_layer_norm, _layer_norm_gradient)


def attention(params: Params, name: str, x: jax.Array, heads: int, *, is_causal: bool) -> jax.Array:
    """Self-attention; the outputs of `qkv` are ordered head by head."""
    batch, length, width = x.shape
    qkv = linear(params, f"{name}.qkv", x).reshape(batch, length, heads, 3, width // heads)
    q, k, v = jnp.unstack(qkv, axis=3)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
    return linear(params, f"{name}.proj", y.reshape(batch, length, width))


def rms_norm(params: Params, name: str, x: jax.Array, epsilon: float) -> jax.Array:
    """Divide by the root mean square of the last axis, in float32 as transformers does."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + epsilon)
    return params[f"{name}.weight"] * (wide * scale).astype(x.dtype)


def grouped_attention(
    params: Params, name: str, x: jax.Array, size: Any, theta: float
) -> jax.Array:
    """Causal self-attention with rotary positions; several query heads share a key head.

    Args:
        params: weights of `q_proj`, `k_proj`, `v_proj` and `o_proj` below the name.
        name: of the layer.
        x: `(batch, length, width)`.
        size: has `width` and `heads`.
        theta: base of the rotary angles.
    """
    batch, length, width = x.shape
    q, k, v = (
        (x @ params[f"{name}.{letter}_proj.weight"].T).reshape(
            batch, length, -1, width // size.heads
        )
        for letter in "qkv"
    )
    q, k = _rotated(q, theta), _rotated(k, theta)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return y.reshape(batch, length, width) @ params[f"{name}.o_proj.weight"].T


def _rotated(x: jax.Array, theta: float) -> jax.Array:
    """Rotary positions: the halves of a head's features are real and imaginary parts."""
    length, features = x.shape[1], x.shape[3]
    rate = theta ** -(jnp.arange(0, features, 2) / features)
    angle = jnp.arange(length)[:, None] * rate[None, :]
    cos, sin = (
        jnp.tile(f(angle), (1, 2))[None, :, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin)
    )
    real, imaginary = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-imaginary, real], -1) * sin


def conv(x: jax.Array, kernel: jax.Array, stride: int = 1, padding: int = 0) -> jax.Array:
    """Convolve `(batch, height, width, channels)` with a `(height, width, in, out)` kernel."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        [(padding, padding)] * 2,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """The mean over targets that count, as `torch.nn.functional.cross_entropy` defines it."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    counts = targets != IGNORED
    return -jnp.where(counts, chosen[..., 0], 0).sum() / counts.sum()


IGNORED = -100  # the target that torch's cross-entropy leaves out
