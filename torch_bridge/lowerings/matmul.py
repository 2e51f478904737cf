"""Matrix products.

Each is the plain JAX product, with the scaling that torch allows (`beta * self + alpha * product`)
left out when it is the integer one that torch passes by default. What is added to a product is
added before the one rounding, so in float32 where the operands have fewer bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from . import integer_products
from .argument_forms import wide, wide_all, wide_dtype
from .registry import lower


def _is(scalar: jax.Array | complex, value: int) -> bool:
    """Whether a scalar that may be lifted to an array is statically `value`."""
    return isinstance(scalar, int | float) and scalar == value


def _scale(scalar: jax.Array | complex, x: jax.Array) -> jax.Array:
    return x if _is(scalar, 1) else jnp.asarray(scalar).astype(x.dtype) * x


def _combine(
    x: jax.Array, product: jax.Array, beta: jax.Array | complex, alpha: jax.Array | complex
) -> jax.Array:
    """`beta * x + alpha * product`; as in torch, `x` is not read when beta is 0."""
    x, product = wide(x), wide(product)
    product = _scale(alpha, product)
    if _is(beta, 0):
        return product
    term = _scale(beta, x).astype(product.dtype)
    if not isinstance(beta, int | float):
        term = jnp.where(beta == 0, jnp.zeros_like(term), term)
    return product + term


def _sums(a: jax.Array) -> np.dtype:
    """The dtype in which products of a dtype are summed."""
    return wide_dtype(a.dtype)


@lower("aten::mm", "aten::bmm", "aten::mv")
def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return integer_products.matmul(a, b)


def _summed(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(a * b)


@lower("aten::dot")
def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return integer_products.on_every_platform(jnp.dot, _summed, a, b)


@lower("aten::vdot")
def _vdot(a: jax.Array, b: jax.Array) -> jax.Array:
    return integer_products.on_every_platform(jnp.vdot, _summed, a, b)


@lower("aten::mm.dtype", "aten::bmm.dtype")
def _matmul_as(a: jax.Array, b: jax.Array, out_dtype: np.dtype) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type=out_dtype)


@lower("aten::_int_mm")
def _int_mm(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, preferred_element_type="int32")


@lower("aten::addmm", "aten::baddbmm", "aten::addmv", lift=("beta", "alpha"))
def _addmm(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    beta: jax.Array | complex = 1,
    alpha: jax.Array | complex = 1,
) -> jax.Array:
    product = integer_products.matmul(a, b, preferred_element_type=_sums(a))
    return _combine(x, product, beta, alpha)


@lower("aten::addmm.dtype", "aten::baddbmm.dtype", lift=("beta", "alpha"))
def _addmm_as(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    out_dtype: np.dtype,
    *,
    beta: jax.Array | complex = 1,
    alpha: jax.Array | complex = 1,
) -> jax.Array:
    return _combine(x, _matmul_as(a, b, out_dtype), beta, alpha)


@lower("aten::addbmm", lift=("beta", "alpha"))
def _addbmm(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    beta: jax.Array | complex = 1,
    alpha: jax.Array | complex = 1,
) -> jax.Array:
    sums = _sums(a)
    product = integer_products.on_every_platform(
        lambda a, b: jnp.einsum("bij,bjk->ik", a, b, preferred_element_type=sums),
        lambda a, b: jnp.sum(a[..., None] * b[:, None], axis=(0, 2)),
        *(a, b),
    )
    return _combine(x, product, beta, alpha)


@lower("aten::addr", lift=("beta", "alpha"))
def _addr(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    *,
    beta: jax.Array | complex = 1,
    alpha: jax.Array | complex = 1,
) -> jax.Array:
    dtype = jnp.result_type(x, a, b)
    x, a, b = (array.astype(dtype) for array in (x, a, b))
    return _combine(x, jnp.outer(wide(a), wide(b)), beta, alpha)


@lower("aten::linear")
def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """`x @ weight.T`, and a bias added before the one rounding to the dtype of `x`."""
    axes = (((x.ndim - 1,), (weight.ndim - 1,)), ((), ()))
    sums = None if bias is None else _sums(x)
    out = integer_products.dot_general(x, weight, axes, preferred_element_type=sums)
    return out if bias is None else (out + wide(bias)).astype(x.dtype)


@lower("aten::_trilinear")
def _trilinear(
    i1: jax.Array,
    i2: jax.Array,
    i3: jax.Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int = 1,
) -> jax.Array:
    """Sum over `sumdim` of the product of three tensors, each unsqueezed at its `expand` axes."""
    rank = i1.ndim + len(expand1)
    expands = expand1, expand2, expand3
    axes = [[d for d in range(rank) if d not in set(expand)] for expand in expands]
    out = [d for d in range(rank) if d not in set(sumdim)]
    i1, i2, i3 = wide_all(i1, i2, i3)

    def summed(*factors: jax.Array) -> jax.Array:
        spread = [jnp.expand_dims(x, tuple(e)) for x, e in zip(factors, expands, strict=True)]
        return jnp.sum(spread[0] * spread[1] * spread[2], axis=tuple(sumdim))

    return integer_products.on_every_platform(
        lambda i1, i2, i3: jnp.einsum(i1, axes[0], i2, axes[1], i3, axes[2], out),
        summed,
        *(i1, i2, i3),
    )
