"""A program with its small `jit` calls written out, as a compiler writes them out.

What is inside of a call is then seen: of `jnp.where(mask, x, 0.0)` the zeros are a constant, which
no loop has to keep for the next.

>>> import jax, jax.numpy as jnp
>>> program = jax.make_jaxpr(lambda x: jnp.where(x > 0, x, 0.0))(jnp.ones(4))
>>> [one.primitive.name for one in program.eqns]
['gt', 'jit']
>>> [one.primitive.name for one in inlined(program).eqns]
['gt', 'convert_element_type', 'broadcast_in_dim', 'select_n']
"""

from __future__ import annotations

from typing import Any

from jax.sharding import Sharding

from isoshard.core.runtime._jax_internals.jaxpr_classes import ClosedJaxpr
from isoshard.core.runtime.jaxprs import CALLS, equations, jaxprs_inside
from isoshard.core.runtime.jaxprs import inlined as inlined_once

_WRITTEN_OUT = ("jit", "closed_call", "eval_jaxpr", "custom_vjp_call", "split_operator")
_BODY = {name: CALLS[name] for name in _WRITTEN_OUT}
"""Primitive that calls one program with its operands -> the parameter that has it."""


def inlined(program: ClosedJaxpr, holding: str = "") -> ClosedJaxpr:
    """Write out calls of `jit` that hold no program of their own, and say nothing of layouts.

    Args:
        program: any closed jaxpr; loops, branches, derivatives and calls with these in them stay as
            they are.
        holding: the name of a primitive: instead of these, all calls are written out that hold one
            at any depth, also where a function has a gradient of its own.

    Returns:
        The same program; the one given if there are no such calls.
    """

    if not holding:
        return inlined_once(program, _small_call)
    while (again := inlined_once(program, lambda eqn: _call_with(eqn, holding))) is not program:
        program = again
    return program


def _call_with(eqn: Any, name: str) -> Any:
    """What a call that can be written out calls, if it has a primitive in it."""
    body = eqn.params.get(_BODY.get(eqn.primitive.name, ""))
    if body is None or body.consts:
        return None
    return body if any(step.primitive.name == name for step in equations(body)) else None


def _small_call(eqn: Any) -> Any:
    """What a `jit` without programs inside, shardings, donation or effects calls."""
    params = eqn.params
    if eqn.primitive.name != "jit" or params["jaxpr"].consts or eqn.effects:
        return None
    if any(any(jaxprs_inside(step.params)) for step in params["jaxpr"].eqns):
        return None
    shardings = (*params["in_shardings"], *params["out_shardings"])
    if any(isinstance(sharding, Sharding) for sharding in shardings):
        return None
    return None if any(params["donated_invars"]) else params["jaxpr"]
