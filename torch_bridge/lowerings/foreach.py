"""Operators on lists of tensors, as `torch.optim` and `clip_grad_norm_` use them.

Each list operator is the plain one on every element, so after compilation nothing of the list
remains. Elements are promoted one by one: adding 0.5 to an int32 and a float32 tensor gives two
float32 tensors. Half-precision elements are computed in float32 and rounded once, as torch does;
otherwise a bfloat16 average times 0.999 would never decay.

>>> [x.dtype.name for x in _BY_SCALAR["add"]([jnp.ones(2, "int32"), jnp.ones(2)], 0.5)]
['float32', 'float32']
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import integer_products
from .argument_forms import cast, floating, wide, wide_all
from .elementwise import FLOAT, OWN_DTYPE, frac, sign
from .extremes import largest, smallest
from .registry import lower


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | complex)


def _rank(x: jax.Array) -> int:
    """bool < integer < float < complex: what torch promotes by before it looks at widths."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    return next(rank for rank, kind in enumerate(kinds) if jnp.issubdtype(x.dtype, kind))


def _together(x: jax.Array, other: Any) -> tuple[jax.Array, jax.Array]:
    """Two operands in the dtype torch computes in; 0-d tensors weigh less than others."""
    x = wide(x)
    if _is_scalar(other):
        dtype = jnp.result_type(x, other)
        return cast(x, dtype), jnp.asarray(other, dtype)
    other = wide(other)
    if x.dtype == other.dtype:
        return x, other
    dtype = jnp.promote_types(x.dtype, other.dtype)
    if x.ndim and not other.ndim and _rank(other) <= _rank(x):
        dtype = x.dtype
    elif other.ndim and not x.ndim and _rank(x) <= _rank(other):
        dtype = other.dtype
    return cast(x, dtype), cast(other, dtype)


def _power(x: jax.Array, exponent: jax.Array | complex) -> jax.Array:
    if type(exponent) is int:
        return jnp.power(wide(x), exponent)
    return jnp.power(*_together(x, exponent))


def _over(function: Callable, primitive: Callable) -> Callable:
    """On two operands; the primitive itself, which is traced much sooner, where it is the same."""

    def run(x: jax.Array, other: Any) -> jax.Array:
        x, other = _together(x, other)
        same = x.shape == other.shape or not other.ndim
        return (primitive if same and jnp.issubdtype(x.dtype, jnp.floating) else function)(x, other)

    return run


def _with_list_forms(functions: dict[str, Callable]) -> dict[str, Callable]:
    """The functions for which torch has an operator on lists."""
    aten = torch.ops.aten
    return {name: f for name, f in functions.items() if hasattr(aten, f"_foreach_{name}")}


_BINARY = {
    "add": _over(jnp.add, jax.lax.add),
    "sub": _over(jnp.subtract, jax.lax.sub),
    "mul": _over(jnp.multiply, jax.lax.mul),
    "div": _over(jnp.true_divide, jax.lax.div),
    "maximum": _over(jnp.maximum, jax.lax.max),
    "minimum": _over(jnp.minimum, jax.lax.min),
    "clamp_min": _over(jnp.maximum, jax.lax.max),
    "clamp_max": _over(jnp.minimum, jax.lax.min),
    "pow": _power,
}
_ADD, _SUB, _MUL = (_BINARY[name] for name in ("add", "sub", "mul"))
_EXACT = {
    **_with_list_forms(OWN_DTYPE),
    "clone": lambda x: x,
    "frac": frac,
    "max": jnp.max,
    "sign": sign,
    "zero": jnp.zeros_like,
}
_FLOAT = _with_list_forms(FLOAT)


def _each(function: Callable) -> Callable:
    return lambda tensors, **placement: [function(x) for x in tensors]


def _each_with_shared(function: Callable) -> Callable:
    """Each element with the same scalar or tensor, whatever the schema calls it."""

    def run(
        tensors: Sequence[jax.Array], *other: jax.Array | complex, **named: jax.Array | complex
    ) -> list[jax.Array]:
        (value,) = other or named.values()
        return [function(x, value) for x in tensors]

    return run


def _each_with_its_own(function: Callable) -> Callable:
    def run(
        tensors: Sequence[jax.Array],
        *others: Sequence[jax.Array | complex],
        **named: Sequence[jax.Array | complex],
    ) -> list[jax.Array]:
        (values,) = others or named.values()
        return [function(x, value) for x, value in zip(tensors, values, strict=True)]

    return run


