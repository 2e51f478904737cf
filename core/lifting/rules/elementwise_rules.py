"""Elementwise primitives: on the padded arrays; padding only affects padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from isoshard.core.blocks.block_values import Value, aligned, joint_hints
from isoshard.core.blocks.interpreting import bind, rule, run_unpacked
from isoshard.core.runtime._jax_internals.jaxpr_classes import JaxprEqn
from isoshard.core.runtime.jaxprs import ELEMENTWISE

# f(0) = 0: zero padding remains zero, which saves a mask.
_KEEP_ZEROS = frozenset(
    """abs asin asinh atan atanh bitcast_convert_type ceil conj convert_element_type copy copy_p erf
    erf_inv expm1 floor imag log1p name neg real reduce_precision round sign sin sinh sqrt square
    stop_gradient tan tanh""".split()
)


@rule(*ELEMENTWISE, "name")
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
