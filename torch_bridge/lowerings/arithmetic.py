"""Functions of several arrays, element by element: arithmetic, bits, comparisons, choice.

>>> from isoshard.torch_bridge.lowerings import registry
>>> floor_divide = registry.find(torch.ops.aten.floor_divide.default).function
>>> jax.jit(floor_divide)(jnp.array([7.0, -7.0, 1.0]), jnp.array([2.0, 2.0, 0.0]))
Array([ 3., -4., inf], dtype=float32)

Operands arrive in their common dtype. Numbers that scale a term (`alpha`, `value`, `weight`) or
replace a tensor are lifted: a new learning rate is a new input, not a new program.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch

from . import incomplete_gamma
from .argument_forms import as_scalar, cast, wide, widely
from .log_sum import log_add_exp
from .memory_order import lower_cloned, lower_contiguous, lower_elementwise
from .registry import lower


@lower("aten::add.Tensor", "aten::add.Scalar", promote="math", lift=("other", "alpha"))
def add(x: jax.Array, other: jax.Array, alpha: jax.Array | None = None) -> jax.Array:
    """`x + alpha other`."""
    return x + (other if alpha is None else alpha * other)


@lower("aten::sub.Tensor", "aten::sub.Scalar", promote="math", lift=("other", "alpha"))
def sub(x: jax.Array, other: jax.Array, alpha: jax.Array | None = None) -> jax.Array:
    """`x - alpha other`."""
    return x - (other if alpha is None else alpha * other)


@lower("aten::rsub.Tensor", "aten::rsub.Scalar", promote="math", lift=("other", "alpha"))
def rsub(x: jax.Array, other: jax.Array, alpha: jax.Array | None = None) -> jax.Array:
    """`other - alpha x`."""
    return other - (x if alpha is None else alpha * x)


@lower("aten::mul.Tensor", "aten::mul.Scalar", promote="math", lift=("other",))
def mul(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x other`; of bools, their conjunction."""
    return x * other


@lower("aten::div.Tensor", "aten::div.Scalar", promote="float", lift=("other",))
def div(x: jax.Array, other: jax.Array) -> jax.Array:
    """True division."""
    return x / other


@lower_elementwise(
    "aten::div.Tensor_mode", "aten::div.Scalar_mode", promote="math", lift=("other",)
)
def div_mode(x: jax.Array, other: jax.Array, *, rounding_mode: str | None = None) -> jax.Array:
    """Division, true (None), rounded to zero (`"trunc"`) or down (`"floor"`)."""
    if rounding_mode is None:
        return jnp.true_divide(x, other)
    if rounding_mode == "floor":
        return floor_divide(x, other)
    return jax.lax.div(*jnp.broadcast_arrays(x, other)) if _integer(x) else jnp.trunc(x / other)


@lower_elementwise(
    "aten::floor_divide", "aten::floor_divide.Scalar", promote="math", lift=("other",)
)
def floor_divide(x: jax.Array, other: jax.Array) -> jax.Array:
    """Division rounded down; a float divided by 0 is infinite or NaN."""
    if _integer(x):
        return jnp.floor_divide(x, other)
    rest = jnp.fmod(x, other)
    quotient = (x - rest) / other
    quotient = jnp.round(
        jnp.where((rest != 0) & ((other < 0) != (rest < 0)), quotient - 1, quotient)
    )
    quotient = jnp.where(quotient == 0, jnp.copysign(as_scalar(0, x.dtype), x / other), quotient)
    return jnp.where(other == 0, x / other, quotient)


_PROMOTED = {
    "remainder.Tensor": jnp.remainder,
    "remainder.Scalar": jnp.remainder,
    "remainder.Scalar_Tensor": jnp.remainder,
    "fmod.Tensor": jnp.fmod,
    "fmod.Scalar": jnp.fmod,
    "maximum": jnp.maximum,
    "minimum": jnp.minimum,
    "max.other": jnp.maximum,
    "min.other": jnp.minimum,
    "fmax": jnp.fmax,
    "fmin": jnp.fmin,
    "hypot": jnp.hypot,
    "gcd": jnp.gcd,
    "lcm": jnp.lcm,
    "nextafter": jnp.nextafter,
    "logaddexp": log_add_exp,
    "logaddexp2": jnp.logaddexp2,
    "igamma": incomplete_gamma.regularized_lower,
    "igammac": incomplete_gamma.regularized_upper,
    "polar": lambda size, angle: jax.lax.complex(size * jnp.cos(angle), size * jnp.sin(angle)),
    "complex": lambda real, imag: jax.lax.complex(*jnp.broadcast_arrays(real, imag)),
    "clamp_min": jnp.maximum,
    "clamp_min.Tensor": jnp.maximum,
    "clamp_max": jnp.minimum,
    "clamp_max.Tensor": jnp.minimum,
}
_BITS = {
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
    "left_shift": jnp.left_shift,
    "right_shift": jnp.right_shift,
}
_BY_REFERENCES = ("gcd", "lcm", "logaddexp", "logaddexp2")  # torch's shapes of these
_WIDE = ("remainder", "fmod", "hypot", "logaddexp", "igamma")
for _name, _function in _PROMOTED.items():
    _lower = lower_elementwise if _name in _BY_REFERENCES else lower
    _lower(f"aten::{_name}", promote="inputs")(
        widely(_function) if _name.startswith(_WIDE) else _function
    )
