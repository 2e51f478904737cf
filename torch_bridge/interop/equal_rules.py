"""Functions with gradients of their own, in a traced program: which of them are one function.

Each call of a `torch.autograd.Function` in `jax_function` is a `jax.custom_vjp` of its own, and so
are many of JAX's users'. The calls of equal layers compute alike, and JAX sees different functions.
What such a call computes, and what its gradient does, is traced here and compared. Where both are
equal, one function stands for all, so that the layers can become a loop; any others stay apart.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.dtypes import float0

from isoshard.core.runtime._jax_internals.jaxpr_classes import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    Literal,
    Var,
    jaxpr_as_fun,
)
from isoshard.core.runtime.jaxprs import closed, replaced
from isoshard.core.runtime.jaxprs import equations as equations_of

_CALLS = ("custom_vjp_call", "custom_jvp_call")
_NAMES: Any = DebugInfo("equal_rules", "called", None, None)


def with_equal_rules(program: ClosedJaxpr) -> ClosedJaxpr:
    """A program in which equal functions with gradients of their own are one object.

    Args:
        program: a traced function.

    Returns:
        A program that computes the same, with the same gradients.
    """
    known: dict[Hashable, Any] = {}
    alive = []  # the constants of rules are told apart by their identity
    equations = []
    for equation in program.eqns:
        if equation.primitive.name.startswith(_CALLS):
            traced, rule = _rule(equation)
            alive.append(traced)
            if rule is not None:
                equation = equation.replace(params=known.setdefault(rule, equation.params))
        equations.append(equation)
    if not known:
        return program
    return replaced(program, eqns=equations)


def _rule(equation: Any) -> tuple[ClosedJaxpr | None, Hashable]:
    """What a call and its gradient compute, traced and as a key; None if that cannot be told."""
    inputs = [*dict.fromkeys(one for one in equation.invars if isinstance(one, Var))]
    alone = Jaxpr([], inputs, list(equation.outvars), [equation], equation.effects, _NAMES)
    called = jaxpr_as_fun(closed(alone))

    def both(given: list[Any], cotangents: list[Any]) -> list[Any]:
        results, pull = jax.vjp(lambda *values: called(*values), *given)
        gradients = pull(cotangents)
        return [*results, *[one for one in gradients if one.dtype != float0]]

    structs = [[_struct(one.aval) for one in some] for some in (inputs, equation.outvars)]
    try:
        traced = jax.make_jaxpr(both)(*structs)
    except Exception:  # it has a gradient for some uses only, so it is like no other
        return None, None
    own, text = str(equation.params.get("call_jaxpr")), str(traced)
    is_again = any(str(one.params.get("call_jaxpr")) == own for one in traced.eqns)
    inside = sum(map(text.count, _CALLS)) > is_again  # its own gradient is not in the text
    if inside or any(_is_array(one) for step in equations_of(traced) for one in step.invars):
        return None, None
    operands = [inputs.index(one) if isinstance(one, Var) else str(one) for one in equation.invars]
    return traced, (equation.primitive.name, text, (*map(id, traced.consts),), (*operands,))


def _is_array(operand: Any) -> bool:
    """Whether it is a literal that a text may not show whole."""
    return isinstance(operand, Literal) and bool(np.shape(operand.val))


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)
