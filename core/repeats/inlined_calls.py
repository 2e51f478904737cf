"""A program with its small `jit` calls inlined, as a compiler inlines them.

The equations inside a call are then visible: the zeros of `jnp.where(mask, x, 0.0)` are a
constant, which no loop has to save for the next.

>>> import jax, jax.numpy as jnp
>>> program = jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 0.0))(jnp.ones(4))
>>> [eqn.primitive.name for eqn in program.eqns]
['gt', 'jit']
>>> [eqn.primitive.name for eqn in inlined(program).eqns]
['gt', 'convert_element_type', 'broadcast_in_dim', 'select_n']
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Sharding

from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr
from isoshard.core.runtime.jaxprs import CALLS, equations, jaxprs_inside
from isoshard.core.runtime.jaxprs import inlined as inlined_once

_INLINED = ("jit", "closed_call", "eval_jaxpr", "custom_vjp_call", "split_operator")
_BODY = {name: CALLS[name] for name in _INLINED}
"""Primitive that calls one program with its operands -> the parameter that has it."""


def inlined(program: ClosedJaxpr, holding: str = "") -> ClosedJaxpr:
    """Inline calls of `jit` without inner calls, shardings or donation.

    Args:
        program: any closed jaxpr; loops, branches, custom derivatives and calls with these in them
            are not inlined.
        holding: the name of a primitive: instead, all calls with such a primitive at any depth are
            inlined, also of functions with a custom derivative.

    Returns:
        The program; `program` itself if there are no such calls.
    """

    if not holding:
        return inlined_once(program, _small_call)
    while (again := inlined_once(program, lambda eqn: _call_with(eqn, holding))) is not program:
        program = again
    return program


def _call_with(eqn: Any, name: str) -> Any:
    """The body of a call that can be inlined, if it has a primitive in it."""
    body = eqn.params.get(_BODY.get(eqn.primitive.name, ""))
    if body is None or body.consts:
        return None
    return body if any(step.primitive.name == name for step in equations(body)) else None


def _small_call(eqn: Any) -> Any:
    """The body of a `jit` call without subjaxprs, shardings, donation or effects."""
    params = eqn.params
    if eqn.primitive.name != "jit" or params["jaxpr"].consts or eqn.effects:
        return None
    if any(any(jaxprs_inside(step.params)) for step in params["jaxpr"].eqns):
        return None
    shardings = (*params["in_shardings"], *params["out_shardings"])
    if any(isinstance(sharding, Sharding) for sharding in shardings):
        return None
    return None if any(params["donated_invars"]) else params["jaxpr"]
