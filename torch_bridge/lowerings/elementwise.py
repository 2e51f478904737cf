"""Functions of one array: rounding, exponentials, trigonometry, special functions.

Most are a row of a table: the aten name and the JAX function. A function is written out where
torch and JAX differ at the edges (NaN, poles, signed zeros).

>>> from isoshard.torch_bridge.lowerings import registry
>>> registry.find(torch.ops.aten.round.default).function(jnp.array([0.5, 1.5, -0.5]))
Array([ 0.,  2., -0.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import jax.scipy.special as jss
import torch

from .argument_forms import as_scalar, wide
from .registry import lower

OWN_DTYPE: dict[str, Callable[..., jax.Array]] = {
    "neg": jnp.negative,
    "abs": jnp.abs,
    "floor": jnp.floor,
    "ceil": jnp.ceil,
    "trunc": jnp.trunc,
    "round": jnp.round,
    "square": jnp.square,
    "conj_physical": jnp.conj,
    "_conj_physical": jnp.conj,
    "positive": lambda x: x,
    "bitwise_not": jnp.bitwise_not,
    "logical_not": jnp.logical_not,
    "isfinite": jnp.isfinite,
    "isinf": jnp.isinf,
    "isnan": jnp.isnan,
    "isposinf": jnp.isposinf,
    "isneginf": jnp.isneginf,
}
"""Functions that need no other dtype, by name."""


def _sinc(x: jax.Array) -> jax.Array:
    """NaN at infinity, as torch has it; 0 from JAX 0.12 on."""
    return jnp.where(jnp.isinf(x), jnp.nan, jnp.sinc(x))


FLOAT: dict[str, Callable[..., jax.Array]] = {
    "exp": jnp.exp,
    "exp2": jnp.exp2,
    "expm1": jnp.expm1,
    "log": jnp.log,
    "log2": jnp.log2,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "sqrt": jnp.sqrt,
    "rsqrt": jax.lax.rsqrt,
    "reciprocal": jnp.reciprocal,
    "sin": jnp.sin,
    "cos": jnp.cos,
    "tan": jnp.tan,
    "asin": jnp.arcsin,
    "acos": jnp.arccos,
    "atan": jnp.arctan,
    "sinh": jnp.sinh,
    "cosh": jnp.cosh,
    "tanh": jnp.tanh,
    "asinh": jnp.arcsinh,
    "acosh": jnp.arccosh,
    "atanh": jnp.arctanh,
    "sinc": _sinc,
    "deg2rad": jnp.deg2rad,
    "rad2deg": jnp.rad2deg,
    "sigmoid": jax.nn.sigmoid,
    "erf": jax.lax.erf,
    "erfc": jax.lax.erfc,
    "erfinv": jax.lax.erf_inv,
    "lgamma": jax.lax.lgamma,
    "i0": jss.i0,
    "special_i0e": jss.i0e,
    "special_i1": jss.i1,
    "special_i1e": jss.i1e,
    "special_entr": jss.entr,
    "special_ndtri": jss.ndtri,
    "special_log_ndtr": jss.log_ndtr,
}
"""Functions of floats, by name; integers are converted first."""

for _name, _function in OWN_DTYPE.items():
    lower(f"aten::{_name}")(_function)
for _name, _function in FLOAT.items():
    lower(f"aten::{_name}", promote="float")(_function)


@lower("aten::sign", "aten::sgn")
def sign(x: jax.Array) -> jax.Array:
    """-1, 0 or 1; 0 for NaN, and for 0 of either sign."""
    if jnp.issubdtype(x.dtype, jnp.bool_):
        return x
    return jnp.where(jnp.isnan(x) | (x == 0), as_scalar(0, x.dtype), jnp.sign(x))


@lower("aten::signbit")
def signbit(x: jax.Array) -> jax.Array:
    """Whether the sign bit is set: negative, or -0."""
    return jnp.signbit(x) if jnp.issubdtype(x.dtype, jnp.floating) else x < 0


@lower("aten::round.decimals")
def round_decimals(x: jax.Array, *, decimals: int) -> jax.Array:
    """Round half to even after `decimals` digits behind (or, negative, before) the point."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    x, scale = wide(x), 10.0 ** abs(decimals)
    return jnp.round(x * scale) / scale if decimals > 0 else jnp.round(x / scale) * scale


@lower("aten::frexp.Tensor")
def frexp(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mantissa in [0.5, 1) and power of 2."""
    return jnp.frexp(x)


@lower("aten::frac")
def frac(x: jax.Array) -> jax.Array:
    """The part behind the point, with the sign of `x`."""
    return x - jnp.trunc(x)


@lower("aten::angle", promote="float")
def angle(x: jax.Array) -> jax.Array:
    """The argument of complex numbers; 0 or pi for real ones."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.angle(x)
    return jnp.where(
        jnp.isnan(x), x, jnp.where(x < 0, as_scalar(jnp.pi, x.dtype), as_scalar(0, x.dtype))
    )


@lower("aten::logit", promote="float")
def logit(x: jax.Array, eps: float | None = None) -> jax.Array:
    """Inverse of the sigmoid, of `x` clamped to `[eps, 1 - eps]`."""
    x = wide(x)
    if eps is not None:
        x = jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


@lower("aten::nan_to_num", "aten::nan_to_num_", meta=lambda x, *_, **__: torch.empty_like(x))
def nan_to_num(
    x: jax.Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> jax.Array:
    """Replace NaN by `nan` (0), infinities by arguments or the largest finite values."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=posinf, neginf=neginf)


@lower("aten::digamma", promote="float")
def digamma(x: jax.Array) -> jax.Array:
    """Logarithmic derivative of gamma; a signed infinity at 0."""
    return jnp.where(x == 0, jnp.copysign(as_scalar(jnp.inf, x.dtype), -x), jax.lax.digamma(x))


@lower("aten::special_erfcx", promote="float")
def erfcx(x: jax.Array) -> jax.Array:
    """`exp(x^2) erfc(x)`, by a continued fraction where the product would be 0 times infinity."""
    near = jnp.exp(jnp.where(x < 3, x * x, 0)) * jax.lax.erfc(x)
    far = jnp.maximum(x, 3)
    tail = far
    for k in range(24, 0, -1):
        tail = far + (k / 2) / tail
    return jnp.where(x < 3, near, 1 / (jnp.sqrt(jnp.pi).astype(x.dtype) * tail))
