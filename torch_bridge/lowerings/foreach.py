"""Operators on lists of tensors, as `torch.optim` and `clip_grad_norm_` use them.

Each list operator is the plain one on every element, so after compilation nothing of the list
remains. Elements are promoted one by one: `_foreach_add` of an int32 and a float32 tensor with 0.5
gives two float32 tensors.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from isoshard.torch_bridge.lowerings.arguments import wide
from isoshard.torch_bridge.lowerings.registry import lower


def _together(x, other):
    """Two operands in one dtype; a number that was lifted to an array counts as a plain one."""
    if isinstance(other, bool | int | float | complex):
        dtype = jnp.result_type(x, other)
        return x.astype(dtype), jnp.asarray(other, dtype)
    dtype = jnp.promote_types(x.dtype, other.dtype)
    if other.ndim == 0 and x.ndim:
        dtype = jnp.result_type(x.dtype, float) if _lifts(x, other) else x.dtype
    return x.astype(dtype), other.astype(dtype)


def _lifts(x, other):
    return jnp.issubdtype(other.dtype, jnp.inexact) and not jnp.issubdtype(x.dtype, jnp.inexact)


def _binary(function: Callable) -> Callable:
    """The element function for two operands of any dtypes."""
    return lambda x, other: function(*_together(x, other))


def _fixed(value):
    """One number for every element."""
    return itertools.repeat(value)


def _clip_min(x, y):
    return jnp.maximum(x, y)


_BINARY = {
    "mul": jnp.multiply,
    "div": jnp.true_divide,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "clamp_min": jnp.maximum,
    "clamp_max": jnp.minimum,
    "pow": jnp.power,
}

_UNARY = {
    "abs": jnp.abs,
    "acos": jnp.arccos,
    "asin": jnp.arcsin,
    "atan": jnp.arctan,
    "ceil": jnp.ceil,
    "clone": lambda x: x,
    "cos": jnp.cos,
    "cosh": jnp.cosh,
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "exp": jnp.exp,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "frac": lambda x: x - jnp.trunc(x),
    "lgamma": jax.scipy.special.gammaln,
    "log": jnp.log,
    "log10": jnp.log10,
    "log1p": jnp.log1p,
    "log2": jnp.log2,
    "max": jnp.max,
    "neg": jnp.negative,
    "reciprocal": jnp.reciprocal,
    "round": jnp.round,
    "rsqrt": jax.lax.rsqrt,
    "sigmoid": jax.nn.sigmoid,
    "sign": jnp.sign,
    "sin": jnp.sin,
    "sinh": jnp.sinh,
    "sqrt": jnp.sqrt,
    "tan": jnp.tan,
    "tanh": jnp.tanh,
    "trunc": jnp.trunc,
    "zero": jnp.zeros_like,
}
_EXACT = frozenset({"abs", "ceil", "clone", "floor", "max", "neg", "round", "sign", "trunc", "zero"})


def _each_unary(function, exact):
    def run(tensors, **placement):
        return [function(x if exact else _floating(wide(x))) for x in tensors]

    return run


def _floating(x):
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype("float32")


def _each_binary(function):
    pair = _binary(function)

    def by_list(tensors, others):
        return [pair(x, y) for x, y in zip(tensors, others, strict=True)]

    def by_one(tensors, other):
        return [pair(x, other) for x in tensors]

    return by_list, by_one


for _name, _function in _UNARY.items():
    lower(f"aten::_foreach_{_name}")(_each_unary(_function, _name in _EXACT))
for _name, _function in _BINARY.items():
    _by_list, _by_one = _each_binary(_function)
    _number = "exponent" if _name == "pow" else "scalar"
    lower(f"aten::_foreach_{_name}.List")(_by_list)
    lower(f"aten::_foreach_{_name}.Scalar", lift=(_number,))(_by_one)
    _numbers = "exponent" if _name == "pow" else "scalars"
    lower(f"aten::_foreach_{_name}.ScalarList", lift=(_numbers,))(_by_list)
    lower(f"aten::_foreach_{_name}.Tensor")(_by_one)


def _scaled(y, alpha):
    return y if isinstance(alpha, int) and alpha == 1 else jnp.multiply(*_together(y, alpha))


def _add(x, y):
    return jnp.add(*_together(x, y))


@lower("aten::_foreach_add.List", lift=("alpha",))
def _add_list(tensors, others, *, alpha=1):
    return [_add(x, _scaled(y, alpha)) for x, y in zip(tensors, others, strict=True)]


@lower("aten::_foreach_add.Tensor", lift=("alpha",))
def _add_tensor(tensors, other, *, alpha=1):
    return [_add(x, _scaled(other, alpha)) for x in tensors]


@lower("aten::_foreach_add.Scalar", lift=("scalar",))
def _add_number(tensors, scalar):
    return [_add(x, scalar) for x in tensors]


@lower("aten::_foreach_add.ScalarList", lift=("scalars",))
def _add_numbers(tensors, scalars):
    return [_add(x, y) for x, y in zip(tensors, scalars, strict=True)]


@lower("aten::_foreach_sub.List", lift=("alpha",))
def _sub_list(tensors, others, *, alpha=1):
    scaled = [_scaled(y, alpha) for y in others]
    return [jnp.subtract(*_together(x, y)) for x, y in zip(tensors, scaled, strict=True)]


@lower("aten::_foreach_sub.Scalar", lift=("scalar",))
def _sub_number(tensors, scalar):
    return [jnp.subtract(*_together(x, scalar)) for x in tensors]


@lower("aten::_foreach_sub.ScalarList", lift=("scalars",))
def _sub_numbers(tensors, scalars):
    return [jnp.subtract(*_together(x, y)) for x, y in zip(tensors, scalars, strict=True)]


@lower("aten::_foreach_pow.ScalarAndTensor", lift=("self",))
def _pow_of_number(base, exponents):
    return [jnp.power(*reversed(_together(x, base))) for x in exponents]


def _addcmul(x, a, b, value):
    return _add(x, _scaled(jnp.multiply(*_together(a, b)), value))


def _addcdiv(x, a, b, value):
    return _add(x, _scaled(jnp.true_divide(*_together(a, b)), value))


def _lerp(x, end, weight):
    """`x + weight * (end - x)`, from whichever end is nearer, as torch computes it."""
    gap = end - x
    _, weight = _together(x, weight)
    if isinstance(weight, jax.Array) or not isinstance(weight, float):
        near = jnp.abs(weight) < 0.5
        return jnp.where(near, x + weight * gap, end - gap * (1 - weight))
    return x + weight * gap


def _ternary(function, option):
    """List operators on three lists with one number, a list of numbers, or a tensor of them."""

    def by_one(x, a, b, value=1):
        return [function(*each, value) for each in zip(x, a, b, strict=True)]

    def by_list(x, a, b, scalars):
        values = list(scalars)
        return [function(*each) for each in zip(x, a, b, values, strict=True)]

    return by_one, by_list


for _name, _function in {"addcmul": _addcmul, "addcdiv": _addcdiv}.items():
    _by_one, _by_list = _ternary(_function, "value")
    lower(f"aten::_foreach_{_name}.Scalar", lift=("value",))(_by_one)
    lower(f"aten::_foreach_{_name}.ScalarList", lift=("scalars",))(_by_list)
    lower(f"aten::_foreach_{_name}.Tensor")(_by_list)


@lower("aten::_foreach_lerp.Scalar", lift=("weight",))
def _lerp_number(tensors, ends, weight):
    return [_lerp(x, end, weight) for x, end in zip(tensors, ends, strict=True)]


@lower("aten::_foreach_lerp.List")
@lower("aten::_foreach_lerp.ScalarList", lift=("weight",))
def _lerp_list(tensors, ends, weight):
    return [_lerp(x, end, w) for x, end, w in zip(tensors, ends, weight, strict=True)]


@lower("aten::_foreach_copy")
def _copy(tensors, sources, non_blocking=False):
    return [
        jnp.broadcast_to(source, x.shape).astype(x.dtype)
        for x, source in zip(tensors, sources, strict=True)
    ]


@lower("aten::_foreach_mm")
def _mm(tensors, others):
    return [jnp.matmul(x, y) for x, y in zip(tensors, others, strict=True)]


@lower("aten::_foreach_norm.Scalar")
def _norm(tensors, ord=2, dtype=None):
    return [_vector_norm(wide(x if dtype is None else x.astype(dtype)), ord) for x in tensors]


@lower("aten::_foreach_powsum.Scalar")
def _powsum(tensors, ord=2, dtype=None):
    cast = [wide(x if dtype is None else x.astype(dtype)) for x in tensors]
    return [jnp.sum(jnp.abs(x) ** ord) for x in cast]


def _vector_norm(x, ord):
    """The norm of all elements, without the flattening that would undo a sharding."""
    size = jnp.abs(x)
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(size)))
    if ord == 1:
        return jnp.sum(size)
    if ord == 0:
        return jnp.sum((size != 0).astype(size.dtype))
    if ord == float("inf"):
        return jnp.max(size, initial=0)
    if ord == float("-inf"):
        return jnp.min(size, initial=jnp.inf)
    return jnp.sum(size**ord) ** (1 / ord)
