"""Elementwise primitives: on the padded arrays; padding only affects padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from isoshard.core.blocks.block_values import Value, aligned, joint_hints
from isoshard.core.blocks.interpreting import bind, rule, run_unpacked
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn

_ONE = """abs acos acosh asin asinh atan atanh bessel_i0e bessel_i1e cbrt ceil clz conj copy copy_p
    convert_element_type cos cosh digamma erf erf_inv erfc exp exp2 expm1 floor imag integer_pow
    is_finite lgamma log log1p log2 logistic name neg not one_minus_square population_count real
    reduce_precision round rsqrt sign sin sinh sqrt square stop_gradient tan tanh"""
_MORE = """add add_any and atan2 clamp complex div eq eq_to ge gt igamma igamma_grad_a igammac le
    le_to lt lt_to max min mul ne nextafter or polygamma polynomial pow
    regularized_incomplete_beta rem select_n shift_left shift_right_arithmetic
    shift_right_logical sub xor zeta"""
# f(0) = 0: zero padding remains zero, which saves a mask.
_KEEP_ZEROS = frozenset(
    """abs asin asinh atan atanh bitcast_convert_type ceil conj convert_element_type copy copy_p erf
    erf_inv expm1 floor imag log1p name neg real reduce_precision round sign sin sinh sqrt square
    stop_gradient tan tanh""".split()
)


@rule(*_ONE.split(), *_MORE.split())
def elementwise(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """One result per position, padding included."""
    hints = joint_hints(values)
    values, splits = aligned(values, broadcast=True)
    (array,) = bind(eqn, [value.array for value in values])
    clean = eqn.primitive.name in _KEEP_ZEROS and values[0].clean
    return [Value(array, splits, clean, hints=hints)]


@rule("bitcast_convert_type")
def bits(eqn: JaxprEqn, values: list[Value]) -> Sequence[Value]:
    """Bits read as another dtype; one of another width gains or loses an axis."""
    same = values[0].array.dtype.itemsize == eqn.params["new_dtype"].itemsize
    return elementwise(eqn, values) if same else run_unpacked(eqn, values)


@rule("optimization_barrier")
def barrier(eqn: JaxprEqn, values: list[Value]) -> list[Value]:
    """Each operand as it is."""
    results = bind(eqn, [value.array for value in values])
    return [
        dataclasses.replace(value, array=array, sliced_from=())
        for array, value in zip(results, values, strict=True)
    ]
