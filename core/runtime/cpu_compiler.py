"""Options for XLA's CPU compiler where its default computes wrong values.

XLA fuses reductions with their operands into calls of a library (YNNPACK), which does not round
bfloat16 values in between, whatever `xla_allow_excess_precision` is, and returns NaN for random
elements (jax 0.10.2, 120 of 960 sums of 4,000 elements and more). So programs with bfloat16 reduce
without it; others use it, as it is up to three times as fast.

>>> text = jax.jit(lambda x: x.astype("bfloat16")).trace(jax.numpy.ones(2)).jaxpr
>>> sorted(options(text, "cpu"))
['xla_cpu_experimental_ynn_fusion_type']
>>> options(text, "tpu"), options(jax.make_jaxpr(jax.numpy.sin)(1.0), "cpu")
({}, {})
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from .jaxprs import equations

_FUSED = "xla_cpu_experimental_ynn_fusion_type"
_PRODUCTS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"


def options(program: Any, platform: str) -> dict[str, Any]:
    """The compiler options for a traced program.

    Args:
        program: a jaxpr.
        platform: of its devices, such as `"cpu"`.

    Returns:
        Names and values for `jax.stages.Lowered.compile`.
    """
    reduces_wrongly = platform == "cpu" and _has_bfloat16(program) and _is_supported()
    return {_FUSED: _PRODUCTS} if reduces_wrongly else {}


def _has_bfloat16(program: Any) -> bool:
    return any(any(map(_is_bfloat16, (*step.invars, *step.outvars))) for step in equations(program))


def _is_bfloat16(var: Any) -> bool:
    return getattr(var.aval, "dtype", None) == jnp.bfloat16


@functools.cache
def _is_supported() -> bool:
    """Whether this XLA has such an option; a program is compiled to find out."""
    try:
        jax.jit(lambda: 0).lower().compile({_FUSED: _PRODUCTS})
    except jax.errors.JaxRuntimeError:
        return False
    return True