_BY_SCALAR = {name: _each_with_shared(function) for name, function in _BINARY.items()}
_BY_LIST = {name: _each_with_its_own(function) for name, function in _BINARY.items()}

for _name, _function in _EXACT.items():
    lower(f"aten::_foreach_{_name}")(_each(_function))
for _name, _function in _FLOAT.items():
    lower(f"aten::_foreach_{_name}")(_each(lambda x, f=_function: f(floating(wide(x)))))
for _name in _BINARY:
    _scalars = ("exponent",) if _name == "pow" else ("scalar", "scalars")
    lower(f"aten::_foreach_{_name}.Scalar", lift=_scalars)(_BY_SCALAR[_name])
    lower(f"aten::_foreach_{_name}.ScalarList", lift=_scalars)(_BY_LIST[_name])
    if _name not in ("add", "sub"):  # these have an alpha: below
        lower(f"aten::_foreach_{_name}.List")(_BY_LIST[_name])


for _name in ("mul", "div"):
    lower(f"aten::_foreach_{_name}.Tensor")(_BY_SCALAR[_name])


def _scaled(y: jax.Array, alpha: jax.Array | complex) -> jax.Array:
    """`alpha * y`; nothing to do for the integer 1 that torch passes by default."""
    return y if type(alpha) is int and alpha == 1 else _BINARY["mul"](y, alpha)


@lower("aten::_foreach_add.List", lift=("alpha",))
def _add_list(
    tensors: Sequence[jax.Array], others: Sequence[jax.Array], *, alpha: jax.Array | complex = 1
) -> list[jax.Array]:
    return _BY_LIST["add"](tensors, [_scaled(y, alpha) for y in others])


@lower("aten::_foreach_sub.List", lift=("alpha",))
def _sub_list(
    tensors: Sequence[jax.Array], others: Sequence[jax.Array], *, alpha: jax.Array | complex = 1
) -> list[jax.Array]:
    return _BY_LIST["sub"](tensors, [_scaled(y, alpha) for y in others])


@lower("aten::_foreach_add.Tensor", lift=("alpha",))
def _add_tensor(
    tensors: Sequence[jax.Array], other: jax.Array, *, alpha: jax.Array | complex = 1
) -> list[jax.Array]:
    return _BY_SCALAR["add"](tensors, _scaled(other, alpha))


@lower("aten::_foreach_pow.ScalarAndTensor", lift=("self",))
def _scalar_to_powers(base: jax.Array | complex, exponents: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.power(*reversed(_together(x, base))) for x in exponents]


# x + value * (a * b) and x + value * (a / b)


def _added(inner: Callable) -> tuple[Callable, Callable]:
    """The list operators with one scalar for all, and with a scalar for each element."""

    def add_pair(x: jax.Array, a: jax.Array, b: jax.Array, value: jax.Array | complex) -> jax.Array:
        return _BINARY["add"](x, _scaled(inner(a, b), value))

    def by_scalar(
        tensors: Sequence[jax.Array],
        firsts: Sequence[jax.Array],
        seconds: Sequence[jax.Array],
        value: jax.Array | complex = 1,
    ) -> list[jax.Array]:
        return [add_pair(*each, value) for each in zip(tensors, firsts, seconds, strict=True)]

    def by_list(
        tensors: Sequence[jax.Array],
        firsts: Sequence[jax.Array],
        seconds: Sequence[jax.Array],
        scalars: jax.Array | Sequence[jax.Array | complex],
    ) -> list[jax.Array]:
        return [add_pair(*each) for each in zip(tensors, firsts, seconds, scalars, strict=True)]

    return by_scalar, by_list


def _meta_by_tensor(name: str) -> Callable[..., Any]:
    """The meta kernel of a list operator with its scalars in one tensor."""
    with_scalars = getattr(torch.ops.aten, name).ScalarList

    def meta(tensors: Sequence[Any], firsts: Any, seconds: Any, scalars: torch.Tensor) -> Any:
        if scalars.dim() != 1:
            raise RuntimeError(
                f"Expected packed scalar Tensor to be of dimension 1. Got {scalars.dim()} instead."
            )
        if len(scalars) != len(tensors):
            raise RuntimeError(
                f"Expected length of scalars to match input of length {len(tensors)} but got "
                f"{len(scalars)} instead."
            )
        scalar = torch.ones((), dtype=scalars.dtype).item()
        return with_scalars(tensors, firsts, seconds, [scalar] * len(tensors))

    return meta


