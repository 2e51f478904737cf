"""What XLA's compiler for CPUs is told, where its own choice gives wrong numbers.

XLA hands reductions to a library (YNNPACK) together with what is computed before them. Of what is
in bfloat16 there it rounds nothing, whatever `xla_allow_excess_precision` says, and some elements
become NaN at random (jax 0.10.2, 120 of 960 sums of 4,000 elements and more). So programs with
bfloat16 reduce without it; others keep it, as it is up to three times as fast.

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
from jax.extend.core import jaxprs_in_params

_FUSED = "xla_cpu_experimental_ynn_fusion_type"
_PRODUCTS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"


def options(program: Any, platform: str) -> dict[str, Any]:
    """What to compile a traced program with.

    Args:
        program: a jaxpr.
        platform: of its devices, such as `"cpu"`.

    Returns:
        Names and values for `jax.stages.Lowered.compile`.
    """
    return without_fused_reductions(platform) if has_bfloat16(program) else {}


def without_fused_reductions(platform: str) -> dict[str, Any]:
    """What to compile a program with that has bfloat16; nothing where XLA knows no such option."""
    return {_FUSED: _PRODUCTS} if platform == "cpu" and _is_known() else {}


def has_bfloat16(program: Any) -> bool:
    """Whether anything in a jaxpr is in bfloat16."""
    return any(
        any(_is_bfloat16(var) for var in (*eqn.invars, *eqn.outvars))
        or any(map(has_bfloat16, jaxprs_in_params(eqn.params)))
        for eqn in program.eqns
    )


def _is_bfloat16(var: Any) -> bool:
    return getattr(var.aval, "dtype", None) == jnp.bfloat16


@functools.cache
def _is_known() -> bool:
    try:
        jax.jit(lambda: 0).lower().compile({_FUSED: _PRODUCTS})
    except jax.errors.JaxRuntimeError:
        return False
    return True