for _name, _function in _BITS.items():
    for _overload in ("Tensor", "Scalar", "Tensor_Scalar", "Scalar_Tensor"):
        lower(f"aten::bitwise_{_name}.{_overload}", promote="inputs")(_function)
    _dunder = {"left_shift": "lshift", "right_shift": "rshift"}.get(_name, _name)
    for _overload in ("Tensor", "Scalar"):
        _like = getattr(
            torch.ops.aten, f"bitwise_{_name}"
        )  # the meta kernels of shifts reject bools
        lower(f"aten::__{_dunder}__.{_overload}", promote="inputs", meta=_like)(_function)


def _of_truths(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`function` of whether each operand is not 0; they may differ in dtype."""
    return lambda x, other: function(x != 0, other != 0)


for _name in ("and", "or", "xor"):
    lower_elementwise(f"aten::logical_{_name}")(_of_truths(_BITS[_name]))

lower("aten::atan2", promote="float")(jnp.arctan2)
lower_elementwise("aten::copysign.Tensor", "aten::copysign.Scalar", promote="float")(jnp.copysign)


def _power_shape(x: torch.Tensor, exponent: complex) -> torch.Tensor:
    """torch's `meta` kernel makes integers of bools to the power of a bool; others keep bool."""
    if x.dtype == torch.bool and type(exponent) is bool:
        return torch.empty_like(x)
    return torch.ops.aten.pow.Tensor_Scalar(x, exponent)


@lower("aten::pow.Tensor_Scalar", "aten::pow_.Scalar", meta=_power_shape)
def pow_scalar(x: jax.Array, exponent: complex) -> jax.Array:
    """A static power: small integer exponents become products."""
    if isinstance(exponent, complex):
        x = x.astype(jnp.result_type(x, jnp.complex64))
        if exponent.imag:
            return _complex_power(x, as_scalar(exponent, x.dtype))
        exponent = exponent.real
    if not jnp.issubdtype(x.dtype, jnp.inexact) and isinstance(exponent, float):
        x = x.astype(jnp.float32)
    if isinstance(exponent, float) and exponent.is_integer() and abs(exponent) <= 8:
        exponent = int(exponent)
    base = wide(x)
    if base.dtype != x.dtype and isinstance(exponent, float):
        exponent = float(np.asarray(exponent, x.dtype))  # torch rounds it too
    if abs(exponent) == 0.5:
        return jnp.sqrt(base) if exponent > 0 else jax.lax.rsqrt(base)
    return jnp.power(base, exponent).astype(jnp.result_type(x, exponent))


def _scalar_base_power_shape(x: complex, exponent: torch.Tensor) -> torch.Tensor:
    """torch's `meta` kernel keeps the order in memory; the others give row-major order."""
    result = torch.ops.aten.pow.Scalar(x, exponent)
    return torch.empty(result.shape, dtype=result.dtype, device="meta")


@lower("aten::pow.Scalar", promote="inputs", meta=_scalar_base_power_shape)
def power_by_scalar(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """A scalar to a power."""
    return pow_tensor(x, exponent)


@lower("aten::pow.Tensor_Tensor", promote="inputs")
@widely
def pow_tensor(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """A power; integers to a negative power are 0 unless the base is 1 or -1."""
    if jnp.iscomplexobj(x):
        return _complex_power(x, exponent)
    if not _integer(x):
        return jnp.power(x, exponent)
    power = _integer_power(x, jnp.abs(exponent))
    unit = jnp.where((x == 1) | (x == -1), power, jnp.zeros_like(power))
    return jnp.where(exponent < 0, unit, power)


def _integer_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """An integer to a power that is not negative, as it overflows; `jnp.power` looks at 6 bits.

    >>> int(_integer_power(jnp.int32(3), jnp.int32(100))) % 2**32 == 3**100 % 2**32
    True
    """
    digits = jnp.iinfo(exponent.dtype)

    def digit(
        _: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        power, square, exponent = state
        power = jnp.where(exponent & 1 == 1, power * square, power)
        return power, square * square, exponent >> 1

    # Unrolled, XLA may fuse each square anew into all that comes after it: gigabytes of code.
    x, exponent = jnp.broadcast_arrays(x, exponent)
    start = (jnp.ones_like(x), x, exponent)
    return jax.lax.fori_loop(0, digits.bits - (digits.min < 0), digit, start)[0]


def _complex_power(x: jax.Array, exponent: jax.Array) -> jax.Array:
    """`exp(exponent log(x))`, also at 0, where XLA's product with an infinite logarithm is NaN."""
    power = jnp.power(jnp.where(x == 0, 1, x), exponent)
    up = jnp.real(exponent)
    of_zero = jnp.where(up > 0, 0, jnp.where(up < 0, complex("inf+nanj"), complex("nan+nanj")))
    power = jnp.where(x == 0, of_zero.astype(power.dtype), power)
    return jnp.where(jnp.isnan(x), jnp.full_like(power, complex("nan+nanj")), power)


@lower_elementwise(
    "aten::xlogy.Tensor", "aten::xlogy.Scalar_Self", "aten::xlogy.Scalar_Other", promote="float"
)
def xlogy(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x log(other)`, 0 where `x` is 0 and `other` is not NaN."""
    zero = (x == 0) & ~jnp.isnan(other)
    return jnp.where(zero, jnp.zeros_like(x), x * jnp.log(jnp.where(zero, 1, other)))


@lower(
    "aten::special_xlog1py",
    "aten::special_xlog1py.self_scalar",
    "aten::special_xlog1py.other_scalar",
    promote="float",
)
def xlog1py(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x log(1 + other)`, 0 where `x` is 0 and `other` is not NaN."""
    zero = (x == 0) & ~jnp.isnan(other)
    return jnp.where(zero, jnp.zeros_like(x), x * jnp.log1p(jnp.where(zero, 0, other)))


@lower_elementwise("aten::heaviside", promote="inputs")
def heaviside(x: jax.Array, values: jax.Array) -> jax.Array:
    """0 below 0 (and for NaN), 1 above, `values` at 0."""
    return jnp.where(x == 0, values, cast(x > 0, x.dtype))


@lower("aten::addcmul", promote="math", lift=("value",))
def addcmul(
    x: jax.Array, tensor1: jax.Array, tensor2: jax.Array, *, value: jax.Array | None = None
) -> jax.Array:
    """`x + value tensor1 tensor2`."""
    product = tensor1 * tensor2
    return x + (product if value is None else value * product)


@lower("aten::addcdiv", promote="float", lift=("value",))
def addcdiv(
    x: jax.Array, tensor1: jax.Array, tensor2: jax.Array, *, value: jax.Array | None = None
) -> jax.Array:
    """`x + value tensor1 / tensor2`."""
    return x + (tensor1 if value is None else value * tensor1) / tensor2


@lower("aten::lerp.Scalar", "aten::lerp.Tensor", promote="math", lift=("weight",))
def lerp(x: jax.Array, end: jax.Array, weight: jax.Array) -> jax.Array:
    """From `x` to `end` by `weight`, exact at both ends."""
    step = end - x
    near = jnp.abs(weight) < 0.5
    return jnp.where(near, x + weight * step, end - step * (1 - weight))


@lower("aten::clamp", "aten::clamp.Tensor", promote="inputs")
def clamp(x: jax.Array, min: jax.Array | None = None, max: jax.Array | None = None) -> jax.Array:
    """`x` clamped to the bounds; the upper one wins, NaN is propagated."""
    x = x if min is None else jnp.maximum(x, min)
    return x if max is None else jnp.minimum(x, max)


@lower(
    "aten::where.self",
    "aten::where.ScalarSelf",
    "aten::where.ScalarOther",
    "aten::where.Scalar",
    promote="inputs",
    lift=("self", "other"),
)
def where(condition: jax.Array, x: jax.Array, other: jax.Array) -> jax.Array:
    """`x` where the condition is not 0, else `other`."""
    return jnp.where(condition.astype(bool), x, other)


@lower_contiguous("aten::masked_fill.Scalar", "aten::masked_fill.Tensor", lift=("value",))
def masked_fill(x: jax.Array, mask: jax.Array, value: jax.Array | complex) -> jax.Array:
    """`value` where the mask is set, else `x`."""
    return jnp.where(mask.astype(bool), as_scalar(value, x.dtype), x)


@lower_cloned("aten::fill.Scalar", "aten::fill.Tensor", lift=("value",))
def fill(x: jax.Array, value: jax.Array | complex) -> jax.Array:
    """An array like `x`, filled with `value`."""
    return jnp.broadcast_to(as_scalar(value, x.dtype), x.shape)


def _integer(x: jax.Array) -> bool:
    return not jnp.issubdtype(x.dtype, jnp.inexact)


_COMPARISONS = {
    "eq": jnp.equal,
    "ne": jnp.not_equal,
    "lt": jnp.less,
    "le": jnp.less_equal,
    "gt": jnp.greater,
    "ge": jnp.greater_equal,
}

for _name, _function in _COMPARISONS.items():
    lower(f"aten::{_name}.Tensor", f"aten::{_name}.Scalar", promote="inputs", lift=("other",))(
        _function
    )
