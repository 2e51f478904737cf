"""Softmax and its logarithm along one axis, forward and backward.

The maximum is subtracted first, so nothing overflows. A row of minus infinities gives NaN, except
from `_safe_softmax`, which attention uses: there a row with everything masked gives zeros. Shapes
are handled as torch does: a 0-d tensor has an axis 0, and an empty one gives an empty result.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.nn.dot_product_attention import softmax

from .argument_forms import at_least_1d, wide, widely
from .registry import lower


def _sum(x: jax.Array, dim: int) -> jax.Array:
    """The sum along `dim`, with `keepdims`; a 0-d array is returned unchanged."""
    return jnp.sum(x, axis=dim, keepdims=True) if x.ndim else x


def _shifted(x: jax.Array, dim: int) -> jax.Array:
    """`x` in the dtype to compute in, minus its maximum along `dim`."""
    x = wide(at_least_1d(x))
    return x - jnp.max(x, axis=dim, keepdims=True) if x.size else x


@lower("aten::_softmax")
def _softmax(x: jax.Array, dim: int, half_to_float: bool = False) -> jax.Array:
    e = jnp.exp(_shifted(x, dim))
    return (e / _sum(e, dim)).reshape(x.shape)


@lower("aten::_log_softmax")
def _log_softmax(x: jax.Array, dim: int, half_to_float: bool = False) -> jax.Array:
    s = _shifted(x, dim)
    return (s - jnp.log(_sum(jnp.exp(s), dim))).reshape(x.shape)


@lower("aten::softmax.int")
def _softmax_as(x: jax.Array, dim: int, dtype: np.dtype | None = None) -> jax.Array:
    return _softmax(x if dtype is None else x.astype(dtype), dim)


@lower("aten::log_softmax.int")
def _log_softmax_as(x: jax.Array, dim: int, dtype: np.dtype | None = None) -> jax.Array:
    return _log_softmax(x if dtype is None else x.astype(dtype), dim)


@lower("aten::_safe_softmax")
def _safe_softmax(x: jax.Array, dim: int, dtype: np.dtype | None = None) -> jax.Array:
    wider = at_least_1d(wide(x if dtype is None else x.astype(dtype)))
    return softmax(wider, dim)[0].reshape(x.shape)


@lower("aten::_softmax_backward_data")
@widely
def _softmax_backward(grad: jax.Array, y: jax.Array, dim: int, input_dtype: np.dtype) -> jax.Array:
    g = grad * y
    return g - y * _sum(g, dim)


@lower("aten::_log_softmax_backward_data")
@widely
def _log_softmax_backward(
    grad: jax.Array, y: jax.Array, dim: int, input_dtype: np.dtype
) -> jax.Array:
    return grad - jnp.exp(y) * _sum(grad, dim)