for _name, _inner in {"addcmul": "mul", "addcdiv": "div"}.items():
    _by_scalar, _by_list = _added(_BINARY[_inner])
    lower(f"aten::_foreach_{_name}.Scalar", lift=("value",))(_by_scalar)
    lower(f"aten::_foreach_{_name}.ScalarList", lift=("scalars",))(_by_list)
    lower(f"aten::_foreach_{_name}.Tensor", meta=_meta_by_tensor(f"_foreach_{_name}"))(_by_list)


def _weights(weight: Any, dtype: np.dtype) -> tuple[Any, Any, Any]:
    """A weight, the one from the other end, and whether the first end is the nearer one."""
    if not _is_scalar(weight):
        weight = weight.astype(dtype)
    return weight, 1 - weight, abs(weight) < 0.5


def _lerp(x: jax.Array, end: jax.Array, weights: Callable[[np.dtype], Any]) -> jax.Array:
    """`x + weight * (end - x)`, measured from the nearer end as torch does."""
    x, end = wide_all(x, end)
    gap = _SUB(end, x)
    weight, rest, near = weights(gap.dtype)
    if isinstance(near, bool):
        return _ADD(x, _MUL(gap, weight)) if near else _SUB(end, _MUL(gap, rest))
    return jnp.where(near, _ADD(x, _MUL(gap, weight)), _SUB(end, _MUL(gap, rest)))


@lower("aten::_foreach_lerp.Scalar", lift=("weight",))
def _lerp_by_scalar(
    tensors: Sequence[jax.Array], ends: Sequence[jax.Array], weight: jax.Array | complex
) -> list[jax.Array]:
    weights = functools.cache(functools.partial(_weights, weight))
    return [_lerp(x, end, weights) for x, end in zip(tensors, ends, strict=True)]


@lower("aten::_foreach_lerp.List", "aten::_foreach_lerp.ScalarList", lift=("weight",))
def _lerp_by_list(
    tensors: Sequence[jax.Array], ends: Sequence[jax.Array], weight: Sequence[jax.Array | complex]
) -> list[jax.Array]:
    each = zip(tensors, ends, weight, strict=True)
    return [_lerp(x, end, functools.partial(_weights, weight)) for x, end, weight in each]


# The rest


@lower("aten::_foreach_copy")
def _copy(
    tensors: Sequence[jax.Array], sources: Sequence[jax.Array], non_blocking: bool = False
) -> list[jax.Array]:
    pairs = zip(tensors, sources, strict=True)
    return [cast(jnp.broadcast_to(source, x.shape), x.dtype) for x, source in pairs]


@lower("aten::_foreach_mm")
def _mm(tensors: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    return [integer_products.matmul(x, y) for x, y in zip(tensors, others, strict=True)]


@lower("aten::_foreach_norm.Scalar")
def _norm(
    tensors: Sequence[jax.Array], ord: float = 2, dtype: np.dtype | None = None
) -> list[jax.Array]:
    return [_vector_norm(wide(x if dtype is None else x.astype(dtype)), ord) for x in tensors]


@lower("aten::_foreach_powsum.Scalar")
def _powsum(
    tensors: Sequence[jax.Array], ord: float = 2, dtype: np.dtype | None = None
) -> list[jax.Array]:
    widened = [wide(x if dtype is None else x.astype(dtype)) for x in tensors]
    return [jnp.sum(jnp.abs(x) ** ord) for x in widened]


def _vector_norm(x: jax.Array, ord: float) -> jax.Array:
    """The norm of all elements, without the flattening that would undo a sharding."""
    size = jnp.abs(x)
    if ord == 2:
        return jnp.sqrt(jnp.sum(jnp.square(size)))
    if ord == 1:
        return jnp.sum(size)
    if ord == 0:
        return jnp.sum(cast(size != 0, size.dtype))
    if ord == float("inf"):
        return largest(size, initial=0)
    if ord == float("-inf"):
        return smallest(size, initial=jnp.inf)
    return jnp.sum(size**ord) ** (1 / ord)
